"""Stage train: build the model, fit it window by window, save it, and leave a run to look at."""

import sys

from pipeline import files, metrics, models, tracking
from pipeline.config import Params
from pipeline.data import prepared
from pipeline.data.loader import WindowLoader
from pipeline.engine import CollapseError, DoesNotFitError, StepResult, Trainer, fit
from pipeline.errors import UserError
from pipeline.memory.host import keep_freed_memory
from pipeline.stages.account import Account
from pipeline.stages.best import Best
from pipeline.stages.device import choose_device, note_on_precision, set_determinism
from pipeline.stages.guard import check_dependency, inputs_unchanged, run_stage
from pipeline.stages.planning import levers, with_plan
from pipeline.stages.progress import TrainingProgress
from pipeline.stages.record import TRAINING_CSV, Record
from pipeline.stages.report import DIAGNOSIS, log_collapse, log_end, log_start, run_name
from pipeline.stages.setup import (
    build_forward,
    build_loss,
    build_model,
    build_trainer,
    image_set,
    note_on_split,
    seed_everything,
)


def train(asked: Params) -> None:
    check_own_files(asked)
    files.check_writable(models.FOLDER, TRAINING_CSV.parent)
    DIAGNOSIS.unlink(missing_ok=True)  # of an earlier training
    data = prepared.open_prepared()
    device = choose_device(asked.execution.device)
    note_on_precision(asked.precision, device)
    params, plan = with_plan(asked, data.description, device)
    seed_everything(params.seed)
    set_determinism(params.train.deterministic, device)
    if device.type == "cpu":
        keep_freed_memory()
    images = image_set(data)
    model, transform, fresh = build_model(params, images)
    note_on_split(model)
    model.to(device)
    workers = params.execution.workers if isinstance(params.execution.workers, int) else 0
    loader = WindowLoader(
        data.splits["train"], params.batch.effective_batch_size, seed=params.seed, workers=workers
    )
    trainer = build_trainer(
        params,
        model,
        build_forward(params, model, transform),
        build_loss(params, data),
        total_steps=len(loader) * params.train.epochs,
    )
    account = Account(plan, params.memory.chosen, trainer, count=not params.execution.compile)
    with (
        tracking.training_run(params.tracking.experiment, run_name(params)) as run,
        inputs_unchanged("train"),
    ):
        log_start(run, asked, params, data, trainer, account, fresh)
        record, best = fit_recorded(params, account, trainer, transform, data, loader, run)
        models.save_model(
            best.finite_weights(),
            name=params.model.name,
            args=params.model.args,
            transform=transform,
            images=images,
            micro_batch_size=trainer.micro_batch_size,
        )
        log_end(run, params, record, best, trainer, account, data, transform)


def check_own_files(params: Params) -> None:
    """Code and weights of the user's own must be dependencies, or DVC would not train again."""
    check_dependency(("train", "evaluate"), "model.name", params.model.name)
    check_dependency(("train",), "loss.name", params.loss.name)
    check_dependency(("train",), "model.weights", params.model.weights)


def fit_recorded(
    params: Params,
    account: Account,
    trainer: Trainer,
    transform: models.Transform,
    data: prepared.Prepared,
    loader: WindowLoader,
    run: tracking.Run,
) -> tuple[Record, Best]:
    """Trains to the end; returns the rows and the weights to be saved."""
    batch, state, best = params.batch, trainer.state, Best(params.train.save)
    record = Record(
        run,
        trainer,
        account,
        every=params.tracking.log_every_steps,
        epoch_samples=len(data.splits["train"]),
        effective_batch_size=batch.effective_batch_size,
    )
    validation = WindowLoader(data.splits["validation"], batch.planned, seed=params.seed)
    progress = TrainingProgress(params.train.epochs, len(loader) * params.train.epochs)

    def after_step(result: StepResult) -> None:
        record.after_step(result)
        progress.after_step(result, state.skipped_steps)

    def after_epoch(epoch: int) -> None:
        with trainer.average.swapped_in():
            outputs = metrics.logits(trainer.model, validation.in_order(), transform)
            scores = metrics.evaluate(outputs, data.classes).scalars
            best.consider(trainer.model, scores["accuracy"], epoch)
        values = {f"val/{name}": value for name, value in scores.items()}
        record.after_epoch(values | {"val/best_accuracy": best.accuracy})
        progress.after_epoch(
            epoch, scores["loss"], scores["accuracy"], state.skipped_steps, record.loss_scale
        )

    try:
        with progress:
            fit(
                trainer,
                loader.epoch,
                epochs=params.train.epochs,
                step=account.step,
                after_step=after_step,
                after_epoch=after_epoch,
            )
    except CollapseError as error:
        log_collapse(run, error)
        raise UserError(f"{error} The diagnosis is in {DIAGNOSIS} and in the MLflow run.") from None
    except DoesNotFitError as error:
        left = levers(params, params.memory.chosen, trainer.micro_batch_size)
        raise UserError(f"{str(error).rstrip('.')}. {left}") from error
    finally:
        run.flush()
    return record, best


if __name__ == "__main__":
    sys.exit(run_stage("train", train))
