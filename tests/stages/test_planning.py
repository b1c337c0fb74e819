"""The plan from params.yaml to its files and tables; traces are real, in processes of their own."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline import config
from pipeline.__main__ import main
from pipeline.errors import UserError
from pipeline.memory.planner import CUDA, MIB
from pipeline.stages import planning
from pipeline.stages.planning import planner, with_plan
from pipeline.stages.tracing import measure

DESCRIPTION: dict[str, Any] = {
    "source": "digits",
    "classes": [str(digit) for digit in range(10)],
    "shape": [1, 8, 8],
    "counts": {"train": 100, "validation": 10, "test": 10},
    "counts_by_class": {"train": [10] * 10},
    "mean": [0.3],
    "std": [0.4],
}


def params(*overrides: str) -> config.Params:
    return config.parse(config.overridden(Path("params.yaml").read_text(), overrides))


@pytest.fixture
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "params.yaml").write_text(Path("params.yaml").read_text())
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_micro_batch_that_is_a_number_needs_no_plan(in_tmp: Path) -> None:
    (in_tmp / "reports").mkdir()
    (in_tmp / "reports" / "plan.json").write_text("{}")
    chosen = params()
    assert with_plan(chosen, DESCRIPTION, torch.device("cpu")) is chosen
    assert not (in_tmp / "reports" / "plan.json").exists(), "of another training"


def test_auto_takes_the_largest_and_writes_decision_and_evidence(in_tmp: Path) -> None:
    chosen = params("batch.micro_batch_size=auto", "batch.effective_batch_size=4", "memory.budget_gib=8")
    planned = with_plan(chosen, DESCRIPTION, torch.device("cpu"))
    assert planned.batch.planned == 4
    assert planned == replace(chosen, batch=replace(chosen.batch, micro_batch_size=4))
    plan = json.loads((in_tmp / "reports" / "plan.json").read_text())
    assert plan["decision"]["micro_batch_size"] == 4
    assert plan["evidence"]["window_samples"] == 4
    sizes = [prediction["micro_batch_size"] for prediction in plan["evidence"]["predictions"]]
    assert sizes == [1, 4]


def test_the_data_set_caps_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = DESCRIPTION | {"counts": {"train": 20, "validation": 10, "test": 10}}
    assert planner(params(), tiny, CUDA).window == 20


def test_a_budget_under_micro_batch_1_is_refused_with_numbers_and_levers(in_tmp: Path) -> None:
    chosen = params("batch.micro_batch_size=auto", "memory.budget_gib=0.01", "precision=fp32")
    with pytest.raises(UserError, match=r"micro-batch 1 takes [\d,]+ MiB, [\d,]+ MiB more .*Try a smaller"):
        with_plan(chosen, DESCRIPTION, torch.device("cpu"))
    assert not planning.PLAN.exists()


def test_a_trace_of_a_model_that_does_not_exist_is_one_message() -> None:
    with pytest.raises(UserError, match="resnet19"):
        measure(params("model.name=resnet19"), DESCRIPTION, 2, cuda=True)


def test_the_commands_table_says_what_fits_and_what_does_not(
    in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "model.name=resnet18",
        "data.image_size=64",
        "precision=amp_fp16",
        "batch.micro_batch_size=1",
        "batch.effective_batch_size=2",
    ]
    assert main(["plan", *arguments, "--budget", "0.5,1.5", "--figure", "plan.png"]) == 0
    said = capsys.readouterr().out
    assert "resnet18, 64 px, amp_fp16, adamw, effective batch 2, on cuda" in said
    assert "does not fit" in said.splitlines()[3]
    assert said.splitlines()[4].split()[:3] == ["1.50", "2", "1"]
    assert "The peak is in the backward: aten." in said
    assert re.search(r"module [a-z]+\S*\.", said)
    assert "depends on the micro-batch: the model has batch statistics." in said
    assert said.count("-S batch.micro_batch_size=") == said.count("-S batch.micro_batch_size=2") == 1
    assert (in_tmp / "plan.png").stat().st_size > 5000


def test_the_commands_json_adds_up(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    single = ["precision=fp32", "batch.effective_batch_size=1", "batch.micro_batch_size=1"]
    assert main(["plan", *single, "--budget", "2", "--json"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)
    prediction = plan["prediction"]
    assert plan["fits"]
    assert sum(prediction["components"].values()) == prediction["allocated"]
    assert prediction["allocated"] + prediction["rounding"] >= prediction["reserved"]
    assert prediction["required"] == (
        prediction["allocated"] + prediction["rounding"] + prediction["context"] + prediction["workspaces"]
    )
    assert prediction["context"] >= 300 * MIB


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--budget", "six"], "numbers of GiB above 0"),
        (["--budget", "-1"], "numbers of GiB above 0"),
        (["optimizer.lrr=1"], "unknown; did you mean optimizer.lr"),
        (["nonsense"], "is not key=value"),
    ],
)
def test_wrong_arguments_are_one_message(
    in_tmp: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    assert said in capsys.readouterr().err
