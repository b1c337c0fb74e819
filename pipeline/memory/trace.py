"""What one optimizer step takes, counted by running it: on fake tensors before a GPU is there, or on real.

It is the engine's own step that runs, the code that trains, so that precision, loss scaling, clipping,
average, BatchNorm, the optimizer and the cache of cast weights all count because they are there. Fake
tensors have shapes and storages but no values and no memory: a model of a billion parameters is traced in
seconds on any machine. The step's one read from the device is answered for it.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.engine import Trainer, accumulation_steps, state_tensors
from pipeline.engine.window import Batch, samples, tensors
from pipeline.memory.cuda_rules import flash_attention, install_autocast_lists
from pipeline.memory.ledger import Ledger, Peak

CUDA_ROUNDING = 512  # bytes; the caching allocator gives out multiples (kMinBlockSize)
GROUP_NORM = torch.ops.aten.native_group_norm.default
GROUP_NORM_BACKWARD = torch.ops.aten.native_group_norm_backward.default
BATCH_NORM = torch.ops.aten.native_batch_norm.default
BATCH_NORM_BACKWARD = torch.ops.aten.native_batch_norm_backward.default
NORMS = (GROUP_NORM, GROUP_NORM_BACKWARD, BATCH_NORM, BATCH_NORM_BACKWARD)


@dataclass(frozen=True)
class Trace:
    """One window's memory in bytes, and what its time can be estimated from."""

    peak: Peak
    peaks: dict[str, int]  # at the highest point of each phase
    highest: dict[str, int]  # of each component, whenever that was
    host: int  # what savers hold in the host's memory, at most
    moved_once: int  # what they carry between host and device a window, both ways together: state
    moved_each: int  # and for all micro-batches of this window: activations
    flops: int
    operations: int  # of forward and backward
    micro_batches: int
    events: list[tuple[int, int]]  # for a replay: (storage, bytes), negative when freed
    seconds: float  # that the trace took


class TraceError(RuntimeError):
    """A model that cannot be traced: the operation, the module and the phase, and what torch said."""


@contextmanager
def counting(trainer: Trainer, window: Batch, *, round_to: int = 1) -> Iterator[Ledger]:
    """Counts the bytes alive in what the trainer does inside, on whatever tensors it is of.

    The optimizer's state should be there already (engine.allocate_state), as it is in training. What else
    would be there after a first window is let go, so that any window counts alike: a resumed training's too.
    """
    trainer.forget()
    ledger = Ledger(round_to, trainer.precision.device.type)
    ledger.know("parameters", trainer.model.parameters())
    ledger.know("buffers", trainer.model.buffers())
    ledger.know("optimizer_state", state_tensors(trainer.optimizer))
    ledger.know("average", trainer.average.averages)
    ledger.know("inputs", tensors(window))
    with _phases(trainer, ledger), ledger.watching(trainer.model), ledger:
        yield ledger


def count_step(trainer: Trainer, window: Batch, *, round_to: int = 1) -> Trace:
    """Takes one step on the window and counts. Raises TraceError, with the place, where it fails."""
    started = time.perf_counter()
    with counting(trainer, window, round_to=round_to) as ledger:
        kept_on_host = ledger.host
        try:
            trainer.step(window)
        except Exception as error:
            where = f"{ledger.operation} in {ledger.present_module() or 'no module'}"
            raise TraceError(f"{where}, {ledger.phase}: {str(error).splitlines()[0]}") from error
    return Trace(
        peak=ledger.peak,
        peaks=ledger.peaks,
        highest=ledger.highest,
        host=ledger.host_peak,
        moved_once=2 * kept_on_host,
        moved_each=2 * (ledger.moved_to_host - kept_on_host),
        flops=ledger.flops,
        operations=ledger.operations,
        micro_batches=accumulation_steps(samples(window), trainer.micro_batch_size),
        events=ledger.events,
        seconds=time.perf_counter() - started,
    )


def trace_step(build: Callable[[], tuple[Trainer, Batch]], *, cuda: bool) -> Trace:
    """As `count_step`, on fake tensors.

    build: makes a trainer (its model through `without_memory`) and a window of two micro-batches, the
    fewest with which accumulation shows: the gradients of one stay while the next goes forward. cuda: by
    CUDA's rules, which changes the process for good; call it in one of its own.
    """
    if cuda:
        install_autocast_lists()
    attention = flash_attention() if cuda else nullcontext()
    with FakeTensorMode(allow_non_fake_inputs=True), _Norms(), attention:
        trainer, window = build()
        trainer.read_device = _clean_step  # type: ignore[method-assign]
        return count_step(trainer, window, round_to=CUDA_ROUNDING if cuda else 1)


class _Norms(TorchDispatchMode):
    """Results of norms on fake tensors: once for arguments of the same shapes, in the dtypes of the kernels.

    FakeTensorMode remembers results too, but takes each BatchNorm for another case, because the engine's rows
    of statistics stand at another offset for each; deep models would take half of their trace for that. Of a
    GroupNorm in half precision with float32 weights, as autocast makes it on a CPU, it gives the statistics
    in half precision and the gradient in float32; the kernel does the reverse.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[Any, list[Any]] = {}

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = options or {}
        if operation not in NORMS or options:
            return operation(*arguments, **options)
        case = operation, *map(_described, arguments)
        if case not in self._known:
            results = [_described(result) for result in operation(*arguments)]
            if operation is GROUP_NORM and arguments[1] is not None:
                results[1:] = [(*shape, arguments[1].dtype) for *shape, _ in results[1:]]
            if operation is GROUP_NORM_BACKWARD and results[0] is not None:
                results[0] = (*results[0][:2], arguments[1].dtype)
            self._known[case] = results
        return tuple(known and torch.empty_strided(*known[:2], dtype=known[2]) for known in self._known[case])


def _described(argument: Any) -> Any:
    """Shape, strides and dtype of a tensor; anything else as it is, if only hashable."""
    if isinstance(argument, Tensor):
        return tuple(argument.shape), argument.stride(), argument.dtype
    return tuple(argument) if isinstance(argument, list) else argument


def _clean_step(packed: Tensor) -> list[float]:
    """Answers the step's read: everything finite, so that the update is applied."""
    return [1.0] * packed.numel()


@contextmanager
def _phases(trainer: Trainer, ledger: Ledger) -> Iterator[None]:
    """Tells the ledger whether the step is in a forward, in a backward or after them."""
    forward, backward = trainer.forward, trainer.precision.backward

    def in_forward(model: nn.Module, batch: Batch) -> tuple[Any, ...]:
        ledger.phase, ledger.module = "forward", ""
        ledger.know("inputs", tensors(batch))  # on a GPU a copy of the window's part
        return forward(model, batch)

    def in_backward(loss: Tensor, seed: Tensor) -> None:
        ledger.phase = "backward"
        backward(loss, seed)
        ledger.phase, ledger.module = "step", ""

    trainer.forward = in_forward
    trainer.precision.backward = in_backward  # type: ignore[method-assign]
    try:
        yield
    finally:
        trainer.forward = forward
        del trainer.precision.backward


def without_memory(build: Callable[[], nn.Module], *, device: str = "cpu") -> nn.Module:
    """The model that `build` makes, its parameters and buffers empty: fake ones inside a FakeTensorMode.

    device: "meta" outside of such a mode, where empty ones would take memory.

    Weights are let go as they are registered, so that no more than one is ever there. What a constructor
    computes besides (RegNet calls `.tolist()`) is real.
    """
    parameter, buffer = nn.Module.register_parameter, nn.Module.register_buffer

    def register_parameter(self: nn.Module, name: str, value: nn.Parameter | None) -> None:
        parameter(self, name, value)
        if value is not None:
            self._parameters[name] = nn.Parameter(value.detach().to("meta"), value.requires_grad)

    def register_buffer(self: nn.Module, name: str, value: Tensor | None, persistent: bool = True) -> None:
        buffer(self, name, value, persistent)
        if value is not None:
            self._buffers[name] = value.to("meta")

    nn.Module.register_parameter = register_parameter  # type: ignore[method-assign, assignment]
    nn.Module.register_buffer = register_buffer  # type: ignore[method-assign, assignment]
    try:
        modes = torch.utils._python_dispatch._disable_current_modes()
        with torch.random.fork_rng(devices=[]), modes:  # first weights are drawn, and none is kept
            model = build()
    finally:
        nn.Module.register_parameter = parameter  # type: ignore[method-assign]
        nn.Module.register_buffer = buffer  # type: ignore[method-assign]
    return model if device == "meta" else model.to_empty(device=device)
