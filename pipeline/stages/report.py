"""What a run says of itself: params, tags, inputs at its start; files, figures, a description at its end."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline import config, figures, files, models, provenance, tracking
from pipeline.config import Params
from pipeline.data import prepared
from pipeline.engine import CollapseError, Trainer, accumulation_steps, depends_on_split
from pipeline.resume.found import Found, changes
from pipeline.stages.account import Account
from pipeline.stages.best import Best
from pipeline.stages.planning import PLAN
from pipeline.stages.record import TRAINING_CSV, Record
from pipeline.stages.training import Training, environment

DIAGNOSIS = Path("reports/diagnosis.json")


def run_name(params: Params) -> str:
    """What was asked: small_cnn-lr0.003-b64."""
    if params.tracking.run_name != "auto":
        return params.tracking.run_name
    name = params.model.name.rpartition(":")[2]
    return f"{name}-lr{params.optimizer.lr:g}-b{params.batch.effective_batch_size}"


def log_start(run: tracking.Run, asked: Params, training: Training) -> None:
    """What is known before the first window: params, tags, inputs, and the memory that training holds.

    asked: the params as the file has them, without what the plan made of them.
    """
    params, trainer, data, account = training.params, training.trainer, training.data, training.account
    source, batch = provenance.source(asked), params.batch
    device = trainer.precision.device
    run.params(
        config.flatten(params)
        | {
            "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "torch": torch.__version__,
            "accumulation_steps": accumulation_steps(batch.effective_batch_size, batch.planned),
            "threads": torch.get_num_threads(),
        }
    )
    tags = {"git.commit": source.commit, "git.dirty": source.dirty, "overrides": source.overrides}
    if depends := depends_on_split(trainer.model):
        tags["depends_on_micro_batch"] = ", ".join(depends)
    if training.fresh:
        tags["fresh_weights"] = " ".join(training.fresh)
    run.tags(tags | provenance.dvc_tags())
    if source.diff:
        run.text(source.diff, "git.diff")
    run.text(config.to_yaml(asked), "params.yaml")
    run.text(provenance.packages(), "packages.txt")
    run.file(prepared.FOLDER / "dataset.json")
    run.dataset(prepared.FOLDER, data.description)
    if account.plan is not None:
        run.file(PLAN)
    run.metrics({f"memory/{name}": value for name, value in account.known_before().items()}, step=0)


def log_resume(
    run: tracking.Run, asked: Params, training: Training, number: int, found: Found | None
) -> None:
    """Tags resume.<n>.*: where it was continued, and what of how it runs is another now. Params stay."""
    if found is not None and not found.own:
        before = found.content["run_id"] or found.content["journal"]["folder"]
        run.tags({"continued_from": before, "continued_from.step": found.step})
        return
    here = environment(training.trainer.precision.device)
    changed = changes(found.content["how"], asked) if found else {}
    before = found.content["environment"] if found else here
    changed |= {name: f"{before[name]} -> {here[name]}" for name in here if before[name] != here[name]}
    if found and (size := found.content["plan"]["micro_batch_size"]) != training.trainer.micro_batch_size:
        changed["micro_batch_size"] = f"{size} -> {training.trainer.micro_batch_size}"
    run.tags({f"resume.{number}.step": found.step if found else 0})
    run.tags({f"resume.{number}.{name}": value for name, value in changed.items()})
    if changed:
        print(
            f"how it runs is different from before ({', '.join(f'{k} {v}' for k, v in changed.items())}): "
            "the last bits of the result may be"
        )


def log_end(run: tracking.Run, training: Training, record: Record) -> None:
    """What is known after the last window: files, figures, the scaler's state, the model, the description."""
    params, trainer, account = training.params, training.trainer, training.account
    record.write_csv()
    tracking.save_reference(run, trainer.state.step)
    run.file(TRAINING_CSV)
    run.json(trainer.precision.state_dict(), "scaler.json")
    errors = account.known_after(record.rows)
    run.metrics({f"memory/{name}": value for name, value in errors.items()}, trainer.state.step)
    for name, figure in run_figures(record, account).items():
        run.figure(figure, f"figures/{name}.png")
        figures.close(figure)
    if params.tracking.log_model:
        loaded = models.load_model(own_code=params.model.name)
        example = torch.from_numpy(np.array(training.data.splits["validation"].images[:2]))
        run.model(loaded.model, training.transform(example).numpy())
    text = description(params, training.best, trainer, account)
    run.describe(text)
    print(text.replace("**", "").replace("`", ""))


def log_collapse(run: tracking.Run, error: CollapseError) -> None:
    """Leaves the diagnosis where it can be read: in a file and in the run."""
    files.write_json(DIAGNOSIS, error.diagnosis.as_dict())
    run.file(DIAGNOSIS)
    run.describe(f"**Collapsed.** {error}")


def run_figures(record: Record, account: Account) -> dict[str, Any]:
    return {
        "loss_and_accuracy": figures.loss_and_accuracy(record.rows),
        "loss_scale": figures.loss_scale(record.rows),
        "memory_by_component": account.figure(record.rows),
    }


def description(params: Params, best: Best, trainer: Trainer, account: Account) -> str:
    """What a person reads first on the run page; markdown, a sentence a line."""
    state, batch = trainer.state, params.batch
    steps = accumulation_steps(batch.effective_batch_size, batch.planned)
    kept = "best" if params.train.save == "best" else "last"
    return (
        f"**val/accuracy {best.accuracy:.4f}** at epoch {best.epoch} of {params.train.epochs} "
        f"(the {kept}).\n\n"
        f"Plan: effective batch {batch.effective_batch_size} = {steps} micro-batches of "
        f"{batch.planned}, {params.precision}, {trainer.precision.device.type}, savers: "
        f"{', '.join(params.memory.chosen) or 'none'}.\n\n"
        f"{account.sentence()}\n\n"
        f"{state.skipped_steps} of {state.step} steps were skipped (non-finite gradient).\n\n"
        f"Model: `{Path(models.FOLDER) / 'model.safetensors'}`."
    )
