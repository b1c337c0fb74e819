"""The default job from a fresh clone, twice: seconds, accuracy, what the loss scale did, whether bytes agree.

    python benchmarks/main_job.py

Prints the README's table. It clones the committed state into a temporary folder and takes about two minutes.
"""

import csv
import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "clone", "--quiet", str(ROOT), folder], check=True)
        seconds = [dvc(folder, "repro")]
        weights = Path(folder, "models", "model.safetensors").read_bytes()
        seconds.append(dvc(folder, "repro", "--force"))
        same = Path(folder, "models", "model.safetensors").read_bytes() == weights
        scores = json.loads(Path(folder, "reports", "test.json").read_text())["test"]
        with Path(folder, "reports", "training.csv").open() as file:
            rows = list(csv.DictReader(file))
    scales = [float(row["amp/loss_scale"]) for row in rows]
    print(f"machine: {processor()}, Python {platform.python_version()}")
    print(f"`dvc repro`: {seconds[0]:.0f} s; forced: {seconds[1]:.0f} s")
    print(f"test accuracy: {scores['accuracy']:.1%}")
    print(f"loss scale: {scales[0]:,.0f} to {max(scales):,.0f}")
    print(f"skipped steps: {float(rows[-1]['amp/skipped_steps']):.0f} of {rows[-1]['step']}")
    print(f"two forced reproductions: {'byte-identical' if same else 'DIFFERENT'} model.safetensors")


def dvc(folder: str, *arguments: str) -> float:
    """Seconds that the command took; its output goes to stderr."""
    started = time.monotonic()
    subprocess.run([sys.executable, "-m", "dvc", *arguments], cwd=folder, check=True, stdout=sys.stderr)
    return time.monotonic() - started


def processor() -> str:
    """The processor's name where Linux tells it, and how many of its cores are there."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} cores, {names[0]}" if names else platform.machine()


if __name__ == "__main__":
    main()
