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

from pipeline.engine.out_of_memory import is_out_of_memory

FINE, OUT_OF_MEMORY, FAILED = range(3)  # how a rank's part of a window went


class OtherRankError(RuntimeError):
    """This rank's part of the window was fine; another rank ran out of memory in its own."""


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
        self._deferred = False

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
        waits = self._deferred or not last
        return self.model.no_sync() if self.model and waits else nullcontext()

    def defer(self) -> None:
        """From now on no backward communicates: gradients are averaged in `finish`, when all went well.

        That is what recovery from out of memory needs; it costs the overlap of communication and backward.
        """
        self._deferred = self.size > 1

    def finish(self, error: Exception | None, device: torch.device) -> None:
        """After the last micro-batch, or where one failed: averages the gradients, if every rank has its own.

        Raises OtherRankError where another rank ran out of memory, RuntimeError where it failed otherwise.
        """
        if not self._deferred:
            return
        went = FINE if error is None else OUT_OF_MEMORY if is_out_of_memory(error) else FAILED
        worst = self._reduced(went, dist.ReduceOp.MAX, device)
        if error is not None:
            return  # it is on its way to whoever can tell
        if worst == OUT_OF_MEMORY:
            raise OtherRankError("another rank ran out of memory")
        if worst == FAILED:
            raise RuntimeError("another rank failed in its part of this window")
        self._average_gradients(device)

    def smallest(self, value: int, device: torch.device) -> int:
        """Of what the ranks ask for."""
        return self._reduced(value, dist.ReduceOp.MIN, device) if self.size > 1 else value

    def _average_gradients(self, device: torch.device) -> None:
        assert self.model is not None
        parameters = [one for one in self.model.parameters() if one.requires_grad]
        have = torch.tensor([one.grad is not None for one in parameters], dtype=torch.int32, device=device)
        dist.all_reduce(have, op=dist.ReduceOp.MAX, group=self.group)
        for parameter, anywhere in zip(parameters, have.tolist(), strict=True):
            if anywhere:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad, group=self.group)
                parameter.grad /= self.size

    def _reduced(self, value: int, operation: Any, device: torch.device) -> int:
        values = torch.tensor([value], device=device)
        dist.all_reduce(values, op=operation, group=self.group)
        return int(values.item())
