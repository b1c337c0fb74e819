"""Micro-batches on the device, the next one copied while the present one is computed.

A copy that is enqueued on the stream that computes waits for what is computed there, however asynchronous
the call was. So on CUDA the copies have a stream of their own, from pinned memory, one micro-batch ahead.
"""

import functools
from collections.abc import Iterator, Sequence

import torch

from pipeline.engine.window import Batch, map_tensors, tensors


def on_device(batches: Sequence[Batch], device: torch.device) -> Iterator[Batch]:
    """The batches, in order, each with all its tensors on `device`."""
    if not batches or all(_is_there(tensor, device) for tensor in tensors(batches[0])):
        return iter(batches)
    if device.type != "cuda":
        return (map_tensors(lambda tensor: tensor.to(device), batch) for batch in batches)
    return _copied_ahead(batches, device)


def _is_there(tensor: torch.Tensor, device: torch.device) -> bool:
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)


@functools.cache  # one a device: the allocator keeps what is freed for the stream that had it
def _copying_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _copied_ahead(batches: Sequence[Batch], device: torch.device) -> Iterator[Batch]:
    copying, computing = _copying_stream(device), torch.cuda.current_stream(device)

    def copied(batch: Batch) -> tuple[Batch, torch.cuda.Event]:
        with torch.cuda.stream(copying):
            moved = map_tensors(lambda tensor: _pinned(tensor).to(device, non_blocking=True), batch)
            return moved, copying.record_event()

    upcoming = copied(batches[0])
    for following in [*batches[1:], None]:
        batch, event = upcoming
        if following is not None:
            upcoming = copied(following)
        computing.wait_event(event)
        for tensor in tensors(batch):
            tensor.record_stream(computing)  # its memory goes back only after what computes with it
        yield batch


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.pin_memory() if tensor.device.type == "cpu" and not tensor.is_pinned() else tensor
