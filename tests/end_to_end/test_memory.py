"""Memory in the whole pipeline: savers change no byte, out of memory is survived, and a run tells of both."""

import json
from pathlib import Path

import pytest
from project import QUICK, Project, clone, copy_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

GREEDY = '''
"""A model for which micro-batches of more than 6 are too much, as a device would have it."""
import torch
from pipeline.models import small_cnn

def build(num_classes, in_channels=1):
    model = small_cnn(num_classes, in_channels)
    def check(module, inputs):
        if module.training and len(inputs[0]) > 6:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    model.register_forward_pre_hook(check)
    return model
'''

FULL_AT_STEP = '''
"""A model of whose eighth update there is no room, as long as there is a file named full."""
from pathlib import Path
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from pipeline.models import small_cnn as build

updates = 0

def update(optimizer, arguments, options):
    global updates
    planning = isinstance(optimizer.param_groups[0]["params"][0], FakeTensor)
    updates += not planning
    if updates == 8 and Path("full").exists():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

register_optimizer_step_pre_hook(update)
'''


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = clone(tmp_path_factory.mktemp("prepared"), **QUICK)
    project.sh("python -m pipeline.stages.prepare")
    return project


@pytest.fixture
def project(prepared: Project, tmp_path: Path) -> Project:
    return copy_of(prepared, tmp_path / "copy")


def weights(project: Project) -> bytes:
    project.sh("python -m pipeline.stages.train")
    return project.bytes("models/model.safetensors")


def use_model(project: Project, code: str) -> None:
    (project.folder / "pipeline" / "custom" / "greedy.py").write_text(code)
    named = project.read("params.yaml").replace("name: small_cnn ", "name: pipeline.custom.greedy:build ")
    (project.folder / "params.yaml").write_text(named)
    first = "      - pipeline/data/__init__.py\n"
    depending = project.read("dvc.yaml").replace(first, f"      - pipeline/custom/greedy.py\n{first}")
    (project.folder / "dvc.yaml").write_text(depending)


def test_savers_change_no_byte_of_the_model_and_stand_in_the_run(project: Project) -> None:
    plain = weights(project)
    project.set(savers="[checkpointing,offload,optimizer_on_host]", blocks='["0","1","3","4"]')
    saved = weights(project)
    assert saved == plain
    run = project.runs()[0]
    assert run.data.params["memory.savers"] == "['checkpointing', 'offload', 'optimizer_on_host']"
    assert "savers: checkpointing, offload, optimizer_on_host" in run.data.tags["mlflow.note.content"]
    plan = json.loads(project.read("reports/plan.json"))
    assert plan["decision"]["savers"] == ["checkpointing", "offload", "optimizer_on_host"]
    assert abs(run.data.metrics["memory/prediction_error"]) < 0.1
    assert run.data.metrics["memory/activations_mib"] > 0


def test_out_of_memory_is_survived_counted_and_told(project: Project) -> None:
    use_model(project, GREEDY)
    said = project.sh("python -m pipeline.stages.train")
    assert "plan: none, as model pipeline.custom.greedy:build cannot be traced" in said
    assert "Out of memory 2 times: windows were taken again, and the micro-batch became 4" in said
    run = project.runs()[0]
    assert run.info.status == "FINISHED"
    assert run.data.metrics["memory/oom_retries"] == 2
    assert run.data.metrics["memory/micro_batch_size"] == 4
    assert run.data.metrics["memory/accumulation_steps"] == 16
    assert json.loads(project.read("models/model.json"))["micro_batch_size"] == 4


def test_a_training_that_fits_no_more_ends_with_the_levers_left(project: Project) -> None:
    use_model(project, GREEDY.replace("> 6", "> 0"))
    said = project.sh("python -m pipeline.stages.train", code=2)
    assert "train: out of memory at micro-batch 1, and there is no smaller one." in said
    assert "Tried to allocate 2.00 GiB. Try precision amp_bf16 or amp_fp16, memory.savers: auto" in said
    assert project.runs()[0].info.status == "FAILED"


def test_out_of_memory_in_the_update_ends_the_training_which_then_goes_on_to_the_same_bits(
    project: Project,
) -> None:
    """Weights may have moved: nothing can be taken again, so the last checkpoint is what it goes on from."""
    use_model(project, FULL_AT_STEP)
    project.set(every_steps="5")
    uninterrupted = weights(copy_of(project, project.folder.parent / "uninterrupted"))
    (project.folder / "full").touch()
    said = project.sh("python -m pipeline.stages.train", code=2)
    assert "Tried to allocate 2.00 GiB" in said
    assert "precision amp_bf16 or amp_fp16, memory.savers: auto, or checkpointing" in said
    assert "The same command continues from step 5" in said
    assert project.runs()[0].info.status == "FAILED"
    (project.folder / "full").unlink()
    assert weights(project) == uninterrupted
    (run,) = project.runs()
    assert run.info.status == "FINISHED"
    assert run.data.tags["resume.1.step"] == "5"
    assert run.data.metrics["memory/oom_retries"] == 0
