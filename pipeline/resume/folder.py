"""A training's folder under `checkpoint.folder`: one for each fingerprint, one process in it at a time.

    <fingerprint>/
      training.json           what it is made of, how it stands, the journal of its MLflow run
      step-00000120.checkpoint
      journal-…/              see pipeline.tracking
      lock                    held by the process that trains; its pid is in it

The lock is the kernel's (POSIX record locks): it goes with the process that held it, however that ended, and
is not inherited by loader processes. So a lock file that nobody holds is stale, and means nothing.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from pipeline import files
from pipeline.engine import Checkpoints
from pipeline.errors import UserError
from pipeline.resume.fingerprint import Inputs, fingerprint

STATUS = "training.json"
LOCK = "lock"
MADE_BY = "python -m pipeline train"
ASK_FOR_SECONDS = 1.0


@dataclass
class Status:
    """training.json."""

    inputs: Inputs = field(default_factory=dict)
    state: str = "new"  # new, unfinished, finished
    name: str = ""  # of the run
    journal: str = ""  # the folder of its journal
    resumes: int = 0
    total_steps: int = 0


class TrainingFolder:
    """Of one training; `status` is training.json as it stood, a new one where none did."""

    def __init__(self, path: Path, status: Status) -> None:
        self.path = path
        self.status = status

    @property
    def journal(self) -> Path:
        return self.path / self.status.journal

    def checkpoints(self, *, keep: int = 1, background: bool = False) -> Checkpoints:
        return Checkpoints(self.path, keep=keep, background=background)

    def write_status(self) -> None:
        files.write_json(self.path / STATUS, asdict(self.status))

    def begin(self, name: str, total_steps: int, inputs: Inputs) -> None:
        """A training from its start: what an earlier one left is dropped, but for journals not delivered."""
        self.checkpoints().remove_all()
        journal = f"journal-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.getpid()}"
        self.status = Status(inputs, "unfinished", name, journal, 0, total_steps)
        self.write_status()

    def go_on(self, total_steps: int) -> None:
        """A training that was interrupted is taken up again."""
        self.status.resumes += 1
        self.status.total_steps = total_steps
        self.write_status()

    def finish(self, keep: int) -> None:
        """The training is complete: of its checkpoints the newest `keep` stay."""
        self.status.state = "finished"
        self.write_status()
        for path in self.checkpoints().paths()[keep:]:
            path.unlink(missing_ok=True)


@contextmanager
def training_folder(root: Path, inputs: Inputs) -> Iterator[TrainingFolder]:
    """Inside, this process alone trains what `inputs` describe; raises UserError if another one does."""
    path = root / fingerprint(inputs)
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / LOCK).open("a+")
    except OSError as error:
        raise UserError(
            f"checkpoint.folder: {path} cannot be written to ({error.strerror}): free the path, correct its "
            "permissions, or set another checkpoint.folder"
        ) from None
    with lock:
        if not _acquired(lock):
            raise UserError(
                f"the same training is running already, as process {holder(path) or '(of another machine)'}: "
                f"same data, code and params. Wait for it, or end it (`kill {holder(path) or 'PID'}`) and "
                "start again: it will be continued"
            )
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        folder = TrainingFolder(path, read_status(path) or Status(inputs))
        folder.checkpoints().remove_temporary()
        yield folder


def _acquired(lock: IO[str]) -> bool:
    """Takes the lock, if it becomes free in a moment: whoever asks for the `holder` has it for that long."""
    until = time.monotonic() + ASK_FOR_SECONDS
    while True:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            if time.monotonic() > until:
                return False
        time.sleep(0.1)


def read_status(path: Path) -> Status | None:
    """training.json of a folder; None where there is none, or none that can be read."""
    try:
        kinds = {
            "inputs": dict,
            "state": str,
            "name": str,
            "journal": str,
            "resumes": int,
            "total_steps": int,
        }
        return Status(**files.read_json(path / STATUS, MADE_BY, kinds))
    except (UserError, TypeError):
        return None


def holder(path: Path) -> int | None:
    """The process that trains in a folder; None where nobody does."""
    with suppress(OSError, ValueError), (path / LOCK).open("r+") as lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return int(lock.read().strip())
    return None


def folders(root: Path) -> list[Path]:
    """Every training's folder under the root, the one used last first."""
    found = [path for path in root.iterdir() if (path / STATUS).is_file()] if root.is_dir() else []
    return sorted(found, key=lambda path: (path / STATUS).stat().st_mtime, reverse=True)


def remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


def note_on_others(root: Path, own: Path, device: str) -> None:
    """Says with whom the device is shared."""
    pids = [pid for path in folders(root) if path != own and (pid := holder(path))]
    if pids:
        others = "1 other training" if len(pids) == 1 else f"{len(pids)} other trainings"
        print(
            f"{others} of this project run{'s' if len(pids) == 1 else ''} now (process "
            f"{', '.join(map(str, pids))}): they share the {device} and its memory, and each is slower for it"
        )
