"""The largest of torchvision's classifiers that a budget lets train, with all the savers there are."""

from dataclasses import replace
from typing import Any

from pipeline import models
from pipeline.config import Params
from pipeline.errors import UserError
from pipeline.memory.prediction import Device, Prediction
from pipeline.memory.workload import CHANNELS, CLASSIFICATION
from pipeline.stages.planning import Forecast
from pipeline.stages.savers import combinations
from pipeline.stages.tracing import Tracer

BYTES_HELD = 8  # of a parameter, a float32 and its gradient; nothing saves those


def largest(
    params: Params, description: dict[str, Any], device: Device, budgets: list[int]
) -> dict[int, tuple[str, Prediction] | None]:
    """For each budget the model with the most parameters that fits, and its prediction at micro-batch 1.

    The training is that of params with another model, on images of the size that the model was made for.
    """
    sizes = models.torchvision_sizes()
    known: dict[str, Prediction | None] = {}
    found: dict[int, tuple[str, Prediction] | None] = {}
    for budget in budgets:
        found[budget] = None
        for name in sorted(sizes, key=lambda name: -sizes[name]):
            if BYTES_HELD * sizes[name] + device.context_bytes + device.workspace_bytes > budget:
                continue
            if name not in known:
                known[name] = _smallest(params, name, description, device)
            prediction = known[name]
            if prediction is not None and prediction.required <= budget:
                found[budget] = name, prediction
                break
    return found


def _smallest(params: Params, name: str, description: dict[str, Any], device: Device) -> Prediction | None:
    """With all savers at micro-batch 1; None for a model that cannot be trained so."""
    of_model = replace(params, model=replace(params.model, name=name, args={}))
    side = CLASSIFICATION.pixels_of(name)
    images = description | {"shape": [CHANNELS, side, side]}
    savers = combinations(of_model, images, cuda=device.caches)[-1]
    with Tracer(images, cuda=device.caches) as tracer:
        try:
            return Forecast(of_model, images, device, tracer, real=False)(savers, 1)
        except UserError:
            return None
