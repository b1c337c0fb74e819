"""Each on the CPU or on meta tensors; what CUDA does about them stands in torch's documentation."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pipeline.engine.determinism import NONDETERMINISTIC, nondeterministic


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("layer", "named"),
    [
        (nn.AdaptiveAvgPool2d(2), ["AdaptiveAvgPool2d"]),
        (nn.AdaptiveAvgPool2d(1), []),  # a mean
        (nn.AdaptiveMaxPool2d(2), ["AdaptiveMaxPool2d"]),
        (nn.ReflectionPad2d(1), ["ReflectionPad2d"]),
        (nn.MaxPool2d(2), []),
        (nn.Conv2d(3, 4, 3), []),
        (nn.Upsample(scale_factor=2, mode="bicubic"), ["interpolate (bicubic)"]),
        (nn.Upsample(scale_factor=2, mode="bilinear"), []),
        (
            nn.Sequential(nn.ReflectionPad2d(1), nn.AdaptiveMaxPool2d(2)),
            ["AdaptiveMaxPool2d", "ReflectionPad2d"],
        ),
    ],
)
def test_layers_without_a_deterministic_gradient_are_named(
    layer: nn.Module, named: list[str], device: str
) -> None:
    images = torch.rand(2, 3, 8, 8, device=device, requires_grad=True)
    assert nondeterministic(lambda: layer.to_empty(device=device)(images).sum().backward()) == named


@pytest.mark.parametrize(
    ("run", "named"),
    [
        (lambda: torch.rand(9).median(0), "median"),
        (lambda: torch.rand(9).histc(), "histc"),
        (lambda: torch.ones(9, dtype=torch.int64).bincount(), "bincount"),
        (lambda: torch.rand(9).put(torch.tensor([1]), torch.tensor([1.0])), "put"),
        (
            lambda: F.nll_loss(torch.rand(1, 2, 3, 3), torch.ones(1, 3, 3, dtype=torch.int64)),
            "NLLLoss of images",
        ),
    ],
)
def test_functions_are_named(run: Callable[[], object], named: str) -> None:
    assert nondeterministic(run) == [named]


def test_every_name_is_one_of_torchs_operations() -> None:
    for name in NONDETERMINISTIC:
        assert hasattr(torch.ops.aten, name), name
