"""The plan: which micro-batch fits this device, or any budget, before anything is trained.

Train makes one at its start where batch.micro_batch_size is auto, and `python -m pipeline plan` shows one for
any device. The plan is no stage of DVC's: hardware is no dependency of a result.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pipeline import files
from pipeline.config import Params
from pipeline.errors import UserError
from pipeline.memory import devices
from pipeline.memory.devices import GIB, in_mib
from pipeline.memory.planner import Device, Plan, Planner, Prediction, predict
from pipeline.stages.tracing import measure

PLAN = Path("reports/plan.json")


def planner(params: Params, description: dict[str, Any], device: Device) -> Planner:
    """Plans this training for `device`; each micro-batch asked for is one trace of a few seconds."""
    window = min(params.batch.effective_batch_size, description["counts"]["train"])

    def predicted(size: int) -> Prediction:
        batch = replace(params.batch, micro_batch_size=size)
        samples = min(2 * size, window)
        trace = measure(replace(params, batch=batch), description, samples, cuda=device.caches)
        return predict(trace, size, device)

    return Planner(predicted, window)


def with_plan(params: Params, description: dict[str, Any], device: torch.device) -> Params:
    """The params with the micro-batch that the plan chose; writes reports/plan.json.

    A micro-batch that is a number is taken as it is. Raises UserError where not even 1 fits.
    """
    if params.batch.micro_batch_size != "auto":
        PLAN.unlink(missing_ok=True)  # of another training
        return params
    asked = params.memory.budget_gib
    budget = devices.budget(device) if asked == "auto" else round(float(asked) * GIB)
    planned = planner(params, description, devices.describe(device))
    print(f"plan: what fits into {budget / GIB:.2f} GiB of {device.type}?")
    plan = planned.plan(budget)
    if not plan.fits:
        raise UserError(refusal(plan))
    batch = replace(params.batch, micro_batch_size=plan.best.micro_batch_size)
    write(plan, planned)
    print(
        f"plan: micro-batch {plan.best.micro_batch_size}, {plan.accumulation_steps} accumulation steps, "
        f"{in_mib(plan.best.required)} predicted"
    )
    return replace(params, batch=batch)


def refusal(plan: Plan) -> str:
    """Why nothing fits, and what would help."""
    best = plan.best
    biggest = sorted(best.components.items(), key=lambda entry: -entry[1])[:3]
    parts = ", ".join(f"{name.replace('_', ' ')} {in_mib(size)}" for name, size in biggest)
    return (
        f"memory: micro-batch 1 takes {in_mib(best.required)}, {in_mib(best.required - plan.budget)} more "
        f"than the budget of {in_mib(plan.budget)} ({parts}). Try a smaller data.image_size or model, "
        "precision amp_bf16 or amp_fp16, model.freeze, train.ema_decay 0, optimizer sgd, or a larger "
        "memory.budget_gib"
    )


def write(plan: Plan, planned: Planner) -> None:
    """The decision, and the evidence it was taken on."""
    decision = {
        "micro_batch_size": plan.best.micro_batch_size,
        "accumulation_steps": plan.accumulation_steps,
        "predicted_peak_bytes": plan.best.required,
    }
    evidence = {
        "budget_bytes": plan.budget,
        "window_samples": planned.window,
        "predictions": [planned.known[size].as_dict() for size in sorted(planned.known)],
    }
    files.write_json(PLAN, {"decision": decision, "evidence": evidence})
