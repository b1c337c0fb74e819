"""The state of every generator that a forward may draw from: torch's, Python's, numpy's where it is used.

It is taken as plain numbers and tensors on the host, so that it can be written to a file and read without
running code. That of a GPU stands on the host in the first place: taking it reads nothing from the device.
"""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def random_state(device: torch.device) -> dict[str, Any]:
    """Of the generators of this process, and of `device` where it has its own."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = (name, torch.from_numpy(keys), *rest)
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """What a state of another kind of device says of that device is left out."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state and "numpy" in sys.modules:
        name, keys, *rest = state["numpy"]
        sys.modules["numpy"].random.set_state((name, keys.numpy(), *rest))
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Whatever is drawn inside, what comes after it draws as if nothing had been."""
    state = random_state(device)
    try:
        yield
    finally:
        restore_random_state(state, device)
