"""What a run has to say, written down here first: MLflow gets it when it can, training never waits.

A journal is a folder for one MLflow run:

    events.jsonl     one event a line, in order, each with its time: params, metrics, tags, files, statuses
    files/           copies of files that wait to be sent
    delivered.json   how far MLflow has it, and the run's id there

An event is in the hands of the operating system when `append` returns, so a killed process loses none. A line
that was cut by a power loss is dropped when the journal is opened again.

A training that is resumed takes some steps again whose rows stand here already. They stand as they were
written first, with their times: MLflow drops a row that is the same in key, step, time and value, so that
whatever is sent twice is there once.
"""

import json
import math
import os
import shutil
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline import files

EVENTS = "events.jsonl"
DELIVERED = "delivered.json"
Event = dict[str, Any]


class Journal:
    """Opened for reading and writing; safe for several threads, written by one process at a time."""

    def __init__(self, folder: Path) -> None:
        """Of a folder in which a journal stands; see `create`."""
        self.folder = folder
        self._lock = threading.Lock()
        self._rows: dict[int, dict[str, float]] = {}
        self._known: dict[int, set[str]] = {}  # what stands at a step, rows or not
        self.begun: Event = {}
        self.description = ""
        self.status = ""
        self.has_model = False
        path = folder / EVENTS
        cut_off_torn_line(path)
        for event, _ in read_events(path):
            self._take_in(event)
        self._file = path.open("ab")

    @classmethod
    def create(
        cls,
        folder: Path,
        *,
        name: str,
        experiment: str,
        adopt: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> "Journal":
        """A new one. adopt: the id of a run that stands in MLflow already and is to be continued."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / EVENTS).touch()
        journal = cls(folder)
        journal.append(
            "run", id=uuid.uuid4().hex, name=name, experiment=experiment, adopt=adopt, tags=dict(tags or {})
        )
        return journal

    def append(self, kind: str, **values: Any) -> None:
        event = {"kind": kind, "time": int(time.time() * 1000), **values}
        with self._lock:
            self._take_in(event)
            self._file.write(json.dumps(event, default=str).encode() + b"\n")
            self._file.flush()

    def metrics(self, values: Mapping[str, float], step: int, *, row: bool = False) -> None:
        """Values at `step` that are finite and do not stand there yet; row: of a training's table."""
        known = self._known.get(step, set())
        fresh = {
            name: float(value)
            for name, value in values.items()
            if math.isfinite(value) and (name not in known or name.startswith("system/"))
        }
        if fresh:
            self.append("metrics", step=step, values=fresh, row=row)

    def file(self, source: Path, folder: str | None = None, name: str | None = None) -> None:
        """A copy of a file as it is now, or of a whole folder, to be sent as an artifact of the run."""
        target = self.folder / "files" / uuid.uuid4().hex[:8] / (name or source.name)
        target.parent.mkdir(parents=True)
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copyfile(source, target)
        self.append("file", path=str(target.relative_to(self.folder)), folder=folder)

    def new_file(self, path: str) -> Path:
        """Where to write a file that `written` then announces; path: of the artifact, "figures/loss.png"."""
        target = self.folder / "files" / uuid.uuid4().hex[:8] / Path(path).name
        target.parent.mkdir(parents=True)
        return target

    def written(self, target: Path, path: str) -> None:
        folder = str(Path(path).parent)
        relative = str(target.relative_to(self.folder))
        self.append("file", path=relative, folder=None if folder == "." else folder)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A training's table: one row a step, in the order of the steps."""
        return [{"step": step, **values} for step, values in sorted(self._rows.items())]

    def stands_at(self, step: int) -> bool:
        """Whether there is any value at that step."""
        return step in self._known

    @property
    def position(self) -> int:
        """Bytes written."""
        return self._file.tell()

    def sync(self) -> None:
        """Returns when all of it is on the disk."""
        os.fsync(self._file.fileno())

    @property
    def delivered(self) -> dict[str, Any]:
        """bytes: how far MLflow has it; run_id and experiment_id: once they are known."""
        return read_delivered(self.folder)

    @property
    def run_id(self) -> str | None:
        found: str | None = self.delivered["run_id"] or self.begun.get("adopt")
        return found

    def close(self) -> None:
        self._file.close()

    def _take_in(self, event: Event) -> None:
        kind = event["kind"]
        if kind == "run":
            self.begun = event
        elif kind == "metrics":
            self._known.setdefault(event["step"], set()).update(event["values"])
            if event["row"]:
                self._rows.setdefault(event["step"], {}).update(event["values"])
        elif kind == "describe":
            self.description = event["text"]
        elif kind == "status":
            self.status = event["status"]
        elif kind == "model":
            self.has_model = True


def read_events(path: Path, start: int = 0) -> Iterator[tuple[Event, int]]:
    """The whole lines from a position on, each with the position behind it."""
    with path.open("rb") as file:
        file.seek(start)
        for line in file:
            start += len(line)
            if not line.endswith(b"\n"):
                return
            with suppress(ValueError):  # a line that a fault of the disk made unreadable
                yield json.loads(line), start


def cut_off_torn_line(path: Path) -> None:
    """What a power loss left of a line: nobody has read it as an event."""
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    while whole and not _is_event(data[data.rfind(b"\n", 0, whole - 1) + 1 : whole]):
        whole = data.rfind(b"\n", 0, whole - 1) + 1
    if whole < len(data):
        os.truncate(path, whole)


def _is_event(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def read_delivered(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / DELIVERED).read_text(encoding="utf-8"))
        return {name: found[name] for name in ("bytes", "run_id", "experiment_id")}
    except (OSError, ValueError, KeyError, TypeError):
        return {"bytes": 0, "run_id": None, "experiment_id": None}


def write_delivered(folder: Path, values: Mapping[str, Any]) -> None:
    files.write_json(folder / DELIVERED, dict(values))


def waiting_events(folder: Path) -> int:
    """Of the journal in that folder, how many MLflow does not have."""
    return sum(1 for _ in read_events(folder / EVENTS, read_delivered(folder)["bytes"]))


def journals(folder: Path) -> list[Path]:
    """Every journal under a folder, the oldest first."""
    found = [path.parent for path in folder.rglob(EVENTS)] if folder.is_dir() else []
    return sorted(found, key=lambda path: path.name)
