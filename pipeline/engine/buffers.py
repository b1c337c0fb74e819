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
            if buffer is not None and id(buffer) not in known
        ]
        self._saved: list[tuple[Tensor, Tensor]] = []

    def save(self) -> None:
        buffers = [place.owner[place.name] for place in self._places]
        self._saved = [(buffer, buffer.clone()) for buffer in buffers if buffer is not None]

    @torch.no_grad()
    def restore(self) -> None:
        """Puts back the tensors that stood there and their values."""
        for place, (buffer, value) in zip(self._places, self._saved, strict=True):
            buffer.copy_(value)
            place.owner[place.name] = buffer
