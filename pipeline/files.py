"""Outputs that appear whole or not at all, and the digests that tell whether they still are whole."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.errors import UserError


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside `path`; it takes the name `path` only if the block succeeds.

    The block may write a file or make a folder there. Whatever stood at `path` is replaced.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)  # a folder cannot be replaced by a rename
        os.replace(temporary, path)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    with whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Sorted keys and a final newline: the same value gives the same bytes."""
    write_text(path, json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n")


def read_json(path: Path, made_by: str) -> Any:
    """Raises UserError naming `made_by`, the command that writes the file, when it is missing or broken."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing: run `{made_by}` first") from None
    except (ValueError, OSError) as error:
        raise UserError(f"{path} cannot be read ({error}): run `{made_by}` to make it again") from None


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_writable(*folders: Path) -> None:
    """Fails before hours of work, not after them, where an output could not be written."""
    for folder in folders:
        probe = folder / f".writable.{os.getpid()}.tmp"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise UserError(
                f"cannot write into {folder.absolute()}: {error.strerror or error}; "
                "free the path or correct its permissions"
            ) from None
