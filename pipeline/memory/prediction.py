"""From a trace to what a device must have, in bytes, and to what a window takes there, in seconds.

    required = reserved x 1.05 + context + workspaces

The seconds serve to compare plans, not to plan an evening by: they come from counted operations and bytes
over rates that are assumed, and that each plan repeats.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

from pipeline.engine import accumulation_steps
from pipeline.memory.allocator import replay
from pipeline.memory.trace import Trace

MIB = 2**20
RESERVED_MARGIN = 1.05  # what a replay cannot know: other streams, the order of frees in the backward

Savers = tuple[str, ...]


@dataclass(frozen=True)
class Rates:
    """What work takes on a device; assumed."""

    flops_per_second: float
    host_bytes_per_second: float  # between device and host
    launch_seconds: float  # of one operation, however small


@dataclass(frozen=True)
class Device:
    """What a device takes besides tensors. caches: whether its allocator keeps segments (CUDA's does)."""

    name: str
    caches: bool
    context_bytes: int  # CUDA context and loaded kernels; on a CPU the process without the training
    workspace_bytes: int  # cuBLAS and cuBLASLt
    rates: Rates
    taken_bytes: int = 0  # of the context, what is there already and counts as used


# A CUDA context with torch's kernels takes 300 to 600 MiB, by GPU and driver; cuBLAS's workspace is 8.1 MiB
# (torch.backends.cuda, CUBLAS_WORKSPACE_CONFIG :4096:2:16:8), cuBLASLt's up to 32 MiB. The rates are those of
# a small GPU: half of the 40 half-precision TFLOP/s that it is sold with, pinned memory over PCIe 3 x16.
CUDA = Device("cuda", True, 450 * MIB, 40 * MIB, Rates(20e12, 12e9, 10e-6))
CPU_RATES = Rates(1e11, 1e10, 5e-6)


@dataclass(frozen=True)
class Work:
    """What a step computes, and what its savers carry between host and device."""

    flops: float  # a sample
    launches: float  # operations a micro-batch
    moved_once: float  # bytes a window, both ways together
    moved: float  # bytes a sample, both ways together

    def seconds(self, window: int, micro_batch_size: int, rates: Rates) -> float:
        """Of a window. A small micro-batch costs its launches, a large one what it computes."""
        computed = self.flops * window / rates.flops_per_second
        launched = self.launches * accumulation_steps(window, micro_batch_size) * rates.launch_seconds
        carried = (self.moved_once + self.moved * window) / rates.host_bytes_per_second
        return max(computed, launched) + carried


@dataclass(frozen=True)
class Prediction:
    """One optimizer step at a micro-batch, in bytes; `required` is to be held against a budget."""

    savers: Savers
    micro_batch_size: int
    components: dict[str, int]  # at the peak
    highest: dict[str, int]  # of each component, whenever that is
    allocated: int
    reserved: int
    rounding: int  # reserved beyond allocated, with the margin
    context: int
    workspaces: int
    host: int  # kept in the host's memory by savers
    phases: dict[str, int]  # allocated at the peak of each
    phase: str
    operation: str
    module: str
    work: Work

    @property
    def required(self) -> int:
        return self.allocated + self.rounding + self.context + self.workspaces

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"required": self.required}


def predict(
    trace: Trace, micro_batch_size: int, device: Device, *, samples: int, savers: Savers = ()
) -> Prediction:
    """From the bytes of tensors to the bytes of a device. samples: of the window that was traced."""
    # on a CPU there is no other memory to save by keeping something on the host
    allocated = trace.peak.total + (0 if device.caches else trace.host)
    reserved = replay(trace.events).peak_reserved if device.caches else allocated
    return Prediction(
        savers=savers,
        micro_batch_size=micro_batch_size,
        components=trace.peak.components,
        highest=trace.highest,
        allocated=allocated,
        reserved=reserved,
        rounding=round(reserved * RESERVED_MARGIN) - allocated,
        context=device.context_bytes,
        workspaces=device.workspace_bytes,
        host=trace.host,
        phases=trace.peaks,
        phase=trace.peak.phase,
        operation=trace.peak.operation,
        module=trace.peak.module,
        work=Work(
            trace.flops / samples,
            trace.operations / trace.micro_batches,
            trace.moved_once,
            trace.moved_each / samples,
        ),
    )


def on_the_line(first: Prediction, second: Prediction, size: int) -> Prediction:
    """The prediction at a micro-batch from those at two others: each number on the line through both."""
    share = (size - first.micro_batch_size) / (second.micro_batch_size - first.micro_batch_size)

    def between(low: Any, high: Any) -> Any:
        if isinstance(low, dict):
            return {name: between(low[name], high[name]) for name in low}
        return max(0, round(low + (high - low) * share)) if isinstance(low, int) else high

    values = {name: between(value, getattr(second, name)) for name, value in vars(first).items()}
    return replace(first, **values | {"micro_batch_size": size})
