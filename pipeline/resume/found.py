"""What a start continues from: its own interrupted training, a checkpoint named on purpose, or a finished
training that is to have more epochs. And where it begins anew although something stands there, why.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.config import Params, flatten
from pipeline.engine import DamagedError, Schedule
from pipeline.engine import checkpoint as checkpoints
from pipeline.errors import UserError
from pipeline.resume.fingerprint import Inputs, differences
from pipeline.resume.folder import TrainingFolder, folders, holder, read_status

EPOCHS = "train.epochs"
SHOWN = 5  # differences
PARTS = ("trainer", "best", "record", "inputs", "how", "environment", "plan", "journal", "run_id")


@dataclass(frozen=True)
class Found:
    """A checkpoint that was read.

    own: of this very training, whose MLflow run goes on; else a new run begins. same: of a training that is
    made of the same, but for the number of epochs.
    """

    path: Path
    content: dict[str, Any]
    step: int
    own: bool
    same: bool

    def drop_tensors(self) -> None:
        """When they have been put where they belong: they take the memory of the training once more."""
        for part in ("trainer", "best"):
            self.content.pop(part, None)


def find(asked: Params, inputs: Inputs, folder: TrainingFolder, steps_in_epoch: int) -> Found | None:
    """Says what is continued, or why a training begins anew; raises UserError for a bad checkpoint.resume.

    steps_in_epoch: windows.
    """
    chosen = asked.checkpoint.resume
    if chosen == "never":
        return None
    if chosen != "auto":
        return _named(Path(chosen), inputs, folder)
    if folder.status.state == "unfinished":
        return _interrupted(folder)
    found = _extended(asked, inputs, folder, steps_in_epoch)
    if found is None:
        _note_on_nearest(inputs, folder)
    return found


def read(path: Path, *, own: bool, same: bool) -> Found:
    """A checkpoint of this pipeline; raises DamagedError for what is none."""
    content = checkpoints.read(path)
    if not isinstance(content, dict) or any(part not in content for part in PARTS):
        raise DamagedError("it is a checkpoint of something else")
    return Found(path, content, int(content["trainer"]["counters"]["step"]), own, same)


def _interrupted(folder: TrainingFolder) -> Found | None:
    """The newest checkpoint that is whole."""
    for path in folder.checkpoints().paths():
        try:
            found = read(path, own=True, same=True)
        except DamagedError as error:
            aside = path.rename(path.with_suffix(".damaged"))
            print(f"{aside}: {error}. The checkpoint before it is taken")
            continue
        print(f"continuing at step {found.step} of {folder.status.total_steps}, from {path}")
        return found
    print("an interrupted training of this kind left no checkpoint: it begins anew, in the same MLflow run")
    return None


def _named(path: Path, inputs: Inputs, folder: TrainingFolder) -> Found:
    """The checkpoint that checkpoint.resume names."""
    if not path.is_file():
        raise UserError(f"checkpoint.resume: {path} does not exist; auto, never, or the path of a checkpoint")
    try:
        found = read(path, own=False, same=False)
    except DamagedError as error:
        raise UserError(f"checkpoint.resume: {path}: {error}") from None
    changed = differences(found.content["inputs"], inputs)
    here = path.parent.resolve() == folder.path.resolve() and folder.status.state == "unfinished"
    found = replace(found, own=here and not changed, same=not changed)
    print(f"continuing at step {found.step}, from {path}")
    if changed:
        print(f"what is different since: {_listed(changed)}")
    return found


def _extended(asked: Params, inputs: Inputs, folder: TrainingFolder, steps_in_epoch: int) -> Found | None:
    """A finished training that had fewer epochs and is the same otherwise, where it can be gone on with."""
    for path in folders(folder.path.parent):
        status = read_status(path)
        if status is None or status.state != "finished" or path == folder.path:
            continue
        before = status.inputs.get("what", {}).get(EPOCHS, 0)
        if _without_epochs(status.inputs) != _without_epochs(inputs) or before >= asked.train.epochs:
            continue
        for kept in TrainingFolder(path, status).checkpoints().paths():
            if why := _not_exact(asked, before * steps_in_epoch, asked.train.epochs * steps_in_epoch):
                print(
                    f"{kept.parent} has {before} epochs of this training, which cannot be gone on with: {why}"
                )
                return None
            try:
                found = read(kept, own=False, same=True)
            except DamagedError as error:
                print(f"{kept}: {error}")
                continue
            print(f"{before} of {asked.train.epochs} epochs are trained already: continuing from {kept}")
            return found
    return None


def _not_exact(asked: Params, before: int, now: int) -> str:
    """Why a training of `before` windows is not the beginning of one of `now`; empty where it is."""
    shorter, longer = (
        Schedule(asked.schedule.name, steps, asked.schedule.warmup_fraction) for steps in (before, now)
    )
    for step in range(before):
        if shorter(step) != longer(step):
            return (
                f"with schedule {asked.schedule.name} and warmup_fraction {asked.schedule.warmup_fraction:g} "
                f"the learning rate depends on train.epochs: at step {step + 1} it was "
                f"{asked.optimizer.lr * shorter(step):.4g} and would have been "
                f"{asked.optimizer.lr * longer(step):.4g}. With constant and 0 it does not"
            )
    return ""


def _note_on_nearest(inputs: Inputs, folder: TrainingFolder) -> None:
    """Names the interrupted training that is nearest to this one, and how to go on with it on purpose."""
    nearest: tuple[int, str] | None = None
    for path in folders(folder.path.parent):
        status = read_status(path)
        if status is None or status.state != "unfinished" or path == folder.path or holder(path):
            continue
        newest = TrainingFolder(path, status).checkpoints().paths()
        changed = differences(status.inputs, inputs)
        if newest and (nearest is None or len(changed) < nearest[0]):
            step = checkpoints.step_of(newest[0])
            nearest = (
                len(changed),
                f"{status.name}, interrupted at step {step} of {status.total_steps}, is not continued, as "
                f"this is another training: {_listed(changed)}. To continue it on purpose, set "
                "checkpoint.resume: "
                f"{newest[0]}",
            )
    if nearest is not None:
        print(nearest[1])


def kept_plan(asked: Params, found: Found | None, device: str) -> Params:
    """What is asked, with the micro-batch and the savers that the interrupted training went by.

    They may decide about the last bits. Where the memory section or the device changed, a plan is made anew.
    """
    if found is None or not found.same or found.content["environment"]["device"] != device:
        return asked
    before, plan = found.content["how"], found.content["plan"]
    if changes(before, asked, "memory."):
        return asked
    return replace(
        asked,
        batch=replace(asked.batch, micro_batch_size=plan["micro_batch_size"]),
        memory=replace(asked.memory, savers=list(plan["savers"])),
    )


def changes(before: dict[str, Any], asked: Params, prefix: str = "") -> dict[str, str]:
    """Of the *how* half: the keys that changed, "4 -> 2"."""
    return {
        name: f"{before.get(name, 'nothing')} -> {value}"
        for name, value in flatten(asked, "how").items()
        if name.startswith(prefix) and name != "checkpoint.resume" and before.get(name) != value
    }


def _without_epochs(inputs: Inputs) -> Inputs:
    return {
        part: {name: value for name, value in values.items() if name != EPOCHS}
        for part, values in inputs.items()
    }


def _listed(changed: list[str]) -> str:
    more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
    return f"{', '.join(changed[:SHOWN])}{more}"
