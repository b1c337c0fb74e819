"""Stage train: build the model, fit it window by window, save it, and leave a run to look at."""

import importlib
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pipeline import config, figures, files, metrics, models, provenance, tracking
from pipeline.config import Params
from pipeline.data import prepared
from pipeline.data.loader import WindowLoader
from pipeline.engine import (
    CollapseError,
    CrossEntropy,
    Precision,
    ScalerSettings,
    Schedule,
    Trainer,
    WeightAverage,
    accumulation_steps,
    allocate_state,
    build_optimizer,
    fit,
)
from pipeline.errors import UserError
from pipeline.memory import usage
from pipeline.stages.device import choose_device, note_on_precision, set_determinism
from pipeline.stages.guard import check_dependency, inputs_unchanged, run_stage
from pipeline.stages.progress import TrainingProgress
from pipeline.stages.record import TRAINING_CSV, Record


@dataclass
class Best:
    """The weights to be saved, and where they come from."""

    accuracy: float = -1.0
    epoch: int = 0
    weights: dict[str, Tensor] | None = None


def train(params: Params) -> None:
    check_own_files(params)
    files.check_writable(models.FOLDER, TRAINING_CSV.parent)
    data = prepared.open_prepared()
    device = choose_device(params.execution.device)
    note_on_precision(params.precision, device)
    seed_everything(params.seed)
    set_determinism(params.train.deterministic, device)
    images = image_set(data)
    model, transform, fresh = build_model(params, images)
    model.to(device)
    workers = params.execution.workers if isinstance(params.execution.workers, int) else 0
    loader = WindowLoader(
        data.splits["train"], params.batch.effective_batch_size, seed=params.seed, workers=workers
    )
    trainer = build_trainer(params, model, transform, total_steps=len(loader) * params.train.epochs)
    with (
        tracking.training_run(params.tracking.experiment, run_name(params)) as run,
        inputs_unchanged("train"),
    ):
        log_start(run, params, data, trainer, fresh)
        record, best = fit_recorded(params, trainer, transform, data, loader, run)
        save(params, best, transform, images)
        log_end(run, params, record, best, trainer, data, transform)


def check_own_files(params: Params) -> None:
    """Code and weights of the user's own must be dependencies, or DVC would not train again."""
    check_dependency(("train", "evaluate"), "model.name", params.model.name)
    check_dependency(("train",), "loss.name", params.loss.name)
    check_dependency(("train",), "model.weights", params.model.weights)


def run_name(params: Params) -> str:
    """What was asked: small_cnn-lr0.003-b64."""
    if params.tracking.run_name != "auto":
        return params.tracking.run_name
    name = params.model.name.rpartition(":")[2]
    return f"{name}-lr{params.optimizer.lr:g}-b{params.batch.effective_batch_size}"


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def image_set(data: prepared.Prepared) -> models.ImageSet:
    description = data.description
    return models.ImageSet(
        data.classes, data.channels, data.image_size, description["mean"], description["std"]
    )


def build_model(params: Params, images: models.ImageSet) -> tuple[nn.Module, models.Transform, list[str]]:
    """The model with what it starts from, its transform, and the names of the weights that are fresh."""
    section, classes = params.model, len(images.classes)
    model = models.build(section.name, section.args, classes, images.channels)
    transform = models.prepare_transform(model, section.name, section.weights, images)
    models.check_forward(model, section.name, transform, classes)
    return model, transform, models.load_weights(model, section.name, section.weights, classes)


def build_loss(params: Params) -> Callable[..., Any]:
    if params.loss.name == "cross_entropy":
        return CrossEntropy(params.loss.label_smoothing)
    if params.loss.label_smoothing:
        raise UserError("loss.label_smoothing: belongs to cross_entropy; a loss of your own sets its own")
    module, _, name = params.loss.name.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UserError(f"loss.name {params.loss.name} cannot be imported: {error}") from None


def build_trainer(
    params: Params, model: nn.Module, transform: models.Transform, *, total_steps: int
) -> Trainer:
    chosen, scaler, device = params.optimizer, params.scaler, next(model.parameters()).device
    try:
        optimizer = build_optimizer(
            model, chosen.name, lr=chosen.lr, weight_decay=chosen.weight_decay, momentum=chosen.momentum
        )
        settings = ScalerSettings(**vars(scaler))
        trainer = Trainer(
            model,
            optimizer,
            build_loss(params),
            precision=Precision(params.precision, device, settings),
            micro_batch_size=params.batch.micro_batch_size,
            max_grad_norm=chosen.max_grad_norm,
            schedule=Schedule(params.schedule.name, total_steps, params.schedule.warmup_fraction),
            average=WeightAverage(model, params.train.ema_decay),
            forward=lambda model, window: (model(transform(window["images"])), window["labels"]),
        )
    except ValueError as error:
        raise UserError(str(error)) from None
    allocate_state(optimizer)
    return trainer


def fit_recorded(
    params: Params,
    trainer: Trainer,
    transform: models.Transform,
    data: prepared.Prepared,
    loader: WindowLoader,
    run: tracking.Run,
) -> tuple[Record, Best]:
    """Trains to the end; returns the rows and the weights to be saved."""
    batch, state, best = params.batch, trainer.state, Best()
    record = Record(
        run,
        trainer,
        every=params.tracking.log_every_steps,
        epoch_samples=len(data.splits["train"]),
        accumulation_steps=accumulation_steps(batch.effective_batch_size, batch.micro_batch_size),
    )
    validation = WindowLoader(data.splits["validation"], batch.micro_batch_size, seed=params.seed)
    progress = TrainingProgress(params.train.epochs, len(loader) * params.train.epochs)

    def after_step(result: Any) -> None:
        record.after_step(result)
        progress.after_step(result, state.skipped_steps)

    def after_epoch(epoch: int) -> None:
        with trainer.average.swapped_in():
            outputs = metrics.logits(trainer.model, validation.in_order(), transform)
            scores = metrics.evaluate(outputs, data.classes).scalars
            keep_if_better(best, trainer.model, scores["accuracy"], epoch, params.train.save)
        record.after_epoch({f"val/{name}": value for name, value in scores.items()} | best_so_far(best))
        progress.after_epoch(
            epoch, scores["loss"], scores["accuracy"], state.skipped_steps, record.loss_scale
        )

    try:
        with progress:
            fit(
                trainer,
                loader.epoch,
                epochs=params.train.epochs,
                after_step=after_step,
                after_epoch=after_epoch,
            )
    except CollapseError as error:
        raise UserError(str(error)) from None
    finally:
        run.flush()
    return record, best


def keep_if_better(best: Best, model: nn.Module, accuracy: float, epoch: int, save: str) -> None:
    """Keeps a copy of the weights: of the best epoch, the earlier on a tie, or of each, so the last."""
    if save == "best" and accuracy <= best.accuracy:
        return
    best.weights = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
    best.accuracy, best.epoch = accuracy, epoch


def best_so_far(best: Best) -> dict[str, float]:
    return {"val/best_accuracy": best.accuracy}


def save(params: Params, best: Best, transform: models.Transform, images: models.ImageSet) -> None:
    assert best.weights is not None
    broken = [name for name, tensor in best.weights.items() if not torch.isfinite(tensor).all()]
    if broken:
        raise UserError(f"the trained weights are not finite ({broken[0]}): no model is written")
    models.save_model(
        best.weights, name=params.model.name, args=params.model.args, transform=transform, images=images
    )


def log_start(
    run: tracking.Run, params: Params, data: prepared.Prepared, trainer: Trainer, fresh: list[str]
) -> None:
    """What is known before the first window: params, tags, inputs, and the memory that training holds."""
    source, batch = provenance.source(params), params.batch
    device = trainer.precision.device
    run.params(
        config.flatten(params)
        | {
            "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "torch": torch.__version__,
            "accumulation_steps": accumulation_steps(batch.effective_batch_size, batch.micro_batch_size),
            "threads": torch.get_num_threads(),
        }
    )
    tags = {"git.commit": source.commit, "git.dirty": source.dirty, "overrides": source.overrides}
    if fresh:
        tags["fresh_weights"] = " ".join(fresh)
    run.tags(tags | provenance.dvc_tags())
    if source.diff:
        run.text(source.diff, "git.diff")
    run.text(config.to_yaml(params), "params.yaml")
    run.text(provenance.packages(), "packages.txt")
    run.file(prepared.FOLDER / "dataset.json")
    run.dataset(prepared.FOLDER, data.description)
    components = usage.components(trainer.model, trainer.optimizer)
    run.metrics({f"memory/{name}": value for name, value in components.items()}, step=0)
    run.flush()


def log_end(
    run: tracking.Run,
    params: Params,
    record: Record,
    best: Best,
    trainer: Trainer,
    data: prepared.Prepared,
    transform: models.Transform,
) -> None:
    """What is known after the last window: files, figures, the scaler's state, the model, the description."""
    record.write_csv()
    tracking.save_reference(run, trainer.state.step)
    run.file(TRAINING_CSV)
    run.json(trainer.precision.state_dict(), "scaler.json")
    for name, figure in run_figures(record, trainer).items():
        run.figure(figure, f"figures/{name}.png")
        figures.close(figure)
    if params.tracking.log_model:
        loaded = models.load_model()
        example = torch.from_numpy(np.array(data.splits["validation"].images[:2]))
        run.model(loaded.model, transform(example).numpy())
    text = description(params, best, trainer)
    run.describe(text)
    print(text.replace("**", "").replace("`", ""))


def run_figures(record: Record, trainer: Trainer) -> dict[str, Any]:
    device = trainer.precision.device.type
    metric, name = (
        ("memory/peak_allocated_mib", "peak allocated (device)")
        if device == "cuda"
        else ("memory/host_peak_rss_mib", "peak of the process (host)")
    )
    peak = max(row.get(metric, 0.0) for row in record.rows)
    components = usage.components(trainer.model, trainer.optimizer)
    return {
        "loss_and_accuracy": figures.loss_and_accuracy(record.rows),
        "loss_scale": figures.loss_scale(record.rows),
        "memory_by_component": figures.memory_by_component(components, (name, peak)),
    }


def description(params: Params, best: Best, trainer: Trainer) -> str:
    """What a person reads first on the run page; markdown, a sentence a line."""
    state, batch = trainer.state, params.batch
    steps = accumulation_steps(batch.effective_batch_size, batch.micro_batch_size)
    kept = "best" if params.train.save == "best" else "last"
    return (
        f"**val/accuracy {best.accuracy:.4f}** at epoch {best.epoch} of {params.train.epochs} "
        f"(the {kept}).\n\n"
        f"Plan: effective batch {batch.effective_batch_size} = {steps} micro-batches of "
        f"{batch.micro_batch_size}, {params.precision}, {trainer.precision.device.type}.\n\n"
        f"{state.skipped_steps} of {state.step} steps were skipped (non-finite gradient).\n\n"
        f"Model: `{Path(models.FOLDER) / 'model.safetensors'}`."
    )


if __name__ == "__main__":
    sys.exit(run_stage("train", train))
