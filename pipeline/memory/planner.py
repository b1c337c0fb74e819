"""The fastest way to fit a budget: which savers, and the largest micro-batch with them.

Memory has two summits: the end of the forward or the middle of the backward, which grows with the
micro-batch along a line, and the optimizer's step, which does not. The first trace gives a guess of the line
by its activations, the second the line itself, to be followed to the largest micro-batch under the budget. A
trace there has the last word, because the line is nearly always a little low. Only micro-batches that save a
step are of interest: of equal numbers of accumulation steps the smallest is taken.

Combinations of savers are tried in the order of the time that a window takes with them at least. One whose
parameters, gradients and state alone overfill the budget is refused by addition, one that does not fit at the
smallest micro-batch by one trace. The search ends where nothing left could be faster than what fits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from pipeline.engine import accumulation_steps
from pipeline.memory.prediction import CUDA, Prediction, Rates, Savers

LINE_ERROR = 1.03  # an estimate so far above the budget needs no trace to be believed
WORTH_A_TRACE = 0.95  # of the seconds that are known to do
GUESS_ERROR = 1.3  # and one from a single trace

UNCACHED_CASTS = "uncached_casts"
CHECKPOINTING_HALF = "checkpointing_half"
CHECKPOINTING = "checkpointing"
OFFLOAD = "offload"
OPTIMIZER_ON_HOST = "optimizer_on_host"
# What savers cost at least, for the order in which they are tried; a trace then says what they do cost.
# Computed twice, of a step's operations (a third of them is the forward's, most of that in blocks):
RECOMPUTED = {CHECKPOINTING_HALF: 0.1, CHECKPOINTING: 0.2}
# Carried out and back, of the activations: the rest is small, or not there with checkpointing:
OFFLOADED = {CHECKPOINTING_HALF: 0.2, CHECKPOINTING: 0.02}
OFFLOADED_ALONE = 0.4
ALWAYS_THERE = ("parameters", "buffers", "gradients", "average", "optimizer_state")


@dataclass(frozen=True)
class Tried:
    """A combination that was not taken: bytes at its smallest micro-batch (or at least), and why not."""

    savers: Savers
    required: int
    relative_time: float
    reason: str


@dataclass(frozen=True)
class Plan:
    """What was decided for a budget in bytes. Where nothing `fits`, `best` is what takes least."""

    budget: int
    fits: bool
    accumulation_steps: int
    best: Prediction
    relative_time: float  # of a window, to one without savers in a single micro-batch
    not_taken: list[Tried] = field(default_factory=list)


class Planner:
    """Plans for one configuration and any number of budgets; each micro-batch is traced once.

    measure: the prediction with savers at a micro-batch. window: samples in the largest window, the effective
    batch or the data set if that is smaller. combinations: of savers, to choose from, the most saving last.
    smallest: micro-batch that the model can do. fixed: the micro-batch, where that is not to be chosen.
    ahead: is told what will probably be measured next, so that it can begin.
    """

    def __init__(
        self,
        measure: Callable[[Savers, int], Prediction],
        window: int,
        *,
        combinations: Sequence[Savers] = ((),),
        smallest: int = 1,
        fixed: int | None = None,
        rates: Rates = CUDA.rates,
        ahead: Callable[[list[tuple[Savers, int]]], None] = lambda wanted: None,
    ) -> None:
        self._measure = measure
        self._ahead = ahead
        self.window = window
        self.rates = rates
        self._combinations = combinations
        self._smallest = min(fixed or smallest, window)
        self._sizes = [self._smallest] if fixed else self.candidates()
        self.known: dict[tuple[Savers, int], Prediction] = {}

    def plan(self, budget: int) -> Plan:
        """The fastest combination that fits into `budget` bytes; the fewest savers first on a tie."""
        best: Prediction | None = None
        not_taken: list[Tried] = []
        order = sorted(self._combinations, key=lambda one: (self._least_seconds(one), len(one)))
        possible = [savers for savers in order if self._least_bytes(savers) <= budget]
        for savers in order:
            if savers in possible and best is None:
                place = possible.index(savers)
                self._ahead([(one, self._smallest) for one in possible[place : place + 2]])
            if best is not None and self._least_seconds(savers) >= WORTH_A_TRACE * self._seconds(best):
                not_taken.append(self._tried(savers, "slower than what fits"))
                continue
            found = self._largest(savers, budget)
            if found is None:
                not_taken.append(self._tried(savers, "does not fit"))
            elif best is None or self._seconds(found) < self._seconds(best):
                if best is not None:
                    not_taken.append(self._tried(best.savers, "fits, and is slower"))
                best = found
            else:
                not_taken.append(self._tried(savers, "fits, and is slower"))
        fits, best = best is not None, best or self._least_memory()
        steps = accumulation_steps(self.window, best.micro_batch_size)
        return Plan(budget, fits, steps, best, self._relative(self._seconds(best)), not_taken)

    def at(self, savers: Savers, size: int) -> Prediction:
        if (savers, size) not in self.known:
            self.known[savers, size] = self._measure(savers, size)
        return self.known[savers, size]

    def candidates(self) -> list[int]:
        """Micro-batches that save a step, ascending: 1 for n steps, and so on to the window in one."""
        steps = {accumulation_steps(self.window, size) for size in range(1, self.window + 1)}
        return sorted({-(-self.window // count) for count in steps})

    @property
    def _base(self) -> Prediction:
        """With the fewest savers, at the smallest micro-batch: what all others are estimated from."""
        return self.at(min(self._combinations, key=len), self._smallest)

    def _seconds(self, prediction: Prediction) -> float:
        return prediction.work.seconds(self.window, prediction.micro_batch_size, self.rates)

    def _relative(self, seconds: float) -> float:
        return seconds / self._base.work.seconds(self.window, self.window, self.rates)

    def _least_seconds(self, savers: Savers) -> float:
        base, work = self._base, self._base.work
        activations = _activations_of_a_sample(base)
        recomputing = next((one for one in savers if one in RECOMPUTED and one not in base.savers), "")
        if recomputing:
            work = replace(work, flops=work.flops * (1 + RECOMPUTED[recomputing]))
        if OFFLOAD in savers and OFFLOAD not in base.savers:
            work = replace(work, moved=2 * activations * OFFLOADED.get(recomputing, OFFLOADED_ALONE))
        if OPTIMIZER_ON_HOST in savers and OPTIMIZER_ON_HOST not in base.savers:
            work = replace(work, moved_once=2.0 * base.highest["optimizer_state"])
        return work.seconds(self.window, self._sizes[-1], self.rates)

    def _least_bytes(self, savers: Savers) -> int:
        """What is on the device at the end of a forward at least, known from the base by addition."""
        base = self._base
        there = {*ALWAYS_THERE} - ({"optimizer_state"} if OPTIMIZER_ON_HOST in savers else set())
        if savers == base.savers or not {CHECKPOINTING, CHECKPOINTING_HALF, OFFLOAD} & {*savers}:
            there |= {"activations", "cast_weights"}  # saved for the backward, whoever else keeps them
        return sum(base.highest[one] for one in there) + base.context + base.workspaces

    def _tried(self, savers: Savers, reason: str) -> Tried:
        known = self.known.get((savers, self._smallest))
        if known is None:
            return Tried(
                savers, self._least_bytes(savers), self._relative(self._least_seconds(savers)), reason
            )
        return Tried(savers, known.required, self._relative(self._seconds(known)), reason)

    def _least_memory(self) -> Prediction:
        """What takes least, as far as it can be told: with all the savers there are, or what was traced."""
        self.at(self._combinations[-1], self._smallest)
        smallest = [one for one in self.known.values() if one.micro_batch_size == self._smallest]
        return min(smallest, key=lambda one: one.required)

    def _largest(self, savers: Savers, budget: int) -> Prediction | None:
        """The largest micro-batch that fits, with few traces."""
        if self._least_bytes(savers) > budget or self.at(savers, self._smallest).required > budget:
            return None
        fits, too_large = self._smallest, self.window + 1
        while (size := self._next(savers, budget, fits, too_large)) is not None:
            above = [one for one in self._sizes if size < one < too_large]
            self._ahead([(savers, one) for one in (size, *above[:1])])
            if self.at(savers, size).required <= budget:
                fits = size
            else:
                too_large = size
        return self.at(savers, fits)

    def _next(self, savers: Savers, budget: int, fits: int, too_large: int) -> int | None:
        """What to trace between a size that fits and one that does not; None when it is clear."""
        between = [size for size in self._sizes if fits < size < too_large]
        if not between:
            return None
        known = [one for (those, _), one in self.known.items() if those == savers]
        promising = [size for size in between if _estimate(known, size) <= budget]
        if promising:
            return promising[-1]
        error = LINE_ERROR if len(known) > 1 else GUESS_ERROR
        return between[0] if _estimate(known, between[0]) <= budget * error else None


def _estimate(known: list[Prediction], size: int) -> float:
    """Known, or on a line, and never under the step's summit.

    The line is through the two nearest known sizes; from one alone it rises by what its activations took.
    """
    nearest = sorted(known, key=lambda one: abs(one.micro_batch_size - size))[:2]
    if nearest[0].micro_batch_size == size:
        return nearest[0].required
    low, high = sorted([*nearest, *nearest][:2], key=lambda one: one.micro_batch_size)
    sizes = high.micro_batch_size - low.micro_batch_size
    slope = (_growing(high) - _growing(low)) / sizes if sizes else _activations_of_a_sample(low)
    line = _growing(low) + slope * (size - low.micro_batch_size)
    return max(line, nearest[0].phases["step"]) * nearest[0].required / nearest[0].allocated


def _growing(prediction: Prediction) -> int:
    """The summit that grows with the micro-batch."""
    return max(prediction.phases["forward"], prediction.phases["backward"])


def _activations_of_a_sample(prediction: Prediction) -> float:
    return prediction.highest["activations"] / prediction.micro_batch_size
