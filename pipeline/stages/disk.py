"""What a training writes to the disk: the model, and on the way to it the checkpoints."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from pipeline.config import Params
from pipeline.memory.devices import in_mib
from pipeline.stages.quantised import BYTES as ADAMW_BYTES

MOMENTUM_BYTES = 4.0  # a parameter, in float32
OVERHEAD_BYTES = 2**17  # of a checkpoint besides tensors: names, the record's rows, random states


@dataclass(frozen=True)
class Space:
    """Bytes; of the tensors exactly, where the optimizer's state is in float32."""

    model: int
    checkpoint: int
    keep: int

    @property
    def checkpoints(self) -> int:
        """At most: those kept, and the next one, which is whole before the oldest goes."""
        return (self.keep + 1) * self.checkpoint

    def __str__(self) -> str:
        return (
            f"{in_mib(self.model)} for the model; {in_mib(self.checkpoints)} for checkpoints while it trains "
            f"({self.keep} of {in_mib(self.checkpoint)}, and one being written)"
        )


def space(params: Params, model: nn.Module) -> Space:
    """Of a model with its frozen parameters frozen, on any device, meta too.

    A checkpoint holds the model, the optimizer's state of what is trainable, the average where there is one,
    and the weights to be saved.
    """
    tensors = model.state_dict().values()
    weights = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    parameters = list(model.parameters())
    trainable = sum(one.numel() for one in parameters if one.requires_grad)
    average = sum(one.numel() * one.element_size() for one in parameters) if params.train.ema_decay else 0
    state = round(trainable * _state_bytes(params))
    return Space(weights, 2 * weights + state + average + OVERHEAD_BYTES, params.checkpoint.keep)


def _state_bytes(params: Params) -> float:
    """A trainable parameter."""
    chosen = params.optimizer
    if chosen.name == "adamw":
        return ADAMW_BYTES[chosen.state_bits]
    return MOMENTUM_BYTES if chosen.momentum else 0.0


def note_on_disk(needed: Space, folder: Path, existing: int) -> None:
    """Says so where the folder's disk is too small for the checkpoints; existing: bytes of those there."""
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    free = shutil.disk_usage(there).free + existing
    if free < needed.checkpoints:
        print(
            f"checkpoints: {folder} has room for {in_mib(free)}, and they take up to "
            f"{in_mib(needed.checkpoints)} ({needed.keep} of {in_mib(needed.checkpoint)}, and one being "
            "written). One that does not fit is not written, and the last one stays: free some space, or set "
            "checkpoint.folder or checkpoint.keep"
        )
