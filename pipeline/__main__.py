"""`python -m pipeline COMMAND`: the same stages as dvc.yaml's, for people and for MLproject.

run        prepare, train and evaluate, one after the other, without git or DVC
prepare    one stage alone; likewise train, evaluate
repro      what is out of date, by DVC; with key=value overrides as an experiment of DVC's
plan       which micro-batch fits a memory budget, without the device and before anything is trained
ui         the MLflow UI on this project's runs, on 127.0.0.1
clean      what interrupted and finished trainings take on the disk, and its removal
deliver-metrics  sends to MLflow what waits because its server did not answer
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline import config, files, provenance, tracking
from pipeline.errors import UserError
from pipeline.resume.stop import die_with_parent
from pipeline.stages.guard import STAGES_RUN

STAGES = ("prepare", "train", "evaluate")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if "MLFLOW_RUN_ID" in os.environ:  # under `mlflow run`, which may be killed alone
        die_with_parent()
    try:
        with tempfile.TemporaryDirectory() as folder:
            journal = Path(folder) / "stages"
            journal.touch()
            os.environ[STAGES_RUN] = str(journal)
            code = _command(options)
            if code == 0:
                _note_project_run(journal.read_text(encoding="utf-8").split())
        return code
    except UserError as error:
        print(f"{options.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        os.environ.pop(STAGES_RUN, None)  # the file is gone


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pipeline", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("run", help="the whole pipeline, without git or DVC")
    for stage in STAGES:
        commands.add_parser(stage, help=f"stage {stage} alone, without DVC")
    repro = commands.add_parser("repro", help="`dvc repro`, or `dvc exp run` with overrides")
    repro.add_argument("overrides", nargs="*", metavar="key=value", help="dotted keys of params.yaml")
    plan = commands.add_parser(
        "plan", help="which micro-batch fits a memory budget, and what takes the memory"
    )
    plan.add_argument("overrides", nargs="*", metavar="key=value", help="dotted keys of params.yaml")
    plan.add_argument(
        "--budget", metavar="GIB,GIB", default="", help="of CUDA devices; without: this device's free memory"
    )
    plan.add_argument(
        "--largest", action="store_true", help="name the largest torchvision classifier for each budget too"
    )
    plan.add_argument("--json", action="store_true", help="print JSON instead of tables")
    plan.add_argument("--figure", metavar="FILE", help="draw the budgets' predicted peaks into this file")
    ui = commands.add_parser("ui", help="the MLflow UI on this project's runs, on 127.0.0.1")
    ui.add_argument("--port", type=int, default=5000)
    clean = commands.add_parser("clean", help="show what checkpoints take, and remove what nobody needs")
    clean.add_argument("--dry-run", action="store_true", help="show what would be removed, and leave it")
    clean.add_argument(
        "--interrupted", action="store_true", help="remove what interrupted trainings could be continued from"
    )
    commands.add_parser("deliver-metrics", help="send to MLflow what its server did not take yet")
    return parser


def _command(options: argparse.Namespace) -> int:
    if options.command == "repro":
        overrides = [part for text in options.overrides for part in shlex.split(text)]
        return _experiment(overrides) if overrides else _dvc("repro")
    if options.command == "plan":
        from pipeline.stages import plan  # it imports torch: the other commands start without

        return plan.show(
            options.overrides,
            options.budget,
            as_json=options.json,
            figure=options.figure,
            with_largest=options.largest,
        )
    if options.command == "ui":
        tracking.serve_ui(config.load().tracking.experiment, options.port)
    if options.command == "clean":
        from pipeline.stages import clean  # it imports torch

        return clean.clean(dry_run=options.dry_run, interrupted=options.interrupted)
    if options.command == "deliver-metrics":
        return _deliver()
    for stage in STAGES if options.command == "run" else [options.command]:
        code = _child([sys.executable, "-m", f"pipeline.stages.{stage}"])
        if code:
            return code
    return 0


def _child(command: list[str], environment: Mapping[str, str] | None = None) -> int:
    """Runs a command to its end; returns its exit code, 128 + the signal where one ended it.

    Ctrl-C reaches the child by itself, and the child decides how it ends. SIGTERM is passed on.
    """
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = subprocess.Popen(command, env=environment, preexec_fn=_take_interrupts)
        signal.signal(signal.SIGTERM, lambda number, frame: process.terminate())
        code = process.wait()
    finally:
        signal.signal(signal.SIGINT, before)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return code if code >= 0 else 128 - code


def _take_interrupts() -> None:
    """In the child, before it becomes the command: what is ignored would stay ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _deliver() -> int:
    """Every journal of this project; 1 where something waits on."""
    params = config.load()
    folder = tracking.root() / params.checkpoint.folder
    found = tracking.deliver_all(folder)
    for journal, delivered, waiting, error in found:
        if delivered or waiting:
            left = f", {waiting} wait on: {error}" if waiting else ""
            print(f"{journal.relative_to(folder)}: {delivered} delivered{left}")
    if not any(delivered or waiting for _, delivered, waiting, _ in found):
        print(f"nothing waits in {folder}")
    return 1 if any(waiting for _, _, waiting, _ in found) else 0


def _experiment(overrides: list[str]) -> int:
    """`dvc exp run -S …`, then what it left in params.yaml and how to undo that."""
    wrong = [part for part in overrides if "=" not in part]
    if wrong:
        raise UserError(f"overrides: {wrong[0]!r} is not key=value, as in optimizer.lr=1e-3")
    if _git("rev-parse", "HEAD") is None:
        raise UserError(
            "overrides: `dvc exp run` needs git and a commit to compare with, and there is none here. Edit "
            "params.yaml and run without overrides, or `git init && git add -A && git commit -m start`"
        )
    code = _dvc("exp", "run", *(part for override in overrides for part in ("-S", override)))
    changed = provenance.source(config.load()).overrides if code == 0 else None
    if changed:
        print(f"params.yaml now differs from the commit in: {changed}")
        print("to undo that: git checkout params.yaml dvc.lock && dvc checkout; to keep it: git commit -a")
    return code


def _dvc(*arguments: str) -> int:
    """Runs DVC; where git knows no name for the experiment's commits, they get the project's."""
    environment = dict(os.environ)
    if not _git("config", "user.email"):
        for role in ("AUTHOR", "COMMITTER"):
            environment.setdefault(f"GIT_{role}_NAME", "tightfit")
            environment.setdefault(f"GIT_{role}_EMAIL", "tightfit@localhost")
    if _git("rev-parse", "--git-dir") is None:
        raise UserError(
            "DVC needs a git repository, and this folder is in none: `git init`, or `dvc config core.no_scm "
            "true`, or run the same job without DVC: `python -m pipeline run`"
        )
    # DVC calls `python` for the stages: the one that runs this, whatever else is on PATH
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
    return _child([sys.executable, "-m", "dvc", *arguments], environment)


def _git(*arguments: str) -> str | None:
    """git's answer, None where git or the repository is missing or says no."""
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _note_project_run(stages: list[str]) -> None:
    if "MLFLOW_RUN_ID" not in os.environ:
        return
    path = Path("reports/test.json")
    scores = files.read_json(path, "dvc repro evaluate", {"test": dict})["test"] if path.is_file() else {}
    test = {f"test/{name}": value for name, value in scores.items()}
    tracking.note_project_run(config.load().tracking.experiment, stages, test)


if __name__ == "__main__":
    sys.exit(main())
