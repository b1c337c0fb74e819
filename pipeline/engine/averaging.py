"""An exponential moving average (EMA) of the weights, moved by applied steps alone."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightAverage:
    """average <- decay * average + (1 - decay) * weights, at each applied optimizer step.

    Buffers are not averaged: under `swapped_in` the model keeps its own. A decay of 0 is without: the
    object then holds nothing and does nothing.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"ema decay {decay} must lie in [0, 1)")
        self.decay = decay
        self._weights: list[Tensor] = list(model.parameters()) if decay else []
        self.averages = [weight.detach().clone() for weight in self._weights]

    @torch.no_grad()
    def update(self) -> None:
        if self.averages:
            torch._foreach_lerp_(self.averages, self._weights, 1 - self.decay)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Inside, the model has the averaged weights; afterwards its own again, bit for bit."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for weight, average in zip(self._weights, self.averages, strict=True):
            weight.data, average.data = average.data, weight.data
