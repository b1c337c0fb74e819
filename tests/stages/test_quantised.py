"""AdamW with quantised moments: smaller by what is said, traced as it runs, learning nearly the same."""

import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn

from pipeline.engine import (
    CrossEntropy,
    Precision,
    Schedule,
    Trainer,
    allocate_state,
    build_optimizer,
    parameter_groups,
    state_tensors,
)
from pipeline.errors import UserError
from pipeline.memory.trace import count_step, trace_step, without_memory
from pipeline.stages.quantised import BYTES, quantised_adamw

INPUTS, CLASSES = 3 * 16 * 16, 10


def plain_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(INPUTS, 512), nn.ReLU(), nn.Linear(512, CLASSES))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 3, 16, 16, generator=generator), torch.arange(8) % CLASSES


def trainer(bits: int, model: nn.Module) -> Trainer:
    groups = parameter_groups(model, 0.05)
    if bits == 32:
        optimizer = build_optimizer(model, "adamw", lr=1e-3, weight_decay=0.05)
    else:
        optimizer = quantised_adamw(groups, lr=1e-3, bits=bits)
    allocate_state(optimizer, starts_at_zero=bits != 32)
    return Trainer(
        model,
        optimizer,
        CrossEntropy(),
        precision=Precision("amp_fp16"),
        micro_batch_size=4,
        max_grad_norm=1.0,
        schedule=Schedule("cosine", 10, 0.2),
    )


@pytest.mark.parametrize("bits", [8, 4])
def test_the_state_is_smaller_by_what_is_said_and_the_trace_knows(bits: int) -> None:
    pytest.importorskip("torchao")
    real = trainer(bits, plain_model())
    parameters = sum(parameter.numel() for parameter in real.model.parameters())
    held = sum(tensor.nbytes for tensor in state_tensors(real.optimizer))
    assert held / parameters == pytest.approx(BYTES[bits], abs=0.02)  # biases stay, 0.01
    build: Callable[[], nn.Module] = plain_model
    fake = trace_step(lambda: (trainer(bits, without_memory(build)), batch()), cuda=False)
    counted = count_step(real, batch())
    assert fake.peak.components == counted.peak.components
    assert fake.highest["optimizer_state"] == held


@pytest.mark.parametrize("bits", [8, 4])
def test_it_learns_nearly_the_same_with_scaling_clipping_and_a_schedule(bits: int) -> None:
    pytest.importorskip("torchao")
    exact, quantised = trainer(32, plain_model()), trainer(bits, plain_model())
    for _ in range(5):
        ours, theirs = quantised.step(batch()), exact.step(batch())
        assert ours.applied
        assert ours.learning_rate == pytest.approx(theirs.learning_rate)
        assert ours.loss == pytest.approx(theirs.loss, abs=0.1)
    assert quantised.step(batch()).loss < 0.3


def test_without_torchao_the_message_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(UserError, match=r"state_bits 8 needs torchao, which is not installed: pip install"):
        quantised_adamw(parameter_groups(plain_model(), 0.0), lr=0.1, bits=8)
