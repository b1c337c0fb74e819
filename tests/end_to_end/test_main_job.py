"""The main job as its users do it, from a fresh clone: DVC's and MLflow's own commands, in order.

The tests share one clone and stand in the order in which a person would go on; each takes what the one
before it left.
"""

import csv
import itertools
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from project import ROOT, Project, clone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

OUTPUTS = (
    "models/model.safetensors",
    "models/model.json",
    "reports/training.csv",
    "reports/mlflow_run.json",
    "reports/test.json",
    "reports/confusion.csv",
    "reports/classes.csv",
    "data/prepared/dataset.json",
)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    folder = tmp_path_factory.mktemp("tightfit")
    made = clone(folder)
    share_environment(folder / ".venv")
    yield made
    made.sh("dvc queue stop --kill || true")


def share_environment(folder: Path) -> None:
    """A virtual environment that is this very one, marked as installed: what `make` would have made."""
    folder.mkdir()
    shutil.copy(Path(sys.prefix) / "pyvenv.cfg", folder)
    for part in ("bin", "lib"):
        (folder / part).symlink_to(Path(sys.prefix) / part)
    for stamp in (".python", ".runtime", ".dev"):
        (folder / stamp).touch()


def training(project: Project) -> Any:
    return project.client().get_run(json.loads(project.read("reports/mlflow_run.json"))["run_id"])


def rows(project: Project) -> list[dict[str, str]]:
    return list(csv.DictReader(project.read("reports/training.csv").splitlines()))


def test_make_repro_trains_evaluates_and_tracks(project: Project) -> None:
    said = project.sh("make repro")
    assert all((project.folder / path).is_file() for path in OUTPUTS)
    assert "epoch 8/8" in said
    scores = json.loads(project.read("reports/test.json"))["test"]
    assert scores["accuracy"] >= 0.98
    assert set(scores) == {"loss", "accuracy", "top5_accuracy", "macro_f1", "expected_calibration_error"}


def test_the_run_shows_a_real_skip_and_real_growth(project: Project) -> None:
    table = rows(project)
    scales = [float(row["amp/loss_scale"]) for row in table]
    skipped = [int(row["step"]) for row in table if row["amp/found_inf"] == "1.0"]
    assert skipped
    assert float(table[-1]["amp/skipped_steps"]) == len(skipped)
    assert float(table[-1]["amp/optimizer_steps"]) + len(skipped) == int(table[-1]["step"]) == 160
    pairs = list(itertools.pairwise(scales))
    assert any(after == 2 * before for before, after in pairs), "the scale never grew"
    assert any(after == before / 2 for before, after in pairs) or skipped[-1] == 160


def test_law_8_every_metric_is_logged_at_step_and_equals_the_table(project: Project) -> None:
    run, client = training(project), project.client()
    table = rows(project)
    names = [name for name in table[0] if name != "step"]
    assert {"train/loss", "train/learning_rate", "train/grad_norm", "train/nonfinite"} <= set(names)
    assert {"amp/loss_scale", "amp/growth_tracker", "amp/found_inf", "amp/skipped_steps"} <= set(names)
    assert {"memory/host_peak_rss_mib", "memory/micro_batch_size", "memory/accumulation_steps"} <= set(names)
    assert {"val/loss", "val/accuracy", "val/best_accuracy", "val/macro_f1"} <= set(names)
    for name in names:
        logged = {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, name)}
        assert logged == {int(row["step"]): float(row[name]) for row in table if row[name]}, name
    steps = [int(row["step"]) for row in table]
    assert steps == sorted(set(steps))
    assert set(range(10, 161, 10)) <= set(steps)
    evaluated = [int(row["step"]) for row in table if row["val/accuracy"]]
    assert evaluated == list(range(20, 161, 20))


def test_the_run_page_tells_the_whole_story(project: Project) -> None:
    run, client = training(project), project.client()
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "small_cnn-lr0.005-b64"
    experiment = client.get_experiment(run.info.experiment_id)
    assert experiment.name == "tightfit"
    assert experiment.artifact_location == (project.folder / "mlruns" / "tightfit").as_uri()
    params = run.data.params
    assert params["optimizer.lr"] == "0.005"
    assert params["precision"] == "amp_fp16"
    assert (params["accumulation_steps"], params["parameters"], params["device"]) == ("4", "17754", "cpu")
    assert {"torch", "threads", "execution.device", "tracking.log_every_steps"} <= set(params)
    metrics = run.data.metrics
    assert metrics["test/accuracy"] == json.loads(project.read("reports/test.json"))["test"]["accuracy"]
    assert client.get_metric_history(run.info.run_id, "test/accuracy")[0].step == 160
    assert metrics["memory/parameters_mib"] == 17754 * 4 / 2**20
    assert metrics["memory/optimizer_state_mib"] >= 2 * metrics["memory/parameters_mib"]
    assert any(name.startswith("system/") for name in metrics)
    tags = run.data.tags
    assert tags["git.commit"] == project.sh("git rev-parse HEAD").strip()
    assert (tags["git.dirty"], tags["overrides"], tags["dvc.stage"]) == ("False", "none", "train")
    note = tags["mlflow.note.content"]
    assert re.match(r"\*\*test/accuracy 0\.9\d+\*\*", note)
    assert "4 micro-batches of 16" in note
    assert "steps were skipped" in note
    kept = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert {"params.yaml", "dataset.json", "training.csv", "scaler.json", "packages.txt", "test.json"} <= kept
    drawn = {Path(file.path).stem for file in client.list_artifacts(run.info.run_id, "figures")}
    assert drawn == {"loss_and_accuracy", "loss_scale", "memory_by_component", "confusion_matrix"}
    assert run.inputs.dataset_inputs[0].dataset.name == "digits"
    assert len(run.outputs.model_outputs) == 1


def test_the_logged_model_and_the_saved_one_give_the_same_logits(project: Project) -> None:
    model_id = training(project).outputs.model_outputs[0].model_id
    script = (
        "import mlflow, torch; from pipeline.models import load_model; import sklearn.datasets as d; "
        f"mlflow.set_tracking_uri('sqlite:///{project.folder / 'mlflow.db'}'); "
        f"logged = mlflow.pytorch.load_model('models:/{model_id}'); "
        "model, transform, classes = load_model('models'); "
        "digits = d.load_digits(); "
        "inputs = transform(torch.tensor(digits.images[:, None] * 255 / 16).round().byte()); "
        "logits = model(inputs); "
        "torch.testing.assert_close(logged(inputs), logits); "
        "right = [classes[i] == str(label) for i, label in zip(logits.argmax(1), digits.target)]; "
        "print(sum(right) / len(right))"
    )
    assert float(project.sh(f'python -W ignore -c "{script}"')) >= 0.98


def test_dvc_repro_again_runs_nothing(project: Project) -> None:
    before = len(project.runs())
    assert "Data and pipelines are up to date." in project.sh("dvc repro")
    assert len(project.runs()) == before
    assert "nothing waits" in project.sh("python -m pipeline deliver-metrics")
    assert "nothing was removed" in project.sh("python -m pipeline clean --dry-run")


def test_dvcs_own_views_work(project: Project) -> None:
    project.commit()
    assert "test.accuracy" in project.sh("dvc metrics show")
    assert "index.html" in project.sh("dvc plots show")
    assert "optimizer.lr" in project.sh("dvc exp show --csv")
    project.sh("git clean --quiet --force -d")


def test_law_12_a_forced_reproduction_trains_again_to_the_same_bytes(project: Project) -> None:
    """With two loader workers the second time: how it runs never changes what is learned."""
    weights, first = project.bytes("models/model.safetensors"), training(project).info.run_id
    project.set(workers="2")
    assert "Data and pipelines are up to date." in project.sh("dvc repro"), "a change of HOW trained again"
    said = project.sh("dvc repro --force")
    assert "epoch 8/8" in said
    assert project.bytes("models/model.safetensors") == weights
    assert training(project).info.run_id != first
    assert "test/accuracy" in training(project).data.metrics
    project.sh("git checkout --quiet . && dvc checkout --quiet")


def test_an_experiment_changes_one_line_and_going_back_runs_nothing(project: Project) -> None:
    project.sh("dvc exp run -S optimizer.lr=3e-4 -S train.epochs=1", GIT_AUTHOR_NAME="a")
    changed = project.sh("git diff --unified=0 params.yaml").splitlines()
    assert [line for line in changed if re.match(r"[-+] ", line)] == [
        "-  lr: 0.005",
        "+  lr: 0.0003",
        "-  epochs: 8",
        "+  epochs: 1",
    ]
    assert "0.005" in project.sh("dvc params diff")
    run = training(project)
    assert run.data.tags["overrides"] == "optimizer.lr=0.0003 train.epochs=1"
    assert run.data.tags["git.dirty"] == "True"
    assert "dvc.experiment" in run.data.tags
    assert "git.diff" in {file.path for file in project.client().list_artifacts(run.info.run_id)}
    runs = len(project.runs())
    project.sh("git checkout --quiet . && dvc checkout --quiet")
    assert "Data and pipelines are up to date." in project.sh("dvc repro")
    assert len(project.runs()) == runs


def test_mlflow_run_with_all_stages_cached_leaves_a_meaningful_row(project: Project) -> None:
    project.sh("mlflow run . --env-manager local --experiment-name tightfit")
    row, trained = project.runs()[0], training(project)
    assert row.info.status == "FINISHED"
    assert row.data.tags["pipeline.stages_run"] == "none: all cached"
    assert row.data.tags["pipeline.training_run_id"] == trained.info.run_id != row.info.run_id
    assert row.data.metrics["test/accuracy"] == trained.data.metrics["test/accuracy"]
    assert row.data.metrics["val/best_accuracy"] == trained.data.metrics["val/best_accuracy"]


def test_mlflow_run_with_overrides_is_one_adopted_row(project: Project) -> None:
    before = len(project.runs())
    overrides = "train.epochs=3 optimizer.lr=1e-3"
    said = project.sh(f'mlflow run . --env-manager local -P overrides="{overrides}"')
    assert "params.yaml now differs from the commit in: optimizer.lr=0.001 train.epochs=3" in said
    assert "git checkout params.yaml" in said
    assert len(project.runs()) == before + 1
    run = training(project)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "small_cnn-lr0.001-b64"
    assert run.data.params["overrides"].strip("'") == overrides
    assert run.data.params["optimizer.lr"] == "0.001"
    assert run.data.tags["pipeline.stages_run"] == "train evaluate"
    assert run.data.tags["mlflow.source.type"] == "PROJECT"
    assert "test/accuracy" in run.data.metrics
    project.sh("git checkout --quiet . && dvc checkout --quiet")


def test_queued_experiments_land_in_the_projects_store(project: Project) -> None:
    project.set(**{"precision": "fp32", "epochs": "1", "log_model": "false"})
    project.commit()
    project.sh("dvc exp run --queue -S seed=1")
    project.sh("dvc exp run --queue -S seed=2")
    project.sh("dvc queue start -j 2")
    project.sh("until ! dvc queue status | grep -qE 'Queued|Running'; do sleep 1; done", timeout=300)
    assert project.sh("dvc queue status").count("Success") == 2
    project.sh("dvc exp run --temp -S seed=3")
    made = {run.data.params["seed"]: run for run in project.runs()[:3]}
    assert set(made) == {"1", "2", "3"}
    for seed, run in made.items():
        assert run.info.status == "FINISHED"
        assert run.data.tags["overrides"] == f"seed={seed}"
        assert "test/accuracy" in run.data.metrics
        assert Path(run.info.artifact_uri.removeprefix("file://")).is_relative_to(project.folder / "mlruns")
    assert not project.sh("git status --porcelain").strip()


NOT_RUN = {  # they install, serve until Ctrl-C, are the suite that this is, or run in a test of their own
    "git clone <this repository> tightfit && cd tightfit",
    "make test",
    "make check",
    "make ui",
    "python -m pipeline run",
    "python -m pipeline plan model.name=vit_h_14 data.image_size=224 batch.effective_batch_size=256 "
    "--budget 6,8",
}


def test_the_readmes_commands_are_those_that_were_run_here(project: Project) -> None:
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines = [re.sub(r"\s+#.*", "", line).strip() for block in blocks for line in block.splitlines()]
    commands = {line for line in lines if line and not line.startswith("#")} - NOT_RUN
    installs = {line for line in commands if re.search(r"\bpip install\b|-m venv|/activate$", line)}
    assert commands - installs - set(project.ran) == set()
    assert len(commands - installs) >= 8
