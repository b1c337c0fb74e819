"""All that a trainer's next window depends on, as one tree of tensors and plain values.

A training that is put back from it goes on as if nothing had happened, bit for bit: the weights and buffers,
the optimizer's moments and its groups, the loss scale with its tracker, the average, the counters, the
micro-batch, and the random state. It is taken between two windows. Nothing in it is code.
"""

from typing import Any

import torch
from torch import Tensor, nn

from pipeline.engine.random_state import random_state, restore_random_state
from pipeline.engine.state import TrainState
from pipeline.engine.step import Trainer

Snapshot = dict[str, Any]


class NonFiniteError(RuntimeError):
    """A weight or a buffer is inf or NaN: there is nothing to go back to."""


def snapshot(trainer: Trainer) -> Snapshot:
    """The trainer's state; its tensors are the living ones, so write or copy it before the next window.

    Raises NonFiniteError where a weight, an averaged weight or a buffer is not finite. The check reads the
    device.
    """
    model = trainer.model.state_dict()
    others = _other_buffers(trainer.model, model)
    for name, tensor in {**model, **others}.items():
        if isinstance(tensor, Tensor) and not torch.isfinite(tensor).all():
            raise NonFiniteError(f"{name} holds an inf or NaN")
    if not all(torch.isfinite(average).all() for average in trainer.average.averages):
        raise NonFiniteError("the average of the weights holds an inf or NaN")
    return {
        "model": model,
        "other_buffers": others,
        "optimizer": trainer.optimizer.state_dict(),
        "scaler": trainer.precision.state_dict(),
        "average": list(trainer.average.averages),
        "counters": trainer.state.as_dict(),
        "unlearnable": trainer.unlearnable,
        "scale_history": [list(change) for change in trainer.scale_history],
        "micro_batch_size": trainer.micro_batch_size,
        "random": random_state(trainer.precision.device),
    }


@torch.no_grad()
def restore(trainer: Trainer, saved: Snapshot) -> None:
    """Puts the trainer where it was, with the settings of its own; raises ValueError where it does not fit.

    The model, the optimizer and the precision must be made as they were. Before it raises, nothing has moved
    that the message does not name.
    """
    _check_fits(trainer, saved)
    trainer.model.load_state_dict(saved["model"])
    for name, buffer in _other_buffers(trainer.model, saved["model"]).items():
        buffer.copy_(saved["other_buffers"][name])
    trainer.optimizer.state.clear()  # else the old state and the new one would stand on the device together
    trainer.optimizer.load_state_dict(saved["optimizer"])
    trainer.precision.load_state_dict(saved["scaler"])
    for average, value in zip(trainer.average.averages, saved["average"], strict=True):
        average.copy_(value)
    vars(trainer.state).update(vars(TrainState(**saved["counters"])))
    trainer.unlearnable = saved["unlearnable"]
    trainer.scale_history.clear()
    trainer.scale_history.extend((int(step), float(scale)) for step, scale in saved["scale_history"])
    trainer.micro_batch_size = saved["micro_batch_size"]
    restore_random_state(saved["random"], trainer.precision.device)


def on_host(tree: Any) -> Any:
    """A copy of the tree whose tensors stand on the host and are nobody else's."""
    if isinstance(tree, Tensor):
        return tree.detach().to("cpu", copy=True)
    if isinstance(tree, dict):
        return {name: on_host(value) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(on_host(value) for value in tree)
    return tree


def size_in_bytes(tree: Any) -> int:
    """Of the tree's tensors."""
    if isinstance(tree, Tensor):
        return tree.nbytes
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return sum(size_in_bytes(value) for value in values)


def _other_buffers(model: nn.Module, state: dict[str, Any]) -> dict[str, Tensor]:
    """Buffers that state_dict leaves out (persistent=False): a forward may move them all the same."""
    return {name: buffer for name, buffer in model.named_buffers() if name not in state}


def _check_fits(trainer: Trainer, saved: Snapshot) -> None:
    """Raises ValueError for another model, optimizer, precision or average."""
    own = {name: _shape(value) for name, value in trainer.model.state_dict().items()}
    kept = {name: _shape(value) for name, value in saved["model"].items()}
    if own != kept:
        names = [name for name in {**own, **kept} if own.get(name) != kept.get(name)]
        raise ValueError(
            f"another model: {', '.join(names[:3])}{' and more' if len(names) > 3 else ''} differ"
        )
    groups = [len(group["params"]) for group in trainer.optimizer.param_groups]
    if groups != [len(group["params"]) for group in saved["optimizer"]["param_groups"]]:
        raise ValueError("another optimizer: its groups hold other parameters")
    if bool(saved["scaler"]) != trainer.precision.scales:
        raise ValueError("another precision: one has a loss scale and the other has none")
    if len(saved["average"]) != len(trainer.average.averages):
        raise ValueError("one has an average of the weights (EMA) and the other has none")
    if _other_buffers(trainer.model, saved["model"]).keys() != saved["other_buffers"].keys():
        raise ValueError("another model: its buffers differ")


def _shape(value: Any) -> Any:
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else None
