"""Stage train: build the model, fit it window by window, save it, and leave a run to look at."""

import sys
from pathlib import Path

import torch

from pipeline import files, models, tracking
from pipeline.config import Params, flatten
from pipeline.data import prepared
from pipeline.engine import CollapseError, DoesNotFitError
from pipeline.engine.checkpoint import step_of
from pipeline.errors import Stopped, UserError
from pipeline.memory.host import keep_freed_memory
from pipeline.memory.planner import Plan
from pipeline.resume.fingerprint import Inputs
from pipeline.resume.folder import TrainingFolder, note_on_others, training_folder
from pipeline.resume.found import Found, find, kept_plan
from pipeline.resume.keeper import Keeper
from pipeline.resume.stop import Stop
from pipeline.stages.device import choose_device, note_on_precision, set_determinism
from pipeline.stages.disk import note_on_disk, space
from pipeline.stages.guard import check_dependency, code_digests, inputs_unchanged, run_stage
from pipeline.stages.planning import levers, with_plan
from pipeline.stages.record import TRAINING_CSV, Record
from pipeline.stages.report import (
    DIAGNOSIS,
    log_collapse,
    log_end,
    log_resume,
    log_start,
    run_name,
)
from pipeline.stages.setup import image_set, without_deterministic_kernel
from pipeline.stages.training import Training, window_loader


def train(asked: Params) -> None:
    check_own_files(asked)
    files.check_writable(models.FOLDER, TRAINING_CSV.parent)
    DIAGNOSIS.unlink(missing_ok=True)  # of an earlier training
    data = prepared.open_prepared()
    device = choose_device(asked.execution.device)
    note_on_precision(asked.precision, device)
    inputs = made_of(asked, data)
    with training_folder(checkpoint_root(asked), inputs) as folder:
        note_on_others(folder.path.parent, folder.path, device.type)
        found = find(asked, inputs, folder, len(window_loader(asked, data)))
        params, plan = planned(asked, found, data, device)
        prepare_device(params, data, device)
        training = Training(params, data, device, plan)
        needed = space(params, training.trainer.model)
        note_on_disk(needed, folder.path, folder.checkpoints().size_in_bytes())
        begun = begin(asked, inputs, folder, found, training)
        with (
            tracking.training_run(
                params.tracking.experiment,
                folder.status.name,
                folder.journal,
                resumed=begun,
                run_id=found.content["run_id"] if found and begun else None,
                step=lambda: training.trainer.state.step,
            ) as run,
            inputs_unchanged("train"),
        ):
            record = started(run, asked, training, folder, found)
            fit_kept(asked, inputs, training, folder, record, run)
            save_model(training)
            log_end(run, training, record)
        folder.finish(asked.checkpoint.keep_finished)


def check_own_files(params: Params) -> None:
    """Code and weights of the user's own must be dependencies, or DVC would not train again."""
    check_dependency(("train", "evaluate"), "model.name", params.model.name)
    check_dependency(("train",), "loss.name", params.loss.name)
    check_dependency(("train",), "model.weights", params.model.weights)


def checkpoint_root(params: Params) -> Path:
    """checkpoint.folder, in the real project: a copy that DVC made for an experiment is deleted after it."""
    return tracking.root() / params.checkpoint.folder


def made_of(asked: Params, data: prepared.Prepared) -> Inputs:
    """The inputs whose fingerprint says whether an interrupted training is this one."""
    digests = dict(data.description["sha256"])
    digests["dataset.json"] = files.sha256(prepared.FOLDER / "dataset.json")
    weights = Path(asked.model.weights)
    if weights.is_file():
        digests[str(weights)] = files.sha256(weights)
    return {"data": digests, "code": code_digests("train"), "what": flatten(asked, "what")}


def planned(
    asked: Params, found: Found | None, data: prepared.Prepared, device: torch.device
) -> tuple[Params, Plan | None]:
    """The plan; of a continued training the one it went by, unless that does not fit any more."""
    kept = kept_plan(asked, found, device.type)
    try:
        return with_plan(kept, data.description, device)
    except UserError as error:
        if kept == asked:
            raise
        print(f"the plan so far is of no use here: {error}")
        return with_plan(asked, data.description, device)


def prepare_device(params: Params, data: prepared.Prepared, device: torch.device) -> None:
    """Settings of the whole process; a CPU is deterministic as it is."""
    if device.type == "cpu":
        keep_freed_memory()
        return
    deterministic = params.train.deterministic
    set_determinism(
        deterministic, without_deterministic_kernel(params, image_set(data)) if deterministic else []
    )


def begin(
    asked: Params, inputs: Inputs, folder: TrainingFolder, found: Found | None, training: Training
) -> bool:
    """Notes in the folder what starts now; whether it is a training that was begun before."""
    interrupted = folder.status.state == "unfinished" and asked.checkpoint.resume == "auto"
    if found.own if found else interrupted:
        folder.go_on(training.total_steps)
        return True
    folder.begin(run_name(asked), training.total_steps, inputs)
    return False


def started(
    run: tracking.Run, asked: Params, training: Training, folder: TrainingFolder, found: Found | None
) -> Record:
    """Logs what is known before the first window, or what it is continued with."""
    if not run.has_start:
        log_start(run, asked, training)
    record = training.record(run)
    if found is not None:
        training.go_on_from(found, record)
    if found is not None or folder.status.resumes:
        log_resume(run, asked, training, folder.status.resumes, found)
    return record


def fit_kept(
    asked: Params,
    inputs: Inputs,
    training: Training,
    folder: TrainingFolder,
    record: Record,
    run: tracking.Run,
) -> None:
    """Trains to the end and keeps the state on the way; at the end too, lest saving the model fails."""
    section, trainer = asked.checkpoint, training.trainer
    keeper = Keeper(
        folder.checkpoints(keep=section.keep, background=trainer.precision.device.type == "cuda"),
        lambda: training.content(asked, inputs, record, run),
        every_minutes=section.every_minutes,
        every_steps=section.every_steps if isinstance(section.every_steps, int) else None,
    )
    try:
        with Stop() as stop:
            try:
                training.fit(record, keeper, stop)
            except Stopped:
                if keeper.save(trainer.state.step) and keeper.wait():
                    print(
                        f"saved at step {trainer.state.step} of {training.total_steps}: the same command "
                        "continues from there"
                    )
                raise
        keeper.save(trainer.state.step)
        keeper.wait()
    except CollapseError as error:
        log_collapse(run, error)
        raise UserError(f"{error} The diagnosis is in {DIAGNOSIS} and in the MLflow run.") from None
    except DoesNotFitError as error:
        left = levers(training.params, training.params.memory.chosen, trainer.micro_batch_size)
        kept = folder.checkpoints().paths()
        then = f". The same command continues from step {step_of(kept[0])}" if kept else ""
        raise UserError(f"{str(error).rstrip('.')}. {left}{then}") from error
    except RuntimeError as error:
        if "does not have a deterministic implementation" not in str(error):
            raise
        raise UserError(
            f"{str(error).partition(',')[0]} on CUDA: set train.deterministic: false to train without"
        ) from None


def save_model(training: Training) -> None:
    section = training.params.model
    models.save_model(
        training.best.finite_weights(),
        name=section.name,
        args=section.args,
        transform=training.transform,
        images=training.images,
        micro_batch_size=training.trainer.micro_batch_size,
    )


if __name__ == "__main__":
    sys.exit(run_stage("train", train))
