"""The plan from params.yaml to its files and tables; traces are real, in processes of their own."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from pipeline import config, models
from pipeline.__main__ import main
from pipeline.errors import UserError
from pipeline.memory.prediction import CPU_RATES, CUDA, MIB, Device
from pipeline.stages import planning, tracing
from pipeline.stages.largest import largest
from pipeline.stages.planning import Forecast, with_plan
from pipeline.stages.setup import build_model
from pipeline.stages.tracing import Tracer, TracingError

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


def test_a_micro_batch_that_is_a_number_is_kept_and_predicted(in_tmp: Path) -> None:
    chosen = params()
    planned, plan = with_plan(chosen, DESCRIPTION, torch.device("cpu"))
    assert planned == replace(chosen, memory=replace(chosen.memory, savers=[]))
    assert plan is not None
    written = json.loads((in_tmp / "reports" / "plan.json").read_text())
    assert written["decision"] == {
        "micro_batch_size": 16,
        "accumulation_steps": 4,
        "savers": [],
        "predicted_peak_bytes": plan.best.required,
        "relative_time": round(plan.relative_time, 4),
    }
    (prediction,) = written["evidence"]["predictions"]
    assert prediction["micro_batch_size"] == 16


def test_planning_moves_no_random_state_and_keeps_no_memory(in_tmp: Path) -> None:
    """A plan that left something behind would let the training run out of memory that it said was there."""
    wanted = ["model.name=vit_b_16", "data.image_size=224", "batch.micro_batch_size=auto"]
    with_plan(params(), DESCRIPTION, torch.device("cpu"))  # what a first trace imports stays
    torch.manual_seed(3)
    before, resident = torch.get_rng_state(), psutil.Process().memory_info().rss
    description = DESCRIPTION | {"shape": [1, 224, 224]}
    _, plan = with_plan(params(*wanted, "batch.effective_batch_size=2"), description, torch.device("cpu"))
    assert plan is not None
    assert plan.best.highest["parameters"] > 300 * MIB
    assert torch.equal(torch.get_rng_state(), before)
    assert psutil.Process().memory_info().rss - resident < 100 * MIB


def test_auto_takes_the_largest_and_writes_decision_and_evidence(in_tmp: Path) -> None:
    chosen = params("batch.micro_batch_size=auto", "batch.effective_batch_size=4", "memory.budget_gib=8")
    planned, _ = with_plan(chosen, DESCRIPTION, torch.device("cpu"))
    assert planned == replace(
        chosen,
        batch=replace(chosen.batch, micro_batch_size=4),
        memory=replace(chosen.memory, savers=[]),
    )
    plan = json.loads((in_tmp / "reports" / "plan.json").read_text())
    assert plan["decision"]["micro_batch_size"] == 4
    assert plan["evidence"]["window_samples"] == 4
    sizes = [prediction["micro_batch_size"] for prediction in plan["evidence"]["predictions"]]
    assert sizes == [1, 4]


def test_the_data_set_caps_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = DESCRIPTION | {"counts": {"train": 20, "validation": 10, "test": 10}}
    with Tracer(tiny, cuda=False) as tracer:
        assert Forecast(params(), tiny, CUDA, tracer).window == 20


def test_a_budget_under_micro_batch_1_is_refused_with_numbers_and_levers(in_tmp: Path) -> None:
    chosen = params("batch.micro_batch_size=auto", "memory.budget_gib=0.01", "precision=fp32")
    with pytest.raises(UserError, match=r"takes [\d,]+ MiB, [\d,]+ MiB more .*Try precision amp_bf16"):
        with_plan(chosen, DESCRIPTION, torch.device("cpu"))
    assert not planning.PLAN.exists()


def test_a_given_micro_batch_that_does_not_fit_is_refused_too(in_tmp: Path) -> None:
    with pytest.raises(UserError, match=r"micro-batch 16 .*Try batch.micro_batch_size: auto"):
        with_plan(params("memory.budget_gib=0.01"), DESCRIPTION, torch.device("cpu"))


UNTRACEABLE = """
import torch
from torch import nn

class Reading(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.head = nn.Linear(64, num_classes)

    def forward(self, images):
        return self.head(images.flatten(1)) * (2.0 if images.sum().item() > 1e9 else 1.0)
"""


@pytest.fixture
def untraceable(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (in_tmp / "reading.py").write_text(UNTRACEABLE)
    monkeypatch.syspath_prepend(str(in_tmp))
    monkeypatch.setenv("PYTHONPATH", f"{in_tmp}:{os.environ['PYTHONPATH']}")
    return "model.name=reading:Reading"


def test_a_model_that_cannot_be_traced_is_measured_by_two_real_steps(
    untraceable: str, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = params(untraceable, "batch.micro_batch_size=auto", "precision=fp32", "memory.budget_gib=8")
    planned, plan = with_plan(chosen, DESCRIPTION, torch.device("cpu"))
    assert planned.batch.planned == 64
    assert plan is not None
    said = capsys.readouterr().out
    assert "reading:Reading cannot be traced: aten._local_scalar_dense.default in no module, forward" in said
    weights = 4 * (64 * 10 + 10)
    assert plan.best.highest["parameters"] == weights
    assert plan.best.components["gradients"] == weights


def test_a_model_that_cannot_be_traced_trains_at_a_given_micro_batch_without_a_plan(
    untraceable: str, in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned, plan = with_plan(params(untraceable), DESCRIPTION, torch.device("cpu"))
    assert plan is None
    assert planned.memory.chosen == []
    assert "plan: none, as model reading:Reading cannot be traced" in capsys.readouterr().out
    assert not planning.PLAN.exists()


def test_a_model_that_normalises_single_values_is_planned_from_micro_batch_2_on(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (in_tmp / "pooled.py").write_text(POOLED)
    monkeypatch.syspath_prepend(str(in_tmp))
    chosen = params("model.name=pooled:pooled", "batch.micro_batch_size=auto", "precision=fp32")
    small = replace(chosen, batch=replace(chosen.batch, effective_batch_size=4))
    _, plan = with_plan(small, DESCRIPTION, torch.device("cpu"))
    assert plan is not None
    assert plan.best.micro_batch_size == 4
    written = json.loads((in_tmp / "reports" / "plan.json").read_text())
    assert written["evidence"]["predictions"][0]["micro_batch_size"] == 2


POOLED = """
from torch import nn

def pooled(num_classes):
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(1, num_classes))
"""


def test_segmentation_is_planned_and_labelled_and_not_trained(
    in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "model.name=lraspp_mobilenet_v3_large"
    wanted = [name, "data.image_size=64", "batch.effective_batch_size=4", "memory.savers=[]"]
    assert main(["plan", *wanted, "--budget", "8"]) == 0
    said = capsys.readouterr().out
    assert "lraspp_mobilenet_v3_large (segmentation: plan only, train takes classifiers), 64 px" in said
    assert "To train so" not in said
    with pytest.raises(UserError, match="is a segmentation model: it can be planned"):
        build_model(params(name), models.ImageSet(["a", "b"], 3, 64, [0.5] * 3, [0.2] * 3))


def test_the_largest_model_that_fits_is_found_from_the_largest_down(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"squeezenet1_1": 1_235_496, "resnet18": 11_689_512, "vit_b_16": 86_567_656}
    monkeypatch.setattr(models, "torchvision_sizes", lambda: sizes)
    device = Device("none", False, 0, 0, CPU_RATES)
    budgets = [10 * MIB, 300 * MIB, 8 * 2**30]
    found = largest(params("precision=fp32"), DESCRIPTION, device, budgets)
    assert found[10 * MIB] is None
    names = [entry[0] for entry in found.values() if entry]
    assert names == ["resnet18", "vit_b_16"]
    assert all(entry[1].required <= budget for budget, entry in found.items() if entry)


def test_a_real_step_is_refused_where_the_host_has_not_the_memory(
    untraceable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "HOST_COPIES", 10**12)
    with pytest.raises(UserError, match=r"a real step of it needs more than the .* GiB that are free"):
        tracing.measure(params(untraceable), DESCRIPTION, 2, cuda=False)


def test_a_trace_of_a_model_that_does_not_exist_is_one_message() -> None:
    with Tracer(DESCRIPTION, cuda=True) as tracer, pytest.raises(UserError, match="resnet19") as caught:
        tracer.trace(params("model.name=resnet19"), 2)
    assert not isinstance(caught.value, TracingError), "a real step would not help"


def test_the_commands_table_says_what_fits_and_what_does_not(
    in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "model.name=resnet18",
        "data.image_size=64",
        "precision=amp_fp16",
        "batch.effective_batch_size=2",
    ]
    assert main(["plan", *arguments, "--budget", "0.4,1.5", "--figure", "plan.png"]) == 0
    said = capsys.readouterr().out
    assert "resnet18, 64 px, amp_fp16, adamw, effective batch 2, on cuda" in said
    assert "does not fit" in said.splitlines()[3]
    assert said.splitlines()[4].split()[:3] == ["1.50", "2", "1"]
    assert "Not taken: " in said
    assert "The peak is in the backward: aten." in said
    assert re.search(r"module [a-z]+\S*\.", said)
    assert "depends on the micro-batch: the model has batch statistics." in said
    assert said.count("-S batch.micro_batch_size=") == said.count("-S batch.micro_batch_size=2") == 1
    assert (in_tmp / "plan.png").stat().st_size > 5000


def test_the_commands_json_adds_up(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    single = ["precision=fp32", "batch.effective_batch_size=1"]
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
    assert plan["disk"]["checkpoints"] == 3 * plan["disk"]["checkpoint"] > 9 * plan["disk"]["model"]


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
