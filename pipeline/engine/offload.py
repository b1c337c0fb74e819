"""Activations in host memory: what a forward saves for its backward waits there until it is needed.

Between a layer's forward and its backward lies the rest of the model, and all that time its activations
occupy the device for nothing. Here autograd's hooks on saved tensors copy them out as they are saved and
back as the backward asks for them: the same bits with the same strides, so that the same kernels give the
same gradients.

What stays on the device: parameters, buffers and the micro-batch, which are there anyhow; half-precision
casts of parameters, which autocast keeps for the whole window; and small storages, whose copies cost more
time than they free memory. A storage is copied once, however many tensors of it are saved; where
one needs less than half of it, only that part.

On CUDA the copies out run on a stream of their own beside the computation. The device memory of the last
few is held until the computing stream has been told to wait for them: so it is free for what is computed
next, at the same place in every window, as a memory trace on a CPU counts it. The copies back are enqueued
on the computing stream, where the order of things is the order of the program.
"""

import functools
import re
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakIdKeyDictionary

from pipeline.engine.transfer import host_like
from pipeline.engine.window import Batch, tensors

Forward = Callable[[nn.Module, Batch], tuple[Any, ...]]

# Up to this size CUDA's allocator serves requests from a pool of small blocks (kSmallSize of
# c10/cuda/CUDACachingAllocator): what is freed there is of no use to the large ones that make the peak.
SMALL_BYTES = 2**20
COPIES_UNDERWAY = 2  # one is copied while the next is computed
VIEW_OR_CAST = re.compile(  # autograd's nodes that move or convert elements and compute none, of one input
    "(Alias|AsStrided|Clone|Diagonal|Expand|Permute|ReshapeAlias|Select|Slice|Split|SplitWithSizes|Squeeze|T|"
    "ToCopy|Transpose|Unbind|UnsafeSplit|UnsafeView|Unsqueeze|View)Backward[0-9]"
)


def offloaded(forward: Forward, model: nn.Module, *, small_bytes: int = SMALL_BYTES) -> Forward:
    """A Trainer's `forward`, such that what autograd saves in it for the backward waits in host memory.

    model: whose parameters and buffers stay. small_bytes: storages of fewer bytes stay too. Where torch would
    refuse a backward because a saved tensor was changed after the forward, small ones are refused as well;
    of the others the backward gets a copy.
    """

    def forward_to_host(trained: nn.Module, batch: Batch) -> tuple[Any, ...]:
        saved = _Saved(model, batch, small_bytes)
        with saved_tensors_hooks(saved.pack, saved.unpack):
            outputs = forward(trained, batch)
        saved.finish()
        return outputs

    return forward_to_host


@dataclass
class _Kept:
    """A saved tensor that stays on the device."""

    tensor: Tensor
    version: int


@dataclass
class _Moved:
    """A saved tensor as a view of a copy."""

    copy: "_Copy"
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # in the copy, in elements


class _Copy:
    """Elements [start, stop) of a storage, taken as `dtype`, in host memory."""

    def __init__(self, flat: Tensor, start: int, version: int) -> None:
        self.start, self.stop, self.dtype, self.version = start, start + len(flat), flat.dtype, version
        self.device = flat.device
        self.host = host_like(flat)
        self.wanted = 0  # by saved tensors that did not come back yet
        self.arrived: torch.cuda.Event | None = None
        if flat.device.type == "cuda":
            stream = _stream_out(flat.device)
            stream.wait_stream(torch.cuda.current_stream(flat.device))
            with torch.cuda.stream(stream):
                self.host.copy_(flat, non_blocking=True)
                self.arrived = stream.record_event()
        else:
            self.host.copy_(flat)

    def covers(self, start: int, stop: int, dtype: torch.dtype, version: int) -> bool:
        return (self.dtype, self.version) == (dtype, version) and self.start <= start and stop <= self.stop

    def wait(self) -> None:
        """What is enqueued on the computing stream from here on comes after the copy out."""
        if self.arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(self.arrived)

    def back(self) -> Tensor:
        self.wait()
        return torch.empty_like(self.host, device=self.device).copy_(self.host, non_blocking=True)


class _Saved:
    """The hooks of one micro-batch's forward."""

    def __init__(self, model: nn.Module, batch: Batch, small_bytes: int) -> None:
        self.small_bytes = small_bytes
        self.devices = {parameter.device.type for parameter in model.parameters()}
        self.resident: WeakIdKeyDictionary = WeakIdKeyDictionary()  # storages that are there anyhow
        for tensor in (*model.parameters(), *model.buffers(), *tensors(batch)):
            self.resident[tensor.untyped_storage()] = True
        self.copies: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by storage, for those that are alive
        self.underway: deque[tuple[_Copy, Tensor]] = deque()
        self.returned: tuple[_Copy, Tensor] | None = None  # the last copy back, while more of it is wanted

    @torch.no_grad()
    def pack(self, tensor: Tensor) -> _Kept | _Moved:
        if self._stays(tensor):  # detached: a saved tensor that holds its own graph is never freed
            return _Kept(tensor.detach(), tensor._version)
        start, stop = _span(tensor)
        copy = self._copy(tensor, start, stop)
        copy.wanted += 1
        return _Moved(copy, tensor.shape, tensor.stride(), int(tensor.storage_offset()) - copy.start)

    @torch.no_grad()
    def unpack(self, packed: _Kept | _Moved) -> Tensor:
        if isinstance(packed, _Moved):
            return self._back(packed.copy).as_strided(packed.size, packed.stride, packed.offset)
        if packed.tensor._version != packed.version:  # under hooks autograd itself does not look
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: {list(packed.tensor.shape)} is at version {packed.tensor._version}, expected "
                f"version {packed.version}"
            )
        return packed.tensor

    def finish(self) -> None:
        """The forward is over: what is underway still is waited for, and its device memory let go."""
        self._let_go(0)
        self.copies = WeakIdKeyDictionary()

    def _stays(self, tensor: Tensor) -> bool:
        # with a storage that is not theirs alone, or not what they look like
        special = tensor.layout != torch.strided or is_traceable_wrapper_subclass(tensor)
        if special or tensor.is_conj() or tensor.is_neg() or tensor.device.type not in self.devices:
            return True
        storage = tensor.untyped_storage()
        small = tensor.numel() == 0 or storage.nbytes() < self.small_bytes
        return small or storage in self.resident or self._is_of_a_parameter(tensor)

    def _is_of_a_parameter(self, tensor: Tensor) -> bool:
        """Whether only casts and views lie between it and a parameter."""
        node: Any = tensor.grad_fn
        while node is not None and VIEW_OR_CAST.fullmatch(node.name()):
            node = node.next_functions[0][0]
        leaf = getattr(node, "variable", None)  # of an AccumulateGrad
        return leaf is not None and leaf.untyped_storage() in self.resident

    def _copy(self, tensor: Tensor, start: int, stop: int) -> _Copy:
        storage = tensor.untyped_storage()
        known = [copy for one in self.copies.get(storage, []) if (copy := one()) is not None]
        for copy in known:
            if copy.covers(start, stop, tensor.dtype, tensor._version):
                return copy
        whole = storage.nbytes() // tensor.element_size()
        if 2 * (stop - start) > whole:  # interleaved views, as of queries, keys and values, share one copy
            start, stop = 0, whole
        flat = tensor.detach().as_strided((stop - start,), (1,), start)
        copy = _Copy(flat, start, tensor._version)
        self.copies[storage] = [weakref.ref(one) for one in (*known, copy)]
        self.underway.append((copy, flat))
        self._let_go(COPIES_UNDERWAY)
        return copy

    def _back(self, copy: _Copy) -> Tensor:
        """A copy back, one for all that want it in a row: queries, keys and values, or an activation's output
        and the next layer's input."""
        returned, self.returned = self.returned, None
        flat = returned[1] if returned is not None and returned[0] is copy else None
        del returned  # the memory of another one, before this one takes its own
        flat = copy.back() if flat is None else flat
        copy.wanted -= 1
        if copy.wanted > 0:
            self.returned = copy, flat
        return flat

    def _let_go(self, remaining: int) -> None:
        while len(self.underway) > remaining:
            copy, _ = self.underway.popleft()
            copy.wait()


def _span(tensor: Tensor) -> tuple[int, int]:
    """The first of its storage's elements that a tensor takes, and the one after the last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    start = int(tensor.storage_offset())
    return start, start + int(sum((size - 1) * stride for size, stride in steps)) + 1


@functools.cache  # one a device
def _stream_out(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
