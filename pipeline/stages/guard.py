"""What each stage does around its work: it validates, refuses edits meanwhile, and explains failures.

A foreseeable failure ends in one message and a non-zero exit code, without a traceback; a signal ends a
stage in order, so that its MLflow run is closed.
"""

import importlib.util
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os import environ
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

from pipeline import config, files
from pipeline.errors import Stopped, UserError
from pipeline.resume.stop import die_with_parent

CODE = (".py", ".txt")  # the stage's code, and the lock of what it imports
STAGES_RUN = "TIGHTFIT_STAGES_RUN"  # a file in which each stage that runs leaves its name


def run_stage(name: str, work: Callable[[config.Params], None]) -> int:
    """Loads params.yaml, does the work and returns the exit code: 0, 2 for a user's mistake, 128 + signal."""
    signal.signal(signal.SIGTERM, _terminate)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "DVC_STAGE" in environ or STAGES_RUN in environ:
        die_with_parent()
    if journal := environ.get(STAGES_RUN):
        with open(journal, "a", encoding="utf-8") as file:
            file.write(f"{name}\n")
    code = _explained(name, work)
    if code and "DVC_STAGE" in environ:
        print("DVC removed the previous outputs before this stage: `dvc checkout` has them", file=sys.stderr)
    return code


def _explained(name: str, work: Callable[[config.Params], None]) -> int:
    """Does the work; returns the exit code, having said why it is not 0."""
    try:
        work(config.load())
    except UserError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except Stopped as error:
        print(f"{name}: stopped by {signal.Signals(error.number).name}", file=sys.stderr)
        return 128 + error.number
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except OSError as error:
        if error.filename is None:
            raise
        print(f"{name}: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def _terminate(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextmanager
def inputs_unchanged(stage: str) -> Iterator[None]:
    """Raises UserError at its end if the stage's code or params were edited meanwhile.

    DVC notes the inputs' state after a stage has run: an edit in the middle would be recorded as what
    the outputs were made from.
    """
    before = _inputs(stage)
    yield
    after = _inputs(stage)
    changed = [
        f"{name}: {before.get(name, 'nothing')} -> {after.get(name, 'nothing')}"
        if Path(name).suffix not in CODE
        else name
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]
    if changed:
        raise UserError(
            "its inputs changed while it ran, so its result belongs to neither state: "
            + ", ".join(changed)
            + ". Run it again"
        )


def _inputs(stage: str) -> dict[str, str]:
    """The digest of each code file the stage depends on, and the value of each of its params."""
    values = config.raw_values(Path("params.yaml").read_text(encoding="utf-8"))
    sections = _stage(stage).get("params", [])
    params = {key: str(value) for key, value in values.items() if key.split(".")[0] in sections}
    return code_digests(stage) | params


def code_digests(stage: str) -> dict[str, str]:
    """Of each code file, and of the lock, that dvc.yaml has as a dependency of the stage."""
    code = [Path(dep) for dep in _stage(stage)["deps"] if Path(dep).suffix in CODE]
    return {str(path): files.sha256(path) if path.is_file() else "missing" for path in code}


def _stage(name: str) -> dict[str, Any]:
    text = Path("dvc.yaml").read_text(encoding="utf-8")
    stage: dict[str, Any] = yaml.safe_load(text)["stages"][name]
    return stage


def check_dependency(stages: tuple[str, ...], key: str, value: str) -> None:
    """Raises UserError where a file of the user's own, that `key` names, is no dependency in dvc.yaml.

    value: package.module:function, or a path. DVC would not run the stages again when it changes. Nothing
    is asked for where DVC does not run the stage, or of a module that is an installed package.
    """
    path = _own_file(value)
    if path is None or "DVC_STAGE" not in environ:
        return
    lacking = [
        stage
        for stage in stages
        if not any(path == Path(dep) or Path(dep) in path.parents for dep in _stage(stage)["deps"])
    ]
    if lacking:
        raise UserError(
            f"{key} {value}: DVC would not notice a change of {path}. Add this line to dvc.yaml, under "
            f"deps of {' and of '.join(lacking)}:\n      - {path}"
        )


def _own_file(value: str) -> Path | None:
    """The file behind a reference or a path, relative to here; None where it is none of the project's."""
    if ":" in value:
        module = value.partition(":")[0]
        try:
            spec = importlib.util.find_spec(module)
        except (ImportError, ValueError):
            spec = None
        if spec is None or not spec.origin:
            return None
        path = Path(spec.origin)
    elif Path(value).is_file():
        path = Path(value).absolute()
    else:
        return None
    here = Path.cwd()
    inside = path.is_relative_to(here) and not path.is_relative_to(sys.prefix)
    return path.relative_to(here) if inside else None
