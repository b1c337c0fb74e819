"""A clone of this project with a small training in it, to do harm to."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy

ROOT = Path(__file__).resolve().parents[1]
TRAIN = [sys.executable, "-u", "-m", "pipeline.stages.train"]
PREPARE = [sys.executable, "-m", "pipeline.stages.prepare"]
CLOCK = re.compile(r"samples_per_second|peak|rss|prediction_error|device_used|^system/")
MODEL = '''
from torch import nn


def model(num_classes):
    """With BatchNorm and dropout: what a careless resume would get wrong."""
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.Dropout(0.2),
        nn.Conv2d(12, 24, 3, stride=2), nn.BatchNorm2d(24), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3),
        nn.Linear(24 * 9, num_classes),
    )
'''
SETTINGS = {
    "name: small_cnn": "name: pipeline.custom.faulty:model",
    "ema_decay: 0.0 ": "ema_decay: 0.9 ",
    "every_steps: none": "every_steps: 7",
    "init_scale: 65536": "init_scale: 16777216",  # so large that steps are skipped now and then
    "log_model: true": "log_model: false",
    "epochs: 8": "epochs: 20",
}
History = Counter[tuple[str, int, float]]


class Clone:
    """A clone of the project with a small training in it, and what its commands left."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.folder = folder
        names = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for name in filter(None, names.split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        (folder / "pipeline" / "custom" / "faulty.py").write_text(MODEL)
        listed = (folder / "dvc.yaml").read_text()
        line = "      - pipeline/data/loader.py\n"
        (folder / "dvc.yaml").write_text(listed.replace(line, f"      - pipeline/custom/faulty.py\n{line}"))
        text = (folder / "params.yaml").read_text()
        for before, after in {**SETTINGS, **settings}.items():
            assert before in text, before
            text = text.replace(before, after)
        (folder / "params.yaml").write_text(text)
        self.sh("git init -q && git add -A && git -c user.name=a -c user.email=a@b commit -qm start")
        self.sh(" ".join(PREPARE))

    def environment(self, **more: str) -> dict[str, str]:
        # without SHELL, as under cron, systemd and in containers: DVC then starts stages in /bin/sh
        others = ("MLFLOW_", "DVC_", "SHELL")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(others)}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return kept | {"PATH": path, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""} | more

    def sh(self, command: str, **env: str) -> str:
        done = subprocess.run(
            command,
            shell=True,
            cwd=self.folder,
            env=self.environment(**env),
            text=True,
            capture_output=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def start(self, command: list[str], **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.environment(**env),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def weights(self) -> bytes:
        return (self.folder / "models" / "model.safetensors").read_bytes()

    def training(self) -> Path | None:
        """The folder of the one training in this clone."""
        return next((path.parent for path in self.folder.glob(".checkpoints/*/training.json")), None)

    def checkpoints(self) -> list[str]:
        folder = self.training()
        return sorted(path.name for path in folder.glob("step-*")) if folder else []

    def logged_step(self) -> int:
        """Of the last row in the journal."""
        folder = self.training()
        rows = (
            [line for path in folder.glob("journal-*/events.jsonl") for line in path.open()] if folder else []
        )
        return max((json.loads(row).get("step", 0) for row in rows if row.endswith("\n")), default=0)

    @property
    def store(self) -> str:
        return f"sqlite:///{self.folder / 'mlflow.db'}"

    def runs(self) -> list[tuple[str, str]]:
        """Their ids and statuses, the oldest first."""
        found = _query(self.store, "select run_uuid, status from runs order by start_time")
        return [(run, status) for run, status in found]


def history(store: str, run_id: str | None = None) -> History:
    """Each row of a run, or of all, that does not depend on the clock, with how often it is there."""
    rows = _query(store, "select run_uuid, key, step, value from metrics")
    return Counter(
        (key, step, value)
        for run, key, step, value in rows
        if run_id in (None, run) and not CLOCK.search(key)
    )


def _query(store: str, query: str) -> Sequence[Any]:
    engine = sqlalchemy.create_engine(store)
    try:
        with engine.connect() as connection:
            return connection.execute(sqlalchemy.text(query)).all()
    finally:
        engine.dispose()


def difference(found: History, expected: History) -> str:
    more, less = found - expected, expected - found
    return f"{len(more)} rows too many: {more.most_common(5)}; {len(less)} missing: {less.most_common(5)}"


def wait_for(holds: Callable[[], bool], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, f"not within {seconds} s"
        time.sleep(0.05)
