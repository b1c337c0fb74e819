"""Nothing lost: real trainings that are killed, refused, damaged and starved, and started again."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from project import QUICK, Project, clone, copy_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TRAIN = [sys.executable, "-u", "-m", "pipeline.stages.train"]
COMMAND = "python -m pipeline.stages.train"
EPOCHS = 15


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A clone with prepared data and a training of seconds, of which a checkpoint is kept every 5 steps."""
    settings = QUICK | {"epochs": str(EPOCHS), "every_steps": "5", "ema_decay": "0.9"}
    project = clone(tmp_path_factory.mktemp("prepared"), **settings)
    project.sh("python -m pipeline.stages.prepare")
    return project


@pytest.fixture
def project(prepared: Project, tmp_path: Path) -> Project:
    return copy_of(prepared, tmp_path / "copy")


@pytest.fixture(scope="module")
def expected(prepared: Project, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The weights of the training that nothing happened to."""
    project = copy_of(prepared, tmp_path_factory.mktemp("uninterrupted") / "copy")
    project.sh(COMMAND)
    return project.bytes("models/model.safetensors")


def checkpoints(project: Project) -> list[Path]:
    """The newest first."""
    return sorted(project.folder.glob(".checkpoints/*/step-*.checkpoint"), reverse=True)


def wait_for(holds: Callable[[], object], process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 150
    while not holds():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until
        time.sleep(0.01)


def killed(project: Project, *, at_least: int = 2) -> str:
    """Starts the training and kills it when it has kept so many checkpoints of its own."""
    before = set(checkpoints(project))
    process = project.start(TRAIN)
    seen: set[Path] = set()

    def kept_enough() -> bool:
        seen.update(set(checkpoints(project)) - before)
        return len(seen) >= at_least

    wait_for(kept_enough, process)
    process.send_signal(signal.SIGKILL)
    return process.communicate(timeout=30)[0]


def test_sigkill_and_a_damaged_checkpoint_and_other_workers_leave_the_same_bits(
    project: Project, expected: bytes
) -> None:
    killed(project)
    newest, before = checkpoints(project)[:2]
    newest.write_bytes(newest.read_bytes()[:-1000])
    project.set(workers="2")
    said = killed(project, at_least=3)
    assert f"{newest.with_suffix('.damaged')}: it does not end as a checkpoint does" in said
    assert f"from {before}" in said
    assert "left RUNNING by a killed process" in said
    said = project.sh(COMMAND)
    assert "continuing at step" in said
    assert project.bytes("models/model.safetensors") == expected
    (run,) = project.runs()
    assert run.info.status == "FINISHED"
    assert run.data.tags["resume.1.execution.workers"] == "auto -> 2"
    assert run.data.params["execution.workers"] == "auto"
    assert int(run.data.tags["resume.2.step"]) > int(run.data.tags["resume.1.step"]) > 0
    history = project.client().get_metric_history(run.info.run_id, "train/loss")
    steps = [metric.step for metric in history]
    assert len(steps) == len(set(steps))
    assert {10, 20, 200, 20 * EPOCHS} <= set(steps)
    assert checkpoints(project) == []


def test_a_second_start_of_the_same_training_is_refused_with_the_first_ones_pid(project: Project) -> None:
    project.set(epochs="500")
    process = project.start(TRAIN)
    wait_for(lambda: checkpoints(project), process)
    said = project.sh(COMMAND, code=2)
    assert f"the same training is running already, as process {process.pid}" in said
    project.set(lr="0.001")
    other = project.start(TRAIN)
    wait_for(lambda: len({path.parent for path in checkpoints(project)}) > 1, other)
    for one in (process, other):
        one.send_signal(signal.SIGINT)
    said = other.communicate(timeout=60)[0]
    assert f"1 other training of this project runs now (process {process.pid})" in said
    assert "the same command continues from there" in said
    assert (process.wait(timeout=60), other.returncode) == (130, 130)


def test_other_code_and_params_begin_anew_and_say_how_to_go_on_on_purpose(project: Project) -> None:
    killed(project)
    kept = checkpoints(project)[0]
    project.set(epochs="1", lr="0.001")
    code = project.folder / "pipeline" / "engine" / "loop.py"
    code.write_text(code.read_text() + "\n# changed\n")
    said = project.sh(COMMAND).replace("\n", " ")
    assert "pipeline/engine/loop.py changed, optimizer.lr 0.005 -> 0.001, train.epochs 15 -> 1" in said
    assert f"set checkpoint.resume: {kept}" in said
    project.set(resume=str(kept), epochs="2")
    said = project.sh(COMMAND)
    assert "what is different since: pipeline/engine/loop.py changed" in said
    newest, _, first = project.runs()
    assert newest.data.tags["continued_from"] == first.info.run_id
    assert newest.data.metrics["train/learning_rate"] <= 0.001
    project.set(resume=str(project.folder / "params.yaml"))
    assert "params.yaml: it does not end as a checkpoint does" in project.sh(COMMAND, code=2)


def test_epochs_are_extended_where_that_is_exact_and_else_it_is_said_why_not(project: Project) -> None:
    project.set(epochs="2", keep_finished="1")
    project.sh(COMMAND)
    project.set(epochs="4")
    said = project.sh(COMMAND)
    assert "has 2 epochs of this training, which cannot be gone on with: with schedule cosine" in said
    assert "continuing" not in said
    constant = project.read("params.yaml").replace("name: cosine", "name: constant")
    (project.folder / "params.yaml").write_text(constant)
    project.set(warmup_fraction="0.0")
    project.sh(COMMAND)
    at_once = project.bytes("models/model.safetensors")
    project.sh("python -m pipeline clean")
    project.set(epochs="2")
    project.sh(COMMAND)
    project.set(epochs="4")
    said = project.sh(COMMAND)
    assert "2 of 4 epochs are trained already: continuing from" in said
    assert project.bytes("models/model.safetensors") == at_once
    newest, before = project.runs()[:2]
    assert newest.data.tags["continued_from"] == before.info.run_id


def test_without_any_server_the_pipeline_succeeds_and_delivers_later(project: Project) -> None:
    project.set(epochs="2")
    unreachable = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:1"}
    said = project.sh("python -m pipeline run", **unreachable)
    assert said.count("MLflow does not answer") == 2  # train and evaluate
    assert "events of this run wait in" in said
    reference = json.loads(project.read("reports/mlflow_run.json"))
    assert reference["run_id"] is None
    assert "test/accuracy" in (project.folder / reference["journal"] / "events.jsonl").read_text()
    said = project.sh("python -m pipeline deliver-metrics")
    assert " delivered" in said
    (run,) = project.runs()
    assert run.info.status == "FINISHED"
    scores = json.loads(project.read("reports/test.json"))["test"]
    assert run.data.metrics["test/accuracy"] == scores["accuracy"]
    assert run.data.params["train.epochs"] == "2"
    assert "nothing waits" in project.sh("python -m pipeline deliver-metrics")
    assert "finished" in project.sh("python -m pipeline clean")
    assert list(project.folder.glob(".checkpoints/*")) == []


def test_where_no_large_file_can_be_written_training_goes_on_to_its_model(
    project: Project, expected: bytes
) -> None:
    """No file may grow past 150 KB: neither a checkpoint nor MLflow's database can be written."""
    limited = f"ulimit -f 150; exec {sys.executable} -u -m pipeline.stages.train"
    process = project.start(["bash", "-c", limited])
    said = process.communicate(timeout=200)[0]
    assert process.returncode == 0, said
    assert "cannot be written to: File too large" in said
    assert "MiB needed" in said
    assert project.bytes("models/model.safetensors") == expected
    assert checkpoints(project) == []
    assert " delivered" in project.sh("python -m pipeline deliver-metrics")
    assert project.runs()[0].info.status == "FINISHED"
