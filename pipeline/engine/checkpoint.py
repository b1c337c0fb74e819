"""Checkpoints: files that are whole or not there, and of which a damaged one is known as such.

A checkpoint is written to a temporary file, forced to the disk, and only then takes its name: a process
killed at any moment, or a disk that fills up, leaves the one before it. At its end stands the SHA-256 of all
that comes before, which is checked before anything is read: a bit that flipped, a file that was cut or is
another one, is a reason to take the checkpoint before it. Reading runs no code (torch's `weights_only`).

    <torch.save's zip archive> <32 bytes: SHA-256> <MAGIC>

Zip readers look for the archive's directory from the end and pass over what stands behind it, so that
`torch.load` opens a checkpoint too.
"""

import hashlib
import os
import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.engine.snapshot import on_host

MAGIC = b"tightfit checkpoint 1\n"
TAIL = hashlib.sha256().digest_size + len(MAGIC)
CHUNK = 1 << 20
PLAIN = (bool, int, float, str, bytes, type(None))
NAME = re.compile(r"step-(\d+)\.checkpoint")


class DamagedError(RuntimeError):
    """The file is not the checkpoint that was written; the message says why."""


class _Hashing:
    """A file to write to, which knows the digest of what it got. torch.save writes from start to end."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.digest = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.digest.update(data)
        self._file.write(data)
        return len(data)

    def flush(self) -> None:
        self._file.flush()


def write(path: Path, content: Any) -> None:
    """Writes `content`, a tree of tensors and plain values, whole or not at all; raises OSError.

    When it returns, file and name are on the disk. Raises TypeError for a value of another kind: it could be
    written, and never read again without running code.
    """
    _check_plain(content)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            hashing = _Hashing(file)
            _save(content, hashing)
            file.write(hashing.digest.digest() + MAGIC)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def read(path: Path) -> Any:
    """The content of a checkpoint, its tensors on the host; raises DamagedError for anything else."""
    try:
        _verify(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise DamagedError(f"it cannot be read: {error.strerror or error}") from None
    except DamagedError:
        raise
    except Exception as error:  # torch.load raises whatever the bytes lead it to
        raise DamagedError(f"it holds more than tensors and plain values: {_first_line(error)}") from None


class Checkpoints:
    """The checkpoints of one training in a folder: `step-00000120.checkpoint`, the newest `keep` of them.

    background: `save` copies the content to the host and returns; a thread of its own writes it. That is
    for a device that computes while the host writes; where both are one processor, the copy is memory and
    time for nothing.
    """

    def __init__(self, folder: Path, *, keep: int = 2, background: bool = False) -> None:
        if keep < 1:
            raise ValueError(
                f"keep={keep} must be at least 1: the newest checkpoint is what resume starts from"
            )
        self.folder = folder
        self.keep = keep
        self.background = background
        self._writing: threading.Thread | None = None
        self._failed: OSError | None = None

    def save(self, content: Any, step: int) -> None:
        """Writes the checkpoint of that step and drops those past `keep`.

        Raises OSError where it cannot be written, in the background at the next call or in `wait`; those
        before it stay.
        """
        self.wait()
        if not self.background:
            self._write(content, step)
            return
        copy = on_host(content)
        self._writing = threading.Thread(target=self._try, args=(copy, step), name="checkpoint")
        self._writing.start()

    def wait(self) -> None:
        """Returns when nothing is being written any more; raises OSError if the last one failed."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed

    def paths(self) -> list[Path]:
        """The newest first."""
        return sorted((path for path in _entries(self.folder) if NAME.fullmatch(path.name)), reverse=True)

    def size_in_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.paths())

    def newest(self) -> Iterator[tuple[Path, Any]]:
        """Each checkpoint with its content or the DamagedError that reading it raised, the newest first."""
        for path in self.paths():
            try:
                yield path, read(path)
            except DamagedError as error:
                yield path, error

    def remove_all(self) -> None:
        """Of what was written, finished or not."""
        for path in _entries(self.folder):
            if NAME.fullmatch(path.name) or is_temporary(path):
                path.unlink(missing_ok=True)

    def remove_temporary(self) -> None:
        """What killed processes left half-written; for a process that knows it is alone in this folder."""
        for path in filter(is_temporary, _entries(self.folder)):
            path.unlink(missing_ok=True)

    def _try(self, content: Any, step: int) -> None:
        try:
            self._write(content, step)
        except OSError as error:
            self._failed = error

    def _write(self, content: Any, step: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write(self.folder / f"step-{step:08d}.checkpoint", content)
        for path in self.paths()[self.keep :]:
            path.unlink(missing_ok=True)


def step_of(path: Path) -> int:
    """The step in a checkpoint's name; raises ValueError for another name."""
    found = NAME.fullmatch(path.name)
    if found is None:
        raise ValueError(f"{path.name} is not the name of a checkpoint, step-00000120.checkpoint")
    return int(found[1])


def is_temporary(path: Path) -> bool:
    return path.name.startswith(".step-") and path.name.endswith(".tmp")


def _check_plain(tree: Any, where: str = "content") -> None:
    if isinstance(tree, dict):
        for name, value in tree.items():
            _check_plain(value, f"{where}[{name!r}]")
    elif type(tree) in (list, tuple):
        for index, value in enumerate(tree):
            _check_plain(value, f"{where}[{index}]")
    elif not isinstance(tree, Tensor) and type(tree) not in PLAIN:
        raise TypeError(f"{where} is a {type(tree).__name__}: a checkpoint holds tensors and plain values")


def _save(content: Any, file: _Hashing) -> None:
    try:
        torch.save(content, file)  # type: ignore[arg-type]  # it asks for no more than write and flush
    except RuntimeError as error:  # torch's archive, closing after a write of ours failed, hides the reason
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def _verify(path: Path) -> None:
    """Raises DamagedError unless the digest at the file's end is that of what stands before it."""
    size = path.stat().st_size
    if size <= TAIL:
        raise DamagedError(f"it is {size} bytes long: empty or cut off")
    digest, left = hashlib.sha256(), size - TAIL
    with path.open("rb") as file:
        while left and (chunk := file.read(min(CHUNK, left))):
            digest.update(chunk)
            left -= len(chunk)
        tail = file.read(TAIL + 1)
    if not tail.endswith(MAGIC):
        raise DamagedError("it does not end as a checkpoint does: cut off, or another kind of file")
    if tail[: -len(MAGIC)] != digest.digest():
        raise DamagedError("its SHA-256 differs from that of what was written: some of its bytes changed")


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _sync_folder(folder: Path) -> None:
    """Forces the folder's entries to the disk: a new name is one (POSIX; elsewhere folders do not open)."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
