"""A model's buffers, so that a skipped window can leave them as they were."""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass
class _Place:
    """Where a buffer stands: a module may write into it, or put another tensor in its place."""

    owner: dict[str, Tensor | None]
    name: str


class Buffers:
    """All buffers of `model` but those in `steady`, which a window never moves."""

    def __init__(self, model: nn.Module, steady: Collection[Tensor] = ()) -> None:
        known = {id(buffer) for buffer in steady}
        self._places = [
            _Place(module._buffers, name)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if id(buffer) not in known
        ]
        self._saved: list[tuple[_Place, Tensor | None, Tensor | None]] = []

    def save(self) -> None:
        self._saved = []
        for place in self._places:
            buffer = place.owner.get(place.name)
            self._saved.append((place, buffer, None if buffer is None else buffer.clone()))

    @torch.no_grad()
    def restore(self) -> None:
        """Puts back the tensors that stood there and their values."""
        for place, buffer, value in self._saved:
            if buffer is not None and value is not None:
                buffer.copy_(value)
            place.owner[place.name] = buffer
