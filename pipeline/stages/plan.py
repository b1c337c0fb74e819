"""The command `plan`: a table to decide by, before anything is trained or rented."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from pipeline import config, figures, models
from pipeline.config import Params
from pipeline.data import prepared, sources, splits
from pipeline.engine import depends_on_split, freeze
from pipeline.errors import UserError
from pipeline.memory import devices
from pipeline.memory.devices import GIB, in_mib
from pipeline.memory.planner import Plan
from pipeline.memory.prediction import CUDA, MIB, Device, Prediction
from pipeline.memory.trace import without_memory
from pipeline.memory.workload import CHANNELS, CLASSIFICATION, WORKLOADS
from pipeline.stages.device import choose_device
from pipeline.stages.disk import Space, space
from pipeline.stages.largest import largest
from pipeline.stages.planning import Forecast, planner
from pipeline.stages.quantised import BYTES
from pipeline.stages.tracing import Tracer

OWN_PARTS = ("rounding", "context", "workspaces")  # of a prediction, besides the tensors' components


def show(overrides: list[str], budgets: str, *, as_json: bool, figure: str | None, with_largest: bool) -> int:
    """Prints the plan of params.yaml with the overrides, for each budget; exit code 1 where none fits.

    The micro-batch is to be found, whatever the file says; one that is given as an override is kept.
    """
    text = Path("params.yaml").read_text(encoding="utf-8")
    params = config.parse(config.overridden(text, ["batch.micro_batch_size=auto", *overrides]))
    description = describe_data(params)
    device, sizes = target(params, budgets)
    with Tracer(description, cuda=device.caches) as tracer:
        forecast = Forecast(params, description, device, tracer)
        planned = planner(forecast, params, description, device)
        plans = [planned.plan(size) for size in sizes]
    if as_json:
        disk = as_bytes(space(params, on_meta(params, description)))
        print(json.dumps([as_dict(plan) | {"disk": disk} for plan in plans], indent=2))
    else:
        print_table(params, description["shape"][-1], device, forecast.window, plans)
        print_breakdown(next((plan for plan in plans if plan.fits), plans[0]))
        print_notes(params, description, overrides, plans)
        if with_largest:
            print_largest(params, description, device, sizes)
    if figure:
        draw(plans, Path(figure))
    return 0 if any(plan.fits for plan in plans) else 1


def target(params: Params, budgets: str) -> tuple[Device, list[int]]:
    """The device planned for, and budgets in bytes: those given, of CUDA devices, or what is free here."""
    if not budgets:
        device = choose_device(params.execution.device)
        described = devices.describe(device)
        return described, [devices.budget(device, described)]
    try:
        sizes = [float(size) for size in budgets.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) <= 0:
        raise UserError(f"--budget {budgets}: numbers of GiB above 0, as in 6,8,12")
    return CUDA, [round(size * GIB) for size in sizes]


def describe_data(params: Params) -> dict[str, Any]:
    """dataset.json of the prepared set if it is of this source, else what prepare would write of it."""
    is_prepared = (prepared.FOLDER / "dataset.json").is_file()
    description: dict[str, Any] = prepared.read_description() if is_prepared else {"source": None}
    if description["source"] != params.data.source:
        data, labelled = params.data, sources.read(params.data.source)
        indices = splits.split(
            labelled, validation=data.validation_fraction, test=data.test_fraction, seed=params.seed
        )
        description = prepared.describe(labelled, indices, data.source)
    workload = WORKLOADS[models.kind(params.model.name)]
    if workload is not CLASSIFICATION:  # of no data set of ours
        description["shape"] = [CHANNELS, *[workload.pixels_of(params.model.name)] * 2]
    if params.data.image_size != "auto":
        description["shape"] = [description["shape"][0], *[params.data.image_size] * 2]
    return description


def print_table(params: Params, pixels: int, device: Device, window: int, plans: list[Plan]) -> None:
    kind = models.kind(params.model.name)
    alone = "" if kind == "classification" else f" ({kind}: plan only, train takes classifiers)"
    print(
        f"{params.model.name}{alone}, {pixels} px, {params.precision}, {params.optimizer.name}, "
        f"effective batch {window}, on {device.name}\n"
    )
    print(
        f"{'budget GiB':>10}  {'micro-batch':>11}  {'steps':>5}  {'predicted peak':>14}  {'time':>5}  needed"
    )
    for plan in plans:
        best, budget = plan.best, f"{plan.budget / GIB:10.2f}"
        if plan.fits:
            numbers = f"{best.micro_batch_size:11}  {plan.accumulation_steps:5}"
            rest = f"{plan.relative_time:5.2f}  {needed(best)}"
        else:
            numbers = f"{'-':>11}  {'-':>5}"
            more = in_mib(best.required - plan.budget)
            rest = f"{'-':>5}  does not fit: {more} more, with {needed(best)}"
        print(f"{budget}  {numbers}  {in_mib(best.required):>14}  {rest}")
    rates = device.rates
    print(
        "time: of a window, to one without savers in a single micro-batch; at "
        f"{rates.flops_per_second / 1e12:g} TFLOP/s, {rates.host_bytes_per_second / 1e9:g} GB/s to the host, "
        f"{rates.launch_seconds * 1e6:g} us an operation"
    )


def needed(prediction: Prediction) -> str:
    """The savers, and what they keep in the host's memory."""
    savers = " ".join(prediction.savers) or "no saver"
    return f"{savers}, {in_mib(prediction.host)} of the host" if prediction.host else savers


def print_breakdown(plan: Plan) -> None:
    best = plan.best
    print(f"\nmicro-batch {best.micro_batch_size}, {plan.budget / GIB:.2f} GiB, at the peak:")
    for name, size in parts(best).items():
        if size:
            print(f"  {name.replace('_', ' '):16}{in_mib(size):>12}{size / best.required:8.1%}")
    print(f"  {'all':16}{in_mib(best.required):>12}")
    print(f"The peak is in the {best.phase}: {best.operation}, module {best.module or '(none)'}.")
    print("Tensors at the peak of each phase: ", end="")
    print(", ".join(f"{phase} {in_mib(size)}" for phase, size in best.phases.items()) + ".")
    for tried in plan.not_taken:
        print(
            f"Not taken: {' '.join(tried.savers) or 'no saver'}, {in_mib(tried.required)} at least, time "
            f"{tried.relative_time:.2f}: {tried.reason}."
        )


def print_notes(params: Params, description: dict[str, Any], overrides: list[str], plans: list[Plan]) -> None:
    model = on_meta(params, description)
    if kinds := depends_on_split(model):
        print(f"The result depends on the micro-batch: the model has {', '.join(kinds)}.")
    print(f"Disk: {space(params, model)}.")
    best = next((plan for plan in plans if plan.fits), None)
    state = 2 * (best or plans[0]).best.highest["gradients"]  # two moments, in float32 as gradients are
    if params.optimizer.name == "adamw" and params.optimizer.state_bits == 32:
        saved = {bits: state * (1 - BYTES[bits] / BYTES[32]) for bits in (8, 4)}
        print(
            f"optimizer.state_bits 8 would save {in_mib(saved[8])} of the state, 4 {in_mib(saved[4])}; both "
            "are approximate, so they are yours to choose."
        )
    if best is not None and models.kind(params.model.name) == "classification":
        planned = ("batch.micro_batch_size=", "memory.savers=")
        others = [change for change in overrides if not change.startswith(planned)]
        savers = ",".join(best.best.savers)
        changes = [
            *others,
            f"batch.micro_batch_size={best.best.micro_batch_size}",
            f"memory.savers=[{savers}]",
        ]
        print("To train so: dvc exp run " + " ".join(f"-S {change}" for change in changes))


def on_meta(params: Params, description: dict[str, Any]) -> nn.Module:
    """The model, with what is frozen, and without memory."""
    section, (channels, *_) = params.model, description["shape"]
    model = without_memory(
        lambda: models.build(section.name, section.args, len(description["classes"]), channels),
        device="meta",
    )
    freeze(model, section.freeze)
    return model


def print_largest(params: Params, description: dict[str, Any], device: Device, budgets: list[int]) -> None:
    for budget, found in largest(params, description, device, budgets).items():
        if found is None:
            print(f"{budget / GIB:.2f} GiB: none of torchvision's classifiers fits, with any saver.")
        else:
            name, prediction = found
            print(
                f"{budget / GIB:.2f} GiB: the largest of torchvision's classifiers that fits is {name}, "
                f"{in_mib(prediction.required)} at micro-batch 1 with {needed(prediction)}."
            )


def parts(prediction: Prediction) -> dict[str, int]:
    """Every byte of `required` under a name."""
    return prediction.components | {name: getattr(prediction, name) for name in OWN_PARTS}


def as_dict(plan: Plan) -> dict[str, Any]:
    return {
        "budget": plan.budget,
        "fits": plan.fits,
        "accumulation_steps": plan.accumulation_steps,
        "relative_time": plan.relative_time,
        "not_taken": [asdict(tried) for tried in plan.not_taken],
        "prediction": plan.best.as_dict(),
    }


def as_bytes(disk: Space) -> dict[str, int]:
    return {"model": disk.model, "checkpoint": disk.checkpoint, "checkpoints": disk.checkpoints}


def draw(plans: list[Plan], path: Path) -> None:
    names = [
        "\n".join(
            [f"{plan.budget / GIB:g} GiB", f"micro-batch {plan.best.micro_batch_size}", *plan.best.savers]
        )
        for plan in plans
    ]
    stacked = {
        name.replace("_", " "): [parts(plan.best)[name] / MIB for plan in plans]
        for name in parts(plans[0].best)
        if any(parts(plan.best)[name] for plan in plans)
    }
    figure = figures.memory_plan(names, stacked, [plan.budget / MIB for plan in plans])
    figure.savefig(path, dpi=100)
    figures.close(figure)
