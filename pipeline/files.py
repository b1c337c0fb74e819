"""Outputs that appear whole or not at all, and the digests that tell whether they still are whole."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import UnionType
from typing import Any

from pipeline.errors import UserError

MIB = 1024**2


@contextmanager
def whole(path: Path, needed: int = 0) -> Iterator[Path]:
    """Yields a temporary path beside `path`; it takes the name `path` only if the block succeeds.

    The block may write a file or make a folder there. Whatever stood at `path` is replaced, once the new is
    on the disk. Raises OSError with the path and the free space where it cannot be written; needed: bytes,
    if they are known, to say that too.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        _sync(temporary)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)  # a folder cannot be replaced by a rename
        os.replace(temporary, path)
    except OSError as error:
        if error.filename is not None and not Path(error.filename).is_relative_to(temporary):
            raise  # of something else, which the block read
        raise OSError(error.errno, f"{error.strerror} ({room(path.parent, needed)})", str(path)) from None
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Forces a file, or each in a folder, to the disk: else a power loss could leave an empty one."""
    for each in path.iterdir() if path.is_dir() else [path]:
        with each.open("rb") as file:
            os.fsync(file.fileno())


def room(folder: Path, needed: int = 0) -> str:
    """ "12.0 MiB free, 46.8 MiB needed", of the file system that the folder is on."""
    sizes = f", {needed / MIB:,.1f} MiB needed" if needed else ""
    return f"{shutil.disk_usage(folder).free / MIB:,.1f} MiB free{sizes}"


def write_text(path: Path, text: str) -> None:
    with whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Sorted keys and a final newline: the same value gives the same bytes."""
    write_text(path, json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n")


def read_json(path: Path, made_by: str, fields: Mapping[str, type | UnionType]) -> dict[str, Any]:
    """An object of a JSON file that has these fields, of these types, and maybe others.

    Raises UserError naming `made_by`, the command that writes the file, when it is missing, broken or
    something else.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing: run `{made_by}` first") from None
    except (ValueError, OSError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error}): run `{made_by}` to make it again") from None
    found = values if isinstance(values, dict) else {}
    wrong = [name for name, kind in fields.items() if name not in found or not isinstance(found[name], kind)]
    if wrong or found is not values:
        raise UserError(
            f"{path} is something else (it has no {', '.join(wrong) or 'fields'} as it should be): "
            f"run `{made_by}` to make it again"
        )
    return found


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
