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


SHAPES: dict[str, Callable[[float], float]] = {"constant": constant, "cosine": cosine}


@dataclass(frozen=True)
class Schedule:
    """`schedule(n)`: the factor on the base learning rate for the update that follows n applied ones.

    total_steps: windows of the whole training; warmup_fraction: the share of them over which the factor
    rises linearly (to 1 at the last one), after which `name` (constant, cosine) goes from 1 over the rest.
    """

    name: str
    total_steps: int
    warmup_fraction: float = 0.0

    def __post_init__(self) -> None:
        if self.name not in SHAPES:
            raise ValueError(f"schedule {self.name!r}: choose one of {', '.join(SHAPES)}")
        if self.total_steps < 1:
            raise ValueError(f"total_steps={self.total_steps} must be at least 1")

    def __call__(self, optimizer_steps: int) -> float:
        warmup = round(self.total_steps * self.warmup_fraction)
        if optimizer_steps < warmup:
            return (optimizer_steps + 1) / warmup
        rest = max(1, self.total_steps - warmup)
        return SHAPES[self.name](min(1.0, (optimizer_steps - warmup) / rest))
