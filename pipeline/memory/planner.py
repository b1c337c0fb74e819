"""The largest micro-batch that fits a budget, found with few traces and confirmed by one.

Memory has two summits: the end of the forward or the middle of the backward, which grows with the
micro-batch along a line, and the optimizer's step, which does not. Two traces give both; the line is
followed to the largest micro-batch under the budget, and a trace there has the last word, because the line
is nearly always a little low. Only micro-batches that save a step are of interest: of equal numbers of
accumulation steps the smallest is taken.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.engine import accumulation_steps
from pipeline.memory.allocator import replay
from pipeline.memory.trace import Trace

MIB = 2**20
SECOND_TRACE = 8  # samples, far enough from 1 for a slope
LINE_ERROR = 1.03  # an estimate so far above the budget needs no trace to be believed
RESERVED_MARGIN = 1.05  # what a replay cannot know: other streams, the order of frees in the backward


@dataclass(frozen=True)
class Device:
    """What a device takes besides tensors. caches: whether its allocator keeps segments (CUDA's does)."""

    name: str
    caches: bool
    context_bytes: int  # CUDA context and loaded kernels; on a CPU the process without the training
    workspace_bytes: int  # cuBLAS and cuBLASLt


# A CUDA context with torch's kernels takes 300 to 600 MiB, by GPU and driver; cuBLAS's workspace is 8.1 MiB
# (torch.backends.cuda, CUBLAS_WORKSPACE_CONFIG :4096:2:16:8), cuBLASLt's up to 32 MiB.
CUDA = Device("cuda", True, 450 * MIB, 40 * MIB)


@dataclass(frozen=True)
class Prediction:
    """What one optimizer step takes at a micro-batch, in bytes; `required` is to be held against a budget."""

    micro_batch_size: int
    components: dict[str, int]  # at the peak
    allocated: int
    reserved: int
    rounding: int  # reserved beyond allocated, with the margin
    context: int
    workspaces: int
    phases: dict[str, int]  # allocated at the peak of each
    phase: str
    operation: str
    module: str

    @property
    def required(self) -> int:
        return self.allocated + self.rounding + self.context + self.workspaces

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"required": self.required}


def predict(trace: Trace, micro_batch_size: int, device: Device) -> Prediction:
    """From the bytes of tensors to the bytes of a device."""
    allocated = trace.peak.total
    reserved = replay(trace.events).peak_reserved if device.caches else allocated
    return Prediction(
        micro_batch_size,
        trace.peak.components,
        allocated,
        reserved,
        round(reserved * RESERVED_MARGIN) - allocated,
        device.context_bytes,
        device.workspace_bytes,
        trace.peaks,
        trace.peak.phase,
        trace.peak.operation,
        trace.peak.module,
    )


@dataclass(frozen=True)
class Plan:
    """What was decided for a budget in bytes. Where not even micro-batch 1 `fits`, `best` is of 1."""

    budget: int
    fits: bool
    accumulation_steps: int
    best: Prediction


class Planner:
    """Plans for one configuration and any number of budgets; each micro-batch is traced once.

    measure: the prediction at a micro-batch. window: samples in the largest window, the effective batch or
    the data set if that is smaller.
    """

    def __init__(self, measure: Callable[[int], Prediction], window: int) -> None:
        self._measure = measure
        self.window = window
        self.known: dict[int, Prediction] = {}

    def plan(self, budget: int) -> Plan:
        """The fewest accumulation steps whose micro-batch fits into `budget` bytes."""
        smallest = self.at(1)
        if smallest.required > budget:
            return Plan(budget, False, self.window, smallest)
        fits, too_large = 1, self.window + 1
        while (size := self._next(budget, fits, too_large)) is not None:
            if self.at(size).required <= budget:
                fits = size
            else:
                too_large = size
        return Plan(budget, True, accumulation_steps(self.window, fits), self.at(fits))

    def at(self, size: int) -> Prediction:
        if size not in self.known:
            self.known[size] = self._measure(size)
        return self.known[size]

    def _next(self, budget: int, fits: int, too_large: int) -> int | None:
        """What to trace between a size that fits and one that does not; None when it is clear."""
        between = [size for size in self.candidates() if fits < size < too_large]
        if not between:
            return None
        if len(self.known) == 1:
            return next((size for size in between if size >= SECOND_TRACE), between[-1])
        promising = [size for size in between if self._estimate(size) <= budget]
        if promising:
            return promising[-1]
        return between[0] if self._estimate(between[0]) <= budget * LINE_ERROR else None

    def candidates(self) -> list[int]:
        """Micro-batches that save a step, ascending: 1 for n steps, and so on to the window in one."""
        steps = {accumulation_steps(self.window, size) for size in range(1, self.window + 1)}
        return sorted({-(-self.window // count) for count in steps})

    def _estimate(self, size: int) -> float:
        """Known, or on the line through the two nearest known sizes, and never under the step's summit."""
        if size in self.known:
            return self.known[size].required
        nearest = sorted(self.known.values(), key=lambda known: abs(known.micro_batch_size - size))[:2]
        if len(nearest) < 2:
            return nearest[0].required
        low, high = sorted(nearest, key=lambda known: known.micro_batch_size)
        sizes = high.micro_batch_size - low.micro_batch_size
        slope = (_growing(high) - _growing(low)) / sizes
        line = _growing(low) + slope * (size - low.micro_batch_size)
        return max(line, nearest[0].phases["step"]) * nearest[0].required / nearest[0].allocated


def _growing(prediction: Prediction) -> int:
    """The summit that grows with the micro-batch."""
    return max(prediction.phases["forward"], prediction.phases["backward"])
