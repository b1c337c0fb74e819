"""Between host and device: micro-batches copied one ahead, and tensors that savers keep in host memory.

A copy that is enqueued on the stream that computes waits for what is computed there, however asynchronous
the call was. So on CUDA the copies have a stream of their own, from pinned memory, one micro-batch ahead.

What stands in host memory to save the device's is made by `host_like` alone. On a CPU, and in a memory trace,
host and device are one, and nothing but this says which of the two a tensor stands for.
"""

import functools
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

import torch
from torch.utils.weak import WeakIdKeyDictionary

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


_allocating_on_host: ContextVar[bool] = ContextVar("allocating_on_host", default=False)
_host_storages: WeakIdKeyDictionary = WeakIdKeyDictionary()


def host_like(tensor: torch.Tensor) -> torch.Tensor:
    """An empty tensor of the same shape, strides and dtype in host memory; pinned for a CUDA tensor."""
    token = _allocating_on_host.set(True)
    try:
        empty = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
    finally:
        _allocating_on_host.reset(token)
    _host_storages[empty.untyped_storage()] = True
    return empty


def allocating_on_host() -> bool:
    """Whether what is allocated right now is a tensor of `host_like`'s."""
    return _allocating_on_host.get()


def stands_on_host(tensor: torch.Tensor) -> bool:
    """Whether `host_like` made the tensor (or what it is a view of)."""
    return tensor.untyped_storage() in _host_storages
