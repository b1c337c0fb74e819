"""Where a run comes from: the commit, what was changed since, the packages it ran with."""

import functools
import importlib.metadata
import os
import subprocess
from dataclasses import dataclass
from typing import Any

from pipeline import config

GENERATED = "dvc.lock"  # every reproduction rewrites it, so it makes no tree dirty


@dataclass(frozen=True)
class Source:
    """The state of the git tree; commit is "none" where there is no git or no commit."""

    commit: str
    dirty: bool
    diff: str  # since the commit, with the names of files that git does not know
    overrides: str  # keys of params.yaml that differ from the committed file


def source(params: config.Params) -> Source:
    commit = os.environ.get("DVC_EXP_BASELINE_REV") or _git("rev-parse", "HEAD").strip()
    if not commit:
        return Source("none", False, "", "unknown: no git commit to compare with")
    tree = ("--", ".", f":!{GENERATED}")
    status = _git("status", "--porcelain", *tree)
    unknown = [line for line in status.splitlines() if line.startswith("??")]
    diff = _git("diff", "HEAD", *tree) + "".join(f"{line}\n" for line in unknown)
    return Source(
        commit, bool(status.strip()), diff, _overrides(params, _git("show", f"{commit}:params.yaml"))
    )


def dvc_tags() -> dict[str, str]:
    """The stage and experiment that DVC runs this process for."""
    names = {
        "DVC_STAGE": "dvc.stage",
        "DVC_EXP_NAME": "dvc.experiment",
        "DVC_EXP_BASELINE_REV": "dvc.baseline",
    }
    return {tag: os.environ[name] for name, tag in names.items() if os.environ.get(name)}


@functools.cache
def packages() -> str:
    """Every installed distribution and its version, one a line, as `pip freeze` would."""
    found = {
        distribution.metadata["Name"]: distribution.version
        for distribution in importlib.metadata.distributions()
        if distribution.metadata["Name"]
    }
    return "".join(
        f"{name}=={version}\n" for name, version in sorted(found.items(), key=lambda x: x[0].lower())
    )


def _overrides(params: config.Params, committed: str) -> str:
    before: dict[str, Any] = config.raw_values(committed)
    changed = [
        f"{key}={value}" for key, value in config.flatten(params).items() if before.get(key, value) != value
    ]
    return " ".join(changed) or "none"


def _git(*arguments: str) -> str:
    """git's output, empty where git or a repository is missing."""
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
