"""Everything that interrupts a training, and what was lost by it: python benchmarks/faults.py

Each part trains in a clone of this project, in a temporary folder, does it harm, starts the same command
again, and compares with a training that nothing happened to: the weights bit for bit, and the MLflow run row
by row (but for the series that depend on the clock: samples_per_second, peaks of memory, system metrics).

    kills    SIGKILL at N moments: at random, while a checkpoint is written, after its rename, in validation
    signals  SIGTERM to `dvc repro` alone and to `mlflow run .` alone
    server   a real MLflow server, killed and restarted K times: on SQLite, and on PostgreSQL where that and
             its driver are installed (python -m pip install psycopg2-binary)
    hung     a server that takes connections and never answers: what training waits for it
    bits     a flipped bit at each place of a checkpoint
    cost     what a checkpoint takes, of a small and of a large model, on this thread and in the background
"""

import argparse
import functools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from clones import CLOCK, TRAIN, Clone, History, difference, history, wait_for
from servers import free_port, missing_for_postgres, postgres, start_server, stop_server


@dataclass(frozen=True)
class Oracle:
    """What the training ends with that nothing happens to."""

    weights: bytes
    history: History
    windows: int


@functools.cache
def uninterrupted() -> Oracle:
    with tempfile.TemporaryDirectory() as folder:
        clone = Clone(Path(folder))
        clone.sh(" ".join(TRAIN))
        return Oracle(clone.weights(), history(clone.store), clone.logged_step())


def kill_at(process: subprocess.Popen[str], clone: Clone, moment: str, seed: random.Random) -> str:
    """SIGKILL at such a moment; returns what the process had said, "" if it ended before."""
    before = clone.checkpoints()
    until, wait = time.monotonic() + 120, seed.uniform(0.0, 2.0)
    while process.poll() is None and time.monotonic() < until:
        folder = clone.training()
        if folder and _has_come(moment, folder, set(clone.checkpoints()) - set(before)):
            if moment == "at random":
                time.sleep(wait)
            elif moment == "in validation":
                time.sleep(0.01)
            break
        time.sleep(0.0002 if folder else 0.05)
    ended = process.poll() is not None
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    said = process.communicate(timeout=30)[0]
    return "" if ended else said


def _has_come(moment: str, folder: Path, fresh: set[str]) -> bool:
    if moment == "while a checkpoint is written":
        return any(name.endswith(".tmp") for name in os.listdir(folder)) and bool(fresh)
    if moment == "in validation":  # the checkpoint at an epoch's last window comes before it
        return any(int(name[5:13]) % 20 == 0 for name in fresh)
    return bool(fresh)


MOMENTS = ("at random", "while a checkpoint is written", "between rename and log", "in validation")


def kills(folder: Path, count: int, seed: int) -> list[str]:
    """Chains of four kills, one at each moment, and the same command until it ends by itself."""
    expected = uninterrupted()
    draw, done, chain = random.Random(seed), Counter[str](), 0
    again: list[int] = []
    while sum(done.values()) < count:
        clone = Clone(
            folder / f"chain{chain}", **{"every_steps: none": f"every_steps: {draw.choice((5, 10))}"}
        )
        ended = False
        for moment in draw.sample(MOMENTS, len(MOMENTS))[: count - sum(done.values())]:
            ended = not kill_at(clone.start(TRAIN), clone, moment, draw)
            if ended:
                break
            assert clone.checkpoints(), "no checkpoint at the restart"
            again.append(max(0, clone.logged_step() - int(clone.checkpoints()[-1][5:13])))
            assert again[-1] < expected.windows
            done[moment] += 1
        if not ended:
            clone.sh(" ".join(TRAIN))
        assert clone.weights() == expected.weights, f"chain {chain}: other weights"
        found = history(clone.store)
        assert found == expected.history, difference(found, expected.history)
        assert [status for _, status in clone.runs()] == ["FINISHED"]
        shutil.rmtree(clone.folder)
        chain += 1
    lines = [f"{number:3} x SIGKILL {moment}" for moment, number in done.items()]
    return [
        *lines,
        f"{sum(done.values())} of {count}: weights bit for bit, MLflow history row by row, one run FINISHED; "
        f"of {expected.windows} windows 0 to {max(again)} computed again",
    ]


def signals(folder: Path) -> list[str]:
    """SIGTERM to the outermost process alone; the stage must end in order, and the command continue it."""
    expected = uninterrupted()
    commands = {
        "dvc repro": [sys.executable, "-m", "dvc", "repro", "train"],
        "mlflow run .": [sys.executable, "-m", "mlflow", "run", ".", "--env-manager", "local"],
    }
    lines = []
    for name, command in commands.items():
        clone = Clone(folder / name.split()[0])
        took = _terminated(clone, command)
        clone.sh(" ".join(command))
        run = json.loads((clone.folder / "reports" / "mlflow_run.json").read_text())["run_id"]
        assert clone.weights() == expected.weights
        rows = history(clone.store, run)
        trained = Counter({row: n for row, n in rows.items() if not row[0].startswith("test/")})
        assert trained == expected.history, difference(trained, expected.history)
        assert {status for _, status in clone.runs()} == {"FINISHED"}
        lines.append(
            f"SIGTERM to {name} alone: the stage saved and ended within {took:.1f} s, run KILLED; "
            "continued: weights and history equal, FINISHED"
        )
    return lines


def _terminated(clone: Clone, command: list[str]) -> float:
    """Ends a training's outermost process; returns the seconds its stage went on: it is stopped, not done."""
    process = clone.start(command)
    wait_for(lambda: bool(clone.checkpoints()), 120)
    process.terminate()
    began = time.monotonic()
    said = process.communicate(timeout=60)[0]  # of the stage too, that has the same output
    wait_for(lambda: not _trains(clone), 30)
    took = time.monotonic() - began
    statuses = [status for _, status in clone.runs()]
    assert statuses == ["KILLED"], f"{statuses}\n{said}"
    return took


def _trains(clone: Clone) -> bool:
    """Whether a process still trains in the clone: its lock is held."""
    import fcntl

    folder = clone.training()
    assert folder is not None
    with (folder / "lock").open("r+") as lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def server(folder: Path, times: int) -> list[str]:
    """On SQLite, and on PostgreSQL where that is installed."""
    on_sqlite = _restarted(folder / "sqlite", f"sqlite:///{folder}/server.db", times)
    lines = [f"on SQLite: {on_sqlite}"]
    if missing := missing_for_postgres():
        return [*lines, f"on PostgreSQL: not measured, {missing} not installed"]
    with postgres() as store:
        return [*lines, f"on PostgreSQL: {_restarted(folder / 'postgres', store, times)}"]


def _restarted(folder: Path, store: str, times: int) -> str:
    """The server is killed and restarted while a training logs to it: every row arrives exactly once."""
    clone = Clone(folder, **{"epochs: 8": "epochs: 40", "log_every_steps: 10": "log_every_steps: 2"})
    port = free_port()
    address = {"MLFLOW_TRACKING_URI": f"http://127.0.0.1:{port}"}
    process = start_server(folder, port, store)
    training = clone.start(TRAIN, **address)
    try:
        wait_for(lambda: clone.logged_step() > 0, 120)
        killed = 0
        for _ in range(times):
            if training.poll() is not None:
                break
            time.sleep(3)
            stop_server(process)
            killed += 1
            time.sleep(2)
            process = start_server(folder, port, store)
        said = training.communicate(timeout=300)[0]
        assert training.returncode == 0, said[-3000:]
        clone.sh(f"{sys.executable} -m pipeline deliver-metrics", **address)
    finally:
        training.kill()
        stop_server(process)
    found, written = history(store), _journaled(clone)
    assert found == written, difference(found, written)
    assert set(found.values()) == {1}
    return f"killed and restarted {killed} times: {len(written):,} rows, each there exactly once"


def _journaled(clone: Clone) -> History:
    folder = clone.training()
    assert folder is not None
    found: History = Counter()
    for path in folder.glob("journal-*/events.jsonl"):
        for event in map(json.loads, path.open()):
            if event["kind"] == "metrics":
                values = event["values"].items()
                found.update((k, event["step"], v) for k, v in values if not CLOCK.search(k))
    return found


def hung(folder: Path) -> list[str]:
    """A training with no server, and one whose server takes the connection and never answers; in turns."""
    clone = Clone(folder / "clone", **{"log_every_steps: 10": "log_every_steps: 1"})
    seconds: dict[str, list[float]] = {"no server": [], "a hung server": []}
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        uris = {"no server": "", "a hung server": f"http://127.0.0.1:{listener.getsockname()[1]}"}
        for _ in range(3):
            for name, uri in uris.items():
                clone.sh(" ".join(TRAIN), **({"MLFLOW_TRACKING_URI": uri} if uri else {}))
                seconds[name].append(_training_seconds(clone))
    best = {name: min(values) for name, values in seconds.items()}
    ratio = best["a hung server"] / best["no server"]
    return [
        f"{name}: {best[name]:.2f} s from the first row of a training to its last, best of 3" for name in best
    ] + [f"x{ratio:.3f}"]


def _training_seconds(clone: Clone) -> float:
    """From the first row to the last one, by the newest journal."""
    folder = clone.training()
    assert folder is not None
    path = max(folder.glob("journal-*/events.jsonl"), key=lambda path: path.stat().st_mtime)
    times = [event["time"] for event in map(json.loads, path.open()) if event.get("row")]
    return (times[-1] - times[0]) / 1000


def bits() -> list[str]:
    """One bit at each byte of a small checkpoint, and at a thousand places of a large one."""
    import torch

    from pipeline.engine import DamagedError
    from pipeline.engine import checkpoint as checkpoints

    lines = []
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "step-00000001.checkpoint"
        for what, content, every in (
            ("each byte", {"a": 1}, 1),
            ("1,000 places", {"a": torch.rand(10**5)}, 0),
        ):
            checkpoints.write(path, content)
            data = path.read_bytes()
            places = range(0, len(data), every or len(data) // 1000)
            found = 0
            for place in places:
                path.write_bytes(data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :])
                try:
                    checkpoints.read(path)
                except DamagedError:
                    found += 1
            lines.append(
                f"a flipped bit at {what} ({len(data):,} bytes): {found:,} of {len(places):,} detected"
            )
            assert found == len(places)
    return lines


def cost(folder: Path) -> list[str]:
    """Seconds that training waits for one checkpoint, and its share of the five minutes between two."""
    import torch
    import torchvision

    from pipeline.engine import (
        Checkpoints,
        CrossEntropy,
        Precision,
        Trainer,
        allocate_state,
        build_optimizer,
        snapshot,
    )

    lines = ["model            MiB   here s   share of 5 min   background s   read s"]
    for name in ("resnet18", "vit_b_16"):
        model = torchvision.models.get_model(name, weights=None)
        optimizer = build_optimizer(model, "adamw", lr=1e-3)
        allocate_state(optimizer)
        trainer = Trainer(model, optimizer, CrossEntropy(), precision=Precision("fp32"), micro_batch_size=1)
        best = {key: value.clone() for key, value in model.state_dict().items()}
        took: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(3):
            for background in took:
                kept = Checkpoints(folder / name, background=background)
                began = time.perf_counter()
                kept.save({"trainer": snapshot(trainer), "best": best}, 1)
                took[background].append(time.perf_counter() - began)
                kept.wait()
        path = kept.paths()[0]
        began = time.perf_counter()
        next(kept.newest())
        read = time.perf_counter() - began
        here, behind = min(took[False]), min(took[True])
        size = path.stat().st_size / 2**20
        lines.append(f"{name:12} {size:7,.0f} {here:8.2f} {here / 300:16.2%} {behind:14.2f} {read:8.2f}")
        del model, optimizer, trainer, best
        torch.manual_seed(0)
    return lines


def measured(part: str, folder: Path, options: argparse.Namespace) -> list[str]:
    """The lines of one part of the table."""
    if part == "kills":
        return kills(folder, options.kills, options.seed)
    if part == "server":
        return server(folder, options.restarts)
    if part == "bits":
        return bits()
    return {"signals": signals, "hung": hung, "cost": cost}[part](folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ("kills", "signals", "server", "hung", "bits", "cost")
    parser.add_argument("parts", nargs="*", choices=[*parts, []], help="all of them, without")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--restarts", type=int, default=3, help="of the MLflow server")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for part in options.parts or parts:
        with tempfile.TemporaryDirectory() as name:
            folder, began = Path(name), time.monotonic()
            lines = measured(part, folder, options)
            print(f"\n{part} ({time.monotonic() - began:.0f} s)", *lines, sep="\n", flush=True)


if __name__ == "__main__":
    main()
