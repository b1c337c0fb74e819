"""`python -m pipeline clean`: what the folders of trainings take on the disk, and which nobody needs."""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pipeline import config, tracking
from pipeline.engine.checkpoint import is_temporary, step_of
from pipeline.resume.folder import Status, TrainingFolder, folders, holder, read_status, remove
from pipeline.stages.guard import code_digests

MIB = 1024**2


@dataclass(frozen=True)
class Entry:
    """One training's folder: what it is, what it takes in bytes, what `clean` does with it and why."""

    path: Path
    name: str
    state: str
    size: int
    removes: list[Path]
    reason: str


def clean(*, dry_run: bool, interrupted: bool) -> int:
    """Prints a table and removes what it says."""
    root = tracking.root() / config.load().checkpoint.folder
    entries = [_entry(path, interrupted) for path in folders(root)]
    if not entries:
        print(f"{root} holds no training")
        return 0
    _show(entries)
    freed = sum(_size(path) for entry in entries for path in entry.removes)
    if dry_run:
        print(f"{freed / MIB:,.1f} MiB would be freed; nothing was removed")
        return 0
    for entry in entries:
        for path in entry.removes:
            remove(path) if path.is_dir() else path.unlink(missing_ok=True)
    print(f"{freed / MIB:,.1f} MiB freed in {root}")
    return 0


def _entry(path: Path, interrupted: bool) -> Entry:
    status = read_status(path) or Status()
    pid = holder(path)
    checkpoints = TrainingFolder(path, status).checkpoints().paths()
    waiting = any(tracking.waiting_events(one) for one in path.glob("journal-*"))
    half_written = [one for one in path.iterdir() if is_temporary(one)]
    if pid is not None:
        return Entry(path, status.name, f"running (process {pid})", _size(path), [], "in use")
    if status.state == "finished":
        removes = [*checkpoints, *half_written] if waiting else [path]
        reason = "metrics wait: python -m pipeline deliver-metrics" if waiting else ""
        return Entry(path, status.name, "finished", _size(path), removes, reason)
    if not checkpoints:
        return Entry(path, status.name, "vanished before its first checkpoint", _size(path), [path], "")
    state = f"interrupted at step {step_of(checkpoints[0])} of {status.total_steps}"
    if interrupted:
        return Entry(path, status.name, state, _size(path), [path], "--interrupted")
    same_code = status.inputs.get("code") == code_digests("train")
    reason = "the same params continue it" if same_code else "checkpoint.resume continues it (other code)"
    return Entry(path, status.name, state, _size(path), half_written, reason)


def _show(entries: list[Entry]) -> None:
    table = Table("training", "folder", "state", "MiB", "removed", box=None)
    for entry in entries:
        whole = entry.path in entry.removes
        removed = "all" if whole else "checkpoints" if entry.removes else f"nothing: {entry.reason}"
        table.add_row(entry.name, entry.path.name, entry.state, f"{_size(entry.path) / MIB:,.1f}", removed)
    Console(width=140, soft_wrap=True).print(table)


def _size(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    return sum(one.stat().st_size for one in ([path] if path.is_file() else path.rglob("*")) if one.is_file())
