"""What goes wrong in real life: each ends in one clear message, and nothing half-made stands anywhere."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from project import QUICK, Project, clone, copy_of, environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A clone with a finished quick training, made without git or DVC: `python -m pipeline run`."""
    project = clone(tmp_path_factory.mktemp("trained"), **QUICK)
    (project.folder / ".git").rename(project.folder / ".git-away")
    project.sh("python -m pipeline run")
    (project.folder / ".git-away").rename(project.folder / ".git")
    return project


@pytest.fixture
def project(trained: Project, tmp_path: Path) -> Project:
    return copy_of(trained, tmp_path / "copy")


def refused(project: Project, stage: str, *, code: int = 2, **env: str) -> str:
    """What a stage says that ends with `code`: a message, no traceback."""
    said = project.sh(f"python -m pipeline.stages.{stage}", code=code, **env)
    assert "Traceback" not in said
    assert f"{stage}: " in said
    return said


def no_model(project: Project) -> bool:
    return not any((project.folder / "models").glob("*")) and not list(project.folder.glob("**/*.tmp"))


def forget_model(project: Project) -> None:
    for path in (project.folder / "models").glob("*"):
        path.unlink()


def test_the_pipeline_runs_without_git_or_dvc(trained: Project) -> None:
    run = trained.runs()[0]
    assert run.info.status == "FINISHED"
    assert run.data.tags["git.commit"] == "none"
    assert "test/accuracy" in run.data.metrics


def test_bad_params_are_all_reported_at_once(project: Project) -> None:
    project.set(epochs="abc", micro_batch_size="0", precision="16-mixed")
    text = project.read("params.yaml").replace("  lr:", "  lrr:")
    (project.folder / "params.yaml").write_text(text)
    said = refused(project, "prepare")
    assert "4 problems" in said
    assert "optimizer.lrr: unknown; did you mean optimizer.lr?" in said
    assert "precision 16-mixed: here amp_fp16" in said
    assert "micro_batch_size: 0" in said
    assert "train.epochs: 'abc'" in said


def test_a_truncated_data_file_and_a_missing_one_are_named(project: Project) -> None:
    forget_model(project)
    path = project.folder / "data" / "prepared" / "train_images.npy"
    path.write_bytes(path.read_bytes()[:-100])
    assert "train_images.npy is not the file that was prepared" in refused(project, "train")
    path.unlink()
    said = refused(project, "train")
    assert "train_images.npy is missing: run `dvc repro prepare`" in said
    assert no_model(project)


def test_an_unknown_model_lists_the_close_names(project: Project) -> None:
    text = project.read("params.yaml").replace("name: small_cnn", "name: resnet19")
    (project.folder / "params.yaml").write_text(text)
    assert "resnet18" in refused(project, "train")


def test_an_output_folder_that_cannot_be_written_is_named_before_training(project: Project) -> None:
    forget_model(project)
    (project.folder / "models").rmdir()
    (project.folder / "models").write_text("a file stands here")
    said = refused(project, "train")
    assert f"cannot write into {project.folder / 'models'}" in said


def test_a_stale_file_store_and_a_malformed_uri_are_named(project: Project) -> None:
    forget_model(project)
    said = refused(project, "train", MLFLOW_TRACKING_URI="htp://nowhere:1")
    assert "the MLflow store htp://nowhere:1 cannot be used" in said
    stale = project.folder / "mlruns" / "0" / "meta.yaml"
    stale.parent.mkdir(parents=True)
    stale.write_text("experiment_id: '0'\n")
    said = refused(project, "train")
    assert "older MLflow file store" in said
    assert "mv mlruns mlruns.old" in said
    assert no_model(project)


def test_a_copied_project_does_not_write_to_the_old_place(trained: Project, project: Project) -> None:
    (project.folder / "mlflow.db").write_bytes(trained.bytes("mlflow.db"))
    before = len(trained.runs())
    said = refused(project, "train")
    assert "was copied or moved" in said.replace("\n", " ")
    assert len(trained.runs()) == before


def test_evaluate_without_the_runs_store_writes_its_files_and_says_so(project: Project) -> None:
    wanted = project.read("reports/test.json")
    (project.folder / "reports" / "test.json").unlink()
    assert "is not in the store" in project.sh("python -m pipeline evaluate")
    assert project.read("reports/test.json") == wanted


def test_own_model_and_loss_are_dependencies_and_a_failing_one_ends_the_run_failed(project: Project) -> None:
    """Refused by DVC's stage until listed; then used; an exception in it leaves FAILED."""
    (project.folder / "pipeline" / "custom" / "own.py").write_text(
        "import torch\n\n\n"
        "def model(num_classes):\n"
        "    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, num_classes))\n\n\n"
        "def loss(outputs, targets):\n"
        "    if torch.is_grad_enabled() and len(targets) < 16:\n"
        "        raise RuntimeError('the short window came')\n"
        "    return torch.nn.functional.cross_entropy(outputs, targets, reduction='sum'), len(targets)\n"
    )
    text = project.read("params.yaml").replace("name: small_cnn", "name: pipeline.custom.own:model")
    text = text.replace("name: cross_entropy", "name: pipeline.custom.own:loss")
    (project.folder / "params.yaml").write_text(text)
    project.set(label_smoothing="0.0")
    said = project.sh("dvc repro train", code=255)
    assert "Add this line to dvc.yaml, under deps of train and of evaluate:" in said
    assert "      - pipeline/custom/own.py" in said
    line = "      - pipeline/data/loader.py"
    listed = project.read("dvc.yaml").replace(line, f"      - pipeline/custom/own.py\n{line}")
    (project.folder / "dvc.yaml").write_text(listed)
    forget_model(project)
    assert "the short window came" in project.sh("dvc repro train", code=255)
    assert project.runs()[0].info.status == "FAILED"
    assert no_model(project)


def test_law_7_a_collapse_leaves_its_diagnosis_in_a_file_and_in_the_run(project: Project) -> None:
    """A learning rate that throws the weights to 1e30: every window after that overflows."""
    forget_model(project)
    project.set(lr="1.0e30", max_consecutive_skips="3")
    said = refused(project, "train")
    assert "3 windows in a row were skipped" in said
    assert "the loss went first, in the forward: the output of" in said
    diagnosis = json.loads(project.read("reports/diagnosis.json"))
    assert diagnosis["step"] >= 4
    assert len(diagnosis["sample_ids"]) == 64
    assert set(diagnosis["micro_batch_ids"]) <= set(diagnosis["sample_ids"])
    run = project.runs()[0]
    assert run.info.status == "FAILED"
    assert "diagnosis.json" in [file.path for file in project.client().list_artifacts(run.info.run_id)]
    assert no_model(project)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_run_killed(project: Project, number: signal.Signals, code: int) -> None:
    forget_model(project)
    project.set(epochs="500")
    process = project.start([sys.executable, "-u", "-m", "pipeline.stages.train"])
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("epoch 2/"):
            break
    process.send_signal(number)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == code
    assert "Traceback" not in said
    run = project.runs()[0]
    assert run.info.status == "KILLED"
    assert run.data.metrics["train/loss"] > 0
    assert no_model(project)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_ctrl_c_while_a_stage_imports_is_no_traceback(project: Project) -> None:
    process = project.start([sys.executable, "-u", "-m", "pipeline.stages.train"])
    loaded, until = Path(f"/proc/{process.pid}/maps"), time.monotonic() + 60
    while "libtorch_cpu" not in loaded.read_text():  # the first of its imports
        assert time.monotonic() < until
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert (process.returncode, said) == (-signal.SIGINT, "")


def test_params_edited_while_a_stage_runs_fail_it_and_say_what_changed(project: Project) -> None:
    project.set(epochs="6")
    process = project.start([sys.executable, "-u", "-m", "pipeline.stages.train"])
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("epoch 1/"):
            break
    project.set(epochs="7")
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "train.epochs: 6 -> 7" in said
    assert project.runs()[0].info.status == "FAILED"


@contextmanager
def serving(project: Project, *arguments: str) -> Iterator[None]:
    """A UI that answers; ended by SIGTERM to the process that was started, after which nothing answers."""
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, *arguments, "--port", str(port)],
        cwd=project.folder,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_until(lambda: answers(port), seconds=120)
        yield
        server.terminate()
        server.wait(timeout=30)
        wait_until(lambda: not answers(port), seconds=10)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def answers(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
    except OSError:
        return False
    return True


def wait_until(holds: Callable[[], bool], *, seconds: float) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, f"not within {seconds} seconds"
        time.sleep(0.3)


def test_the_ui_shows_the_projects_store_and_a_signal_ends_it_whole(project: Project) -> None:
    with serving(project, "-m", "pipeline", "ui"):
        assert {e.name for e in project.client().search_experiments()} == {"Default", "tightfit"}


def test_a_ui_that_was_started_first_does_no_harm(project: Project) -> None:
    """It makes the store, with a Default experiment whose artifacts only its server can write."""
    with serving(
        project, "-m", "mlflow", "ui", "--backend-store-uri", f"sqlite:///{project.folder}/mlflow.db"
    ):
        assert project.client().get_experiment("0").artifact_location.startswith("mlflow-artifacts:")
        said = project.sh("mlflow run . --env-manager local -e train")
        assert "keeps its artifacts on a server" in said
    reference = json.loads(project.read("reports/mlflow_run.json"))
    client = project.client()
    run = client.get_run(reference["run_id"])
    assert run.info.status == "FINISHED"
    assert client.get_experiment(run.info.experiment_id).name == "tightfit"
    assert client.list_artifacts(run.info.run_id)
    row = client.search_runs(["0"])[0]
    assert row.data.tags["pipeline.training_run_id"] == reference["run_id"]
    assert row.data.metrics["val/best_accuracy"] == run.data.metrics["val/best_accuracy"]


def test_four_processes_make_one_store_at_once(project: Project) -> None:
    script = (
        "from pipeline.tracking.store import connect; print('experiment', connect('tightfit').experiment_id)"
    )
    processes = [project.start([sys.executable, "-c", script]) for _ in range(4)]
    said = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, said
    assert len({re.findall(r"experiment (\d+)", text)[0] for text in said}) == 1


def test_overrides_without_git_are_refused_with_the_way_out(project: Project) -> None:
    (project.folder / ".git").rename(project.folder / "git-away")
    said = project.sh("python -m pipeline repro train.epochs=3", code=2)
    assert "git init" in said
    assert "python -m pipeline run" in project.sh("python -m pipeline repro", code=2)
    assert "is not key=value" in project.sh("python -m pipeline repro epochs", code=2)
