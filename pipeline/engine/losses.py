"""Losses as the step wants them: the sum over a micro-batch's items, and their count.

A mean over a micro-batch cannot be put together again to the mean over the window unless its count is
known. So a loss here is a callable `loss(outputs, targets) -> (sum, count)`: the window adds up both and
divides once. Items are what the loss counts: samples, unmasked tokens, labelled pixels.

`count` is an int, or a 0-dim tensor where it depends on the data (it is then never read on the way).
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

Loss: TypeAlias = Callable[..., tuple[Tensor, int | Tensor]]


def in_float32(tensor: Tensor) -> Tensor:
    """Half-precision outputs as float32: a sum in float16 overflows at 65,504. float64 stays."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


class CrossEntropy:
    """Softmax cross entropy, summed; items are samples.

    outputs: (N, C) logits; targets: (N,) class indices. `label_smoothing` as in torch.
    """

    def __init__(self, label_smoothing: float = 0.0) -> None:
        self.label_smoothing = label_smoothing

    def __call__(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        total = F.cross_entropy(
            in_float32(outputs), targets, reduction="sum", label_smoothing=self.label_smoothing
        )
        return total, targets.shape[0]


def checked(value: Any) -> tuple[Tensor, int | Tensor]:
    """What a loss returned, if it keeps the contract; else ValueError with what it should return."""
    if isinstance(value, tuple) and len(value) == 2:
        total, count = value
        if isinstance(total, Tensor) and total.numel() == 1 and isinstance(count, int | Tensor):
            return total.reshape(()), count
    got = (
        f"{type(value).__name__} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    )
    raise ValueError(
        f"a loss returns (sum over the items, number of items), not {got:.80}; for a criterion that returns "
        "a mean, return (criterion(outputs, targets) * len(targets), len(targets))"
    )
