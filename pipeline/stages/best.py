"""The weights that a training will save: of the best epoch, or of the last."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.engine import WeightAverage
from pipeline.errors import UserError


@dataclass
class Best:
    """save: best keeps the epoch of the highest val/accuracy, the earlier on a tie; last keeps each."""

    save: str
    accuracy: float = -1.0
    epoch: int = 0
    weights: dict[str, Tensor] | None = None

    def consider(self, model: nn.Module, accuracy: float, epoch: int, average: WeightAverage) -> None:
        """Keeps a copy of the weights, averaged where there is an average, if they are to be saved.

        The copy is contiguous and on the host.
        """
        if self.save == "best" and accuracy <= self.accuracy:
            return
        with average.swapped_in():
            self.weights = {
                name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
                for name, tensor in model.state_dict().items()
            }
        self.accuracy, self.epoch = accuracy, epoch

    def state_dict(self) -> dict[str, Any]:
        return {"accuracy": self.accuracy, "epoch": self.epoch, "weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.accuracy, self.epoch, self.weights = state["accuracy"], state["epoch"], state["weights"]

    def finite_weights(self) -> dict[str, Tensor]:
        """Raises UserError where one is not finite: such a model is never written."""
        assert self.weights is not None
        for name, tensor in self.weights.items():
            if not torch.isfinite(tensor).all():
                raise UserError(f"the trained weights are not finite ({name}): no model is written")
        return self.weights
