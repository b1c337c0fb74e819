"""A clone of this project in a temporary folder, and the commands that its users give there."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlflow import MlflowClient

ROOT = Path(__file__).resolve().parents[2]
QUICK = {"precision": "fp32", "epochs": "1", "log_model": "false"}


def environment(**more: str) -> dict[str, str]:
    """What a user's shell has: this environment's programs, no MLflow or DVC settings, bytecode written."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MLFLOW_", "DVC_", "GIT_", "PYTHON", "TIGHTFIT_"))
    }
    # several trainings run side by side: threads of one that wait for each other would wait long
    ours = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    return kept | ours | more


@dataclass
class Project:
    """The clone; `ran` lists the commands that succeeded in it."""

    folder: Path
    ran: list[str] = field(default_factory=list)

    def sh(self, command: str, *, code: int = 0, timeout: float = 200, **env: str) -> str:
        """Runs a shell command; returns stdout and stderr, and checks the exit code."""
        done = subprocess.run(
            command,
            shell=True,
            cwd=self.folder,
            env=environment(**env),
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout,
        )
        assert done.returncode == code, f"{command}: exit code {done.returncode}\n{done.stdout[-6000:]}"
        self.ran.append(command)
        return done.stdout

    def start(self, command: list[str], **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=environment(**env),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def read(self, path: str) -> str:
        return (self.folder / path).read_text()

    def bytes(self, path: str) -> bytes:
        return (self.folder / path).read_bytes()

    def set(self, **values: str) -> None:
        """Edits params.yaml as a person would: the value behind a key's name, wherever it stands."""
        text = self.read("params.yaml")
        for name, value in values.items():
            text, count = re.subn(rf"(?m)^( *{name}:) \S+", rf"\1 {value}", text)
            assert count == 1, name
        (self.folder / "params.yaml").write_text(text)

    def commit(self) -> None:
        self.sh("git add -A && git -c user.name=a -c user.email=a@b commit --quiet --allow-empty -m change")

    def client(self) -> MlflowClient:
        return MlflowClient(f"sqlite:///{self.folder / 'mlflow.db'}")

    def runs(self) -> list[Any]:
        """All runs of all experiments, the newest first."""
        client = self.client()
        return client.search_runs([e.experiment_id for e in client.search_experiments()])


def clone(folder: Path, **quick: str) -> Project:
    """The files git knows or would add, as they are now, committed in a repository of their own."""
    names = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(names, cwd=ROOT, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    project = Project(folder)
    project.set(**quick)
    project.sh("git init --quiet --initial-branch=main")
    project.commit()
    return project


def copy_of(project: Project, folder: Path) -> Project:
    """Another folder with all that the first one has, outputs included, without its MLflow store."""
    ignore = shutil.ignore_patterns("mlflow.db", "mlruns", "tmp")
    shutil.copytree(project.folder, folder, ignore=ignore, symlinks=True, dirs_exist_ok=True)
    return Project(folder)
