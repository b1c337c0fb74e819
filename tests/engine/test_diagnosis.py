"""Law 7: a collapse ends the run, with a reason."""

import json
import math

import pytest
import torch
from nets import copies, equal, net, trainer, window
from torch import Tensor, nn

from pipeline.engine import CollapseError, CrossEntropy, Trainer


def collapse(stepper: Trainer, batch: tuple[Tensor, Tensor]) -> CollapseError:
    with pytest.raises(CollapseError) as raised:
        for _ in range(300):
            stepper.step(batch)
    return raised.value


class Times(nn.Module):
    """Multiplies forward by one factor, and the gradient by another."""

    def __init__(self, forward: float = 1.0, backward: float = 1.0) -> None:
        super().__init__()
        self.factors = forward, backward

    def forward(self, inputs: Tensor) -> Tensor:
        forward, backward = self.factors
        outputs = inputs * forward
        if outputs.requires_grad and backward != 1.0:
            outputs.register_hook(lambda gradient: gradient * backward)
        return outputs


def broken(times: Times) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(72, 16), times, nn.ReLU(inplace=True), nn.Linear(16, 5))


def test_law_7_a_loss_scale_under_its_floor_ends_the_run_with_finite_weights() -> None:
    model = broken(Times(forward=math.inf))
    stepper = trainer(model, precision="amp_fp16", scale=16.0, min_scale=2.0)
    before = copies(model.parameters())
    error = collapse(stepper, window(8))
    assert "the loss scale would fall to 1, under its floor 2" in str(error)
    assert stepper.state.step == 4
    assert equal(copies(model.parameters()), before)
    assert error.diagnosis.scale_history == [(1, 16.0), (2, 8.0), (3, 4.0), (4, 2.0)]


@pytest.mark.parametrize("name", ["fp32", "amp_bf16", "amp_fp16"])
def test_law_7_too_many_skips_in_a_row_end_the_run(name: str) -> None:
    stepper = trainer(broken(Times(forward=math.inf)), precision=name, max_consecutive_skips=3)
    assert "3 windows in a row were skipped" in str(collapse(stepper, window(8)))
    assert stepper.state.step == 3


@pytest.mark.parametrize("name", ["fp32", "amp_fp16"])
def test_law_7_the_first_module_is_named_when_the_loss_went_first(name: str) -> None:
    stepper = trainer(broken(Times(forward=math.inf)), precision=name, max_consecutive_skips=2)
    error = collapse(stepper, window(8))
    assert (error.diagnosis.first.kind, error.diagnosis.first.module) == ("output", "2 (Times)")
    assert "the loss went first" in str(error)


@pytest.mark.parametrize("name", ["fp32", "amp_fp16"])
def test_law_7_the_first_module_is_named_when_a_gradient_went_first(name: str) -> None:
    stepper = trainer(broken(Times(backward=math.inf)), precision=name, max_consecutive_skips=2)
    error = collapse(stepper, window(8))
    assert error.diagnosis.first.kind == "gradient"
    # the hook of the module makes the output's gradient infinite before the diagnosis sees it
    assert error.diagnosis.first.module == "the output of 2 (Times)"
    assert "a gradient went first" in str(error)


def test_law_7_a_weights_gradient_that_overflows_in_float16_is_named() -> None:
    """A real overflow: every activation's gradient is finite, the sum over the batch is not."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(72, 5, bias=False))
    images, labels = torch.full((8, 2, 6, 6), 300.0), torch.zeros(8, dtype=torch.int64)

    def large(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        return outputs.float().sum() * 160, len(targets)

    stepper = trainer(model, precision="amp_fp16", scale=2.0, min_scale=2.0, micro=8, loss=large)
    with torch.no_grad():
        model[1].weight.fill_(1e-3)
    error = collapse(stepper, (images, labels))
    assert error.diagnosis.first.module == "the parameter 1.weight"


def test_law_7_the_samples_are_named_by_the_ids_of_their_micro_batch() -> None:
    images, labels = window(12)
    images[5] = math.nan
    stepper = trainer(
        net(),
        max_consecutive_skips=1,
        sample_ids=lambda batch: [f"image-{index}" for index in range(len(batch[1]))],
    )
    diagnosis = collapse(stepper, (images, labels)).diagnosis
    assert diagnosis.first.kind == "input"
    assert diagnosis.micro_batch_ids == ["image-4", "image-5", "image-6", "image-7"]
    assert len(diagnosis.sample_ids) == 12


def test_law_7_a_loss_of_finite_outputs_is_told_from_the_model() -> None:
    stepper = trainer(
        net(), max_consecutive_skips=1, loss=lambda outputs, targets: (outputs.sum() * math.inf, len(targets))
    )
    assert collapse(stepper, window(8)).diagnosis.first.kind == "loss"


def test_a_diagnosis_leaves_the_model_as_it_was_and_fits_into_json() -> None:
    model = net(batchnorm=True)
    stepper = trainer(model, max_consecutive_skips=2)
    stepper.step(window(8))
    before = copies(model.state_dict().values())
    images, labels = window(8)
    error = collapse(stepper, (images * math.inf, labels))
    assert equal(copies(model.state_dict().values()), before)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())
    assert json.loads(json.dumps(error.diagnosis.as_dict()))["step"] == 3
    stepper.state.consecutive_skips = 0
    assert stepper.step(window(8)).applied


def test_a_fault_that_a_replay_does_not_show_is_said() -> None:
    calls = 0

    def once(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        nonlocal calls
        calls += 1
        total, count = CrossEntropy()(outputs, targets)
        return (total * math.nan if calls == 1 else total), count

    error = collapse(trainer(net(), loss=once, max_consecutive_skips=1), window(8))
    assert error.diagnosis.first.kind == "nothing"
    assert "random masks" in str(error)
