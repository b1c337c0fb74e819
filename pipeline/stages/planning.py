"""The plan of a training: which micro-batch and which savers, decided before anything is trained.

Train makes one at its start, for the device it finds, and `python -m pipeline plan` shows one for any device.
It is no stage of DVC's: hardware is no dependency of a result.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from pipeline import files
from pipeline.config import Params
from pipeline.errors import UserError
from pipeline.memory import devices
from pipeline.memory.devices import GIB, in_mib
from pipeline.memory.planner import CHECKPOINTING, CHECKPOINTING_HALF, Plan, Planner
from pipeline.memory.prediction import Device, Prediction, Savers, on_the_line, predict
from pipeline.memory.trace import Trace
from pipeline.stages.savers import combinations
from pipeline.stages.tracing import Tracer, TracingError

PLAN = Path("reports/plan.json")
SINGLE_VALUES = "Expected more than 1 value per channel"  # torch's batch_norm


class Forecast:
    """Predictions of one training, by traces; by two real steps and the line through them where it must be.

    real: whether it may be by real steps.
    """

    def __init__(
        self,
        params: Params,
        description: dict[str, Any],
        device: Device,
        tracer: Tracer,
        *,
        real: bool = True,
    ) -> None:
        self._params = params
        self._device = device
        self._tracer = tracer
        self._real = real
        self.window = min(params.batch.effective_batch_size, description["counts"]["train"])
        self.untraceable = ""  # why, where that is so
        self._traced: dict[tuple[Savers, int], Prediction] = {}
        self._begun: dict[tuple[Savers, int], Future[Trace] | None] = {}
        self._steps: dict[Savers, tuple[Prediction, Prediction]] = {}

    def smallest(self, savers: Savers) -> int:
        """2 for a model that normalises over a sample's single values, as deeplabv3 does; else 1."""
        try:
            self._trace(savers, 1)
        except TracingError as error:
            return 2 if SINGLE_VALUES in str(error) else 1
        return 1

    def __call__(self, savers: Savers, size: int) -> Prediction:
        """Raises UserError where neither a trace nor a real step is possible."""
        if not self.untraceable:
            try:
                return self._trace(savers, size)
            except TracingError as error:
                if not self._real:
                    raise
                self.untraceable = str(error)
                print(f"plan: {error}. Instead a real step is taken and counted")
        low, high = self._measured(savers)
        return on_the_line(low, high, size) if low is not high else low

    def ahead(self, wanted: list[tuple[Savers, int]]) -> None:
        """Begins traces that will probably be asked for."""
        for savers, size in wanted:
            if (savers, size) not in self._begun and not self.untraceable:
                self._begun[savers, size] = self._tracer.ahead(*self._case(savers, size))

    def _trace(self, savers: Savers, size: int) -> Prediction:
        if (savers, size) not in self._traced:
            begun = self._begun.get((savers, size))
            take = (lambda *_: begun.result()) if begun else self._tracer.trace
            self._traced[savers, size] = self._by(take, savers, size)
        return self._traced[savers, size]

    def _measured(self, savers: Savers) -> tuple[Prediction, Prediction]:
        """Real steps at micro-batches 1 and 2, as far as the window has so many samples."""
        if savers not in self._steps:
            try:
                low, *high = (
                    self._by(self._tracer.measure, savers, size) for size in range(1, min(2, self.window) + 1)
                )
            except UserError as error:
                raise UserError(f"{self.untraceable}; nor can a real step be counted: {error}") from None
            self._steps[savers] = low, high[0] if high else low
        return self._steps[savers]

    def _case(self, savers: Savers, size: int) -> tuple[Params, int]:
        """Params, and samples of the window: two micro-batches."""
        batch = replace(self._params.batch, micro_batch_size=size)
        memory = replace(self._params.memory, savers=list(savers))
        return replace(self._params, batch=batch, memory=memory), min(2 * size, self.window)

    def _by(self, take: Callable[[Params, int], Trace], savers: Savers, size: int) -> Prediction:
        params, samples = self._case(savers, size)
        return predict(take(params, samples), size, self._device, samples=samples, savers=savers)


def planner(forecast: Forecast, params: Params, description: dict[str, Any], device: Device) -> Planner:
    chosen, choice = params.batch.micro_batch_size, combinations(params, description, cuda=device.caches)
    return Planner(
        forecast,
        forecast.window,
        combinations=choice,
        smallest=forecast.smallest(choice[0]) if chosen == "auto" else 1,
        fixed=chosen if isinstance(chosen, int) else None,
        ahead=forecast.ahead,
        rates=device.rates,
    )


def with_plan(
    params: Params, description: dict[str, Any], device: torch.device
) -> tuple[Params, Plan | None]:
    """The params with what the plan chose in place of each auto, and the plan; writes reports/plan.json.

    Raises UserError where nothing fits. A model that cannot be traced has no plan where none is needed.
    """
    PLAN.unlink(missing_ok=True)  # of another training
    asked, target = params.memory.budget_gib, devices.describe(device)
    budget = devices.budget(device, target) if asked == "auto" else round(float(asked) * GIB)
    with Tracer(description, cuda=target.caches) as tracer:
        fixed = params.batch.micro_batch_size != "auto"
        forecast = Forecast(params, description, target, tracer, real=not fixed)
        planned = planner(forecast, params, description, target)
        try:
            plan = planned.plan(budget)
        except TracingError as error:
            print(f"plan: none, as {error}")
            chosen = [] if params.memory.savers == "auto" else params.memory.savers
            return replace(params, memory=replace(params.memory, savers=chosen)), None
    if not plan.fits:
        raise UserError(refusal(params, plan))
    best = plan.best
    write(plan, planned)
    print(
        f"plan: micro-batch {best.micro_batch_size}, {plan.accumulation_steps} accumulation steps, "
        f"savers {' '.join(best.savers) or 'none'}, {in_mib(best.required)} predicted of "
        f"{budget / GIB:.2f} GiB ({device.type})"
    )
    batch = replace(params.batch, micro_batch_size=best.micro_batch_size)
    return replace(params, batch=batch, memory=replace(params.memory, savers=list(best.savers))), plan


def refusal(params: Params, plan: Plan) -> str:
    """Why nothing fits, and what would help."""
    best = plan.best
    biggest = sorted(best.components.items(), key=lambda entry: -entry[1])[:3]
    parts = ", ".join(f"{name.replace('_', ' ')} {in_mib(size)}" for name, size in biggest)
    with_savers = f" with savers {' '.join(best.savers)}" if best.savers else ""
    return (
        f"memory: micro-batch {best.micro_batch_size}{with_savers} takes {in_mib(best.required)}, "
        f"{in_mib(best.required - plan.budget)} more than the budget of {in_mib(plan.budget)} ({parts}). "
        f"{levers(params, best.savers, best.micro_batch_size)}, or a larger memory.budget_gib"
    )


def levers(params: Params, savers: Iterable[str], micro_batch_size: int) -> str:
    """What could make a training fit, of which it makes no use yet."""
    unused = {
        "batch.micro_batch_size: auto": micro_batch_size > 1,
        "precision amp_bf16 or amp_fp16": params.precision == "fp32",
        "memory.savers: auto, or checkpointing": not {CHECKPOINTING, CHECKPOINTING_HALF} & {*savers},
        "train.ema_decay 0": params.train.ema_decay > 0,
        "optimizer.name sgd": params.optimizer.name != "sgd",
    }
    tried = [lever for lever, is_left in unused.items() if is_left]
    return f"Try {', '.join([*tried, 'model.freeze', 'a smaller data.image_size or model'])}"


def write(plan: Plan, planned: Planner) -> None:
    """The decision, and the evidence it was taken on."""
    decision = {
        "micro_batch_size": plan.best.micro_batch_size,
        "accumulation_steps": plan.accumulation_steps,
        "savers": list(plan.best.savers),
        "predicted_peak_bytes": plan.best.required,
        "relative_time": round(plan.relative_time, 4),
    }
    evidence = {
        "budget_bytes": plan.budget,
        "window_samples": planned.window,
        "assumed_rates": asdict(planned.rates),
        "not_taken": [asdict(tried) for tried in plan.not_taken],
        "predictions": [prediction.as_dict() for prediction in planned.known.values()],
    }
    files.write_json(PLAN, {"decision": decision, "evidence": evidence})
