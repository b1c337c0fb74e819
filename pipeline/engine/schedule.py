"""The learning rate as a pure function of the number of applied optimizer steps.

There is no scheduler object with a state of its own: a skipped window leaves the count, and so the
learning rate, where it was, and resuming needs nothing but the count.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass


def constant(progress: float) -> float:
    return 1.0


def cosine(progress: float) -> float:
    """Half a cosine, 1 to 0 (Loshchilov and Hutter, "SGDR", 2017, without restarts)."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def linear(progress: float) -> float:
    """1 to 0."""
    return 1.0 - progress


SHAPES: dict[str, Callable[[float], float]] = {"constant": constant, "linear": linear, "cosine": cosine}
SCHEDULES = (*SHAPES, "one_cycle")
ONE_CYCLE_START = 1 / 25  # of the peak rate; this and the end are the defaults of torch's OneCycleLR
ONE_CYCLE_END = 1 / 25e4


@dataclass(frozen=True)
class Schedule:
    """`schedule(n)`: the factor on the base learning rate for the update that follows n applied ones.

    total_steps: windows of the whole training; warmup_fraction: the share of them over which the factor
    rises. constant, linear, cosine: it rises linearly, to 1 at the last of them, then `name` goes from 1
    over the rest. one_cycle: half a cosine from 1/25 up to 1 and another down to 1/250,000 (Smith and Topin,
    "Super-Convergence", 2019, in the form of torch's OneCycleLR, whose pct_start is warmup_fraction).
    """

    name: str
    total_steps: int
    warmup_fraction: float = 0.0

    def __post_init__(self) -> None:
        if self.name not in SCHEDULES:
            raise ValueError(f"schedule {self.name!r}: choose one of {', '.join(SCHEDULES)}")
        if self.total_steps < 1:
            raise ValueError(f"total_steps={self.total_steps} must be at least 1")

    def __call__(self, optimizer_steps: int) -> float:
        if self.name == "one_cycle":
            return self._one_cycle(optimizer_steps)
        warmup = round(self.total_steps * self.warmup_fraction)
        if optimizer_steps < warmup:
            return (optimizer_steps + 1) / warmup
        rest = max(1, self.total_steps - warmup)
        return SHAPES[self.name](min(1.0, (optimizer_steps - warmup) / rest))

    def _one_cycle(self, optimizer_steps: int) -> float:
        peak = self.warmup_fraction * self.total_steps - 1
        if optimizer_steps <= peak:
            done = optimizer_steps / peak if peak else 1.0
            return 1.0 + (ONE_CYCLE_START - 1.0) * cosine(done)
        done = min(1.0, (optimizer_steps - max(peak, 0.0)) / max(1.0, self.total_steps - 1 - max(peak, 0.0)))
        return ONE_CYCLE_END + (1.0 - ONE_CYCLE_END) * cosine(done)
