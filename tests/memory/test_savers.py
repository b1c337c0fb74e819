"""Savers as the trace sees them: what it says they save is what they save on real tensors."""

from collections.abc import Callable

import pytest
import torch
import torchvision
from torch import nn

from pipeline.engine import (
    CrossEntropy,
    Precision,
    Trainer,
    allocate_state,
    build_optimizer,
    keep_state_on_host,
    offloaded,
    recompute,
    repeated_blocks,
)
from pipeline.engine.step import supervised
from pipeline.memory.trace import Trace, count_step, trace_step, without_memory

BUCKET = 2**20
SAVERS = {
    "none": (),
    "uncached": ("uncached",),
    "half": ("half",),
    "blocks": ("blocks",),
    "offload": ("offload",),
    "state": ("state",),
    "blocks and offload": ("blocks", "offload"),
    "all": ("blocks", "offload", "state"),
}


def transformer() -> nn.Module:
    return torchvision.models.VisionTransformer(64, 8, 6, 4, 128, 512, num_classes=10)


def trainer(build: Callable[[], nn.Module], savers: tuple[str, ...], precision: str) -> Trainer:
    model = build().train()
    if {"half", "blocks"} & {*savers}:
        recompute(model, repeated_blocks(model), every=2 if "half" in savers else 1)
    optimizer = build_optimizer(model, "adamw", lr=1e-3)
    if "state" in savers:
        keep_state_on_host(optimizer, BUCKET)
    allocate_state(optimizer)
    cached = not {"uncached", "half", "blocks"} & {*savers}
    return Trainer(
        model,
        optimizer,
        CrossEntropy(),
        precision=Precision(precision, cache_casts=cached),
        micro_batch_size=8,
        max_grad_norm=1.0,
        forward=offloaded(supervised, model, small_bytes=2**14) if "offload" in savers else supervised,
    )


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(16, 3, 64, 64), torch.zeros(16, dtype=torch.int64)


def traced(savers: tuple[str, ...], precision: str = "fp32") -> Trace:
    return trace_step(
        lambda: (trainer(lambda: without_memory(transformer), savers, precision), batch()), cuda=False
    )


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("half", "fp32"),
        ("blocks", "fp32"),
        ("offload", "fp32"),
        ("state", "fp32"),
        ("all", "fp32"),
        ("uncached", "amp_bf16"),
        ("all", "amp_bf16"),
    ],
)
def test_the_trace_with_savers_is_the_real_ledger_with_them(name: str, precision: str) -> None:
    fake, real = (
        traced(SAVERS[name], precision),
        count_step(trainer(transformer, SAVERS[name], precision), batch()),
    )
    assert fake.peak.total == pytest.approx(real.peak.total, rel=0.002)
    assert fake.host == pytest.approx(real.host, rel=0.01)
    assert (fake.moved_once, fake.moved_each) == (
        pytest.approx(real.moved_once, rel=0.01),
        pytest.approx(real.moved_each, rel=0.01),
    )
    assert fake.flops == real.flops


def test_each_saver_saves_what_it_is_for() -> None:
    found = {name: traced(savers) for name, savers in SAVERS.items()}
    none = found["none"]
    for name in ("half", "blocks", "offload", "state", "all"):
        assert found[name].peak.total < none.peak.total, name
    activations = {name: trace.highest["activations"] for name, trace in found.items()}
    assert activations["blocks"] < activations["half"] < activations["none"]
    assert activations["offload"] < 0.3 * activations["none"]
    state = none.highest["optimizer_state"]
    assert found["state"].highest["optimizer_state"] < 0.01 * state, "counters stay"
    assert found["state"].host == pytest.approx(state, rel=0.01)
    assert found["state"].moved_once == pytest.approx(2 * state, rel=0.01)
    assert found["offload"].moved_once == 0
    assert found["offload"].moved_each > found["blocks and offload"].moved_each > 0


def test_recomputing_costs_the_forward_of_the_blocks() -> None:
    """A third of a step is the forward's; of a block all but the last matrix, whose result nobody saved.

    That is 8 of the 12 times width x width that a block with an MLP of 4 widths multiplies with.
    """
    none, half, blocks = (traced(SAVERS[name]).flops for name in ("none", "half", "blocks"))
    assert blocks / none == pytest.approx(1 + 8 / 12 / 3, rel=0.01)
    assert half / none == pytest.approx(1 + 8 / 12 / 6, rel=0.01)


def test_the_casts_go_where_they_are_not_kept() -> None:
    cached, uncached = (traced(SAVERS[name], "amp_bf16") for name in ("none", "blocks"))
    assert uncached.highest["cast_weights"] < 0.5 * cached.highest["cast_weights"]
