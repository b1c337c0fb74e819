"""A window that several processes share, each with its samples, under DistributedDataParallel (DDP).

DDP averages the gradients over the ranks in the backward. Three things must be right around that. Only the
last micro-batch's backward may synchronise, its forward included, or every micro-batch would be averaged
again. The window's mean is over the samples of all ranks, not the mean of the ranks' means. And all ranks
must take the same decision: they see the same averaged gradients, and sum losses and items before reading.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class Ranks:
    """The processes that train `model` together; without DDP there is one, and nothing is communicated."""

    def __init__(self, model: nn.Module) -> None:
        wrapped = [part for part in model.modules() if isinstance(part, DistributedDataParallel)]
        if len(wrapped) > 1:
            raise ValueError(
                "the model holds several DistributedDataParallel modules: wrap the whole one once"
            )
        if any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
            raise ValueError(
                "the model's parameters are sharded (FSDP, DTensor): a norm of one rank is not all"
            )
        self.model = wrapped[0] if wrapped else None  # torch.compile and own modules may stand around it
        self.group = self.model.process_group if self.model else None
        self.size = dist.get_world_size(self.group) if self.model else 1

    def total(self, samples: int, device: torch.device) -> int | Tensor:
        """The window's samples over all ranks; of several ranks it stays on the device."""
        if self.size == 1:
            return samples
        if samples == 0:
            raise ValueError("this rank's part of the window is empty: give each rank at least one sample")
        return self.sum(torch.full((), samples, dtype=torch.float64, device=device))

    def sum(self, values: Tensor) -> Tensor:
        """Over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values, group=self.group)
        return values

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of a micro-batch: the last one of a window synchronises."""
        return self.model.no_sync() if self.model and not last else nullcontext()
