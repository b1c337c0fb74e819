import torch
from torch import nn

from pipeline.engine import allocate_state, build_optimizer
from pipeline.memory import usage


def test_the_components_are_exact() -> None:
    """AdamW holds two float32 moments a trained parameter, and a step count of 4 bytes each."""
    model = nn.Sequential(nn.Linear(100, 50), nn.BatchNorm1d(50), nn.Linear(50, 10, bias=False))
    model[2].requires_grad_(False)
    optimizer = build_optimizer(model, "adamw", lr=0.1)
    allocate_state(optimizer)
    trained = 100 * 50 + 50 + 50 + 50
    buffers = 2 * 50 * 4 + 8
    assert usage.components(model, optimizer) == {
        "parameters_mib": (4 * (trained + 500) + buffers) / 2**20,
        "gradients_mib": 4 * trained / 2**20,
        "optimizer_state_mib": (8 * trained + 4 * 4) / 2**20,
    }


def test_the_peak_resident_set_sees_what_was_taken() -> None:
    before = usage.peaks(torch.device("cpu"))["host_peak_rss_mib"]
    taken = torch.ones(int(before + 200) * 2**20 // 4)
    after = usage.peaks(torch.device("cpu"))["host_peak_rss_mib"]
    assert taken.sum() > 0
    assert after >= before + 150
