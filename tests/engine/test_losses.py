"""Each loss over split windows against torch's own mean over the whole window, in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import CLASSES, distance, net, trainer, window
from torch import Tensor, nn

from pipeline.engine import CrossEntropy, MeanSquaredError, Trainer

WEIGHTS = [0.2, 1.0, 3.0, 0.5, 2.0]


def gradients(
    batch: tuple[Tensor, Tensor], loss: Any, micro: int, forward: Callable[..., Any] | None = None
) -> tuple[list[Tensor], float]:
    """What the step hands to the optimizer, and the loss that it reports."""
    model = net(dtype=torch.float64)
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.0), []
    optimizer.register_step_pre_hook(lambda *_: seen.extend(p.grad.clone() for p in model.parameters()))
    options = {"forward": forward} if forward else {}
    result = trainer(model, optimizer, micro=micro, loss=loss, **options).step(batch)
    return seen, result.loss


def oracle(batch: tuple[Tensor, Tensor], criterion: nn.Module) -> tuple[list[Tensor], float]:
    """torch's mean over the whole window."""
    model = net(dtype=torch.float64)
    loss = criterion(model(batch[0]), batch[1])
    loss.backward()
    return [parameter.grad for parameter in model.parameters()], float(loss.detach())


def assert_equal_mean(ours: tuple[list[Tensor], float], theirs: tuple[list[Tensor], float]) -> None:
    assert distance(ours[0], theirs[0]) <= 1e-12
    assert ours[1] == pytest.approx(theirs[1], rel=1e-12)


@settings(max_examples=25, deadline=None)
@given(
    samples=st.integers(1, 30),
    micro=st.integers(1, 32),
    smoothing=st.sampled_from([0.0, 0.1]),
    weighted=st.booleans(),
    ignored=st.sampled_from([None, -100, 2]),
    seed=st.integers(0, 5),
)
def test_law_1_cross_entropy_is_torchs_mean_over_the_window(
    samples: int, micro: int, smoothing: float, weighted: bool, ignored: int | None, seed: int
) -> None:
    images, labels = window(samples, seed, dtype=torch.float64)
    if ignored is not None:
        labels[::3] = ignored
        labels[-1] = 1  # a window with nothing to count is another test
    weights = WEIGHTS if weighted else None
    ours = gradients((images, labels), CrossEntropy(smoothing, weights, ignored), micro)
    criterion = nn.CrossEntropyLoss(
        torch.tensor(WEIGHTS, dtype=torch.float64) if weighted else None,
        label_smoothing=smoothing,
        ignore_index=-100 if ignored is None else ignored,
    )
    theirs = oracle((images, labels), criterion)
    # class weights are given in float32, where 0.2 is rounded: compare with those
    if weighted:
        criterion.weight = criterion.weight.float().double()
        theirs = oracle((images, labels), criterion)
    assert_equal_mean(ours, theirs)
    assert_equal_mean(gradients((images, labels), criterion, micro), theirs)


def test_probabilities_as_targets_are_torchs_too() -> None:
    images, _ = window(10, dtype=torch.float64)
    targets = torch.rand(10, CLASSES, dtype=torch.float64).softmax(1)
    assert_equal_mean(
        gradients((images, targets), CrossEntropy(0.1), 3),
        oracle((images, targets), nn.CrossEntropyLoss(label_smoothing=0.1)),
    )


def test_pixels_are_items() -> None:
    outputs = torch.randn(4, 3, 5, 5)
    targets = torch.randint(0, 3, (4, 5, 5))
    targets[0] = 255
    total, count = CrossEntropy(ignore_index=255)(outputs, targets)
    assert count == 75
    assert total / count == pytest.approx(float(nn.CrossEntropyLoss(ignore_index=255)(outputs, targets)))


def test_a_label_outside_the_classes_is_an_error_and_not_ignored() -> None:
    with pytest.raises(IndexError, match="out of bounds"):
        CrossEntropy()(torch.zeros(2, 3), torch.tensor([0, -100]))


@pytest.mark.parametrize(
    "criterion",
    [
        nn.MSELoss(),
        nn.L1Loss(),
        nn.HuberLoss(),
        nn.BCEWithLogitsLoss(pos_weight=torch.tensor(2.0, dtype=torch.float64)),
        nn.KLDivLoss(reduction="batchmean"),
    ],
    ids=lambda criterion: type(criterion).__name__,
)
def test_a_mean_reducing_criterion_is_accepted_where_that_is_exact(criterion: nn.Module) -> None:
    images, _ = window(11, dtype=torch.float64)
    targets = torch.rand(11, CLASSES, dtype=torch.float64)
    assert_equal_mean(gradients((images, targets), criterion, 4), oracle((images, targets), criterion))


def test_mean_squared_error_is_torchs_and_refuses_to_broadcast() -> None:
    images, _ = window(11, dtype=torch.float64)
    targets = torch.rand(11, CLASSES, dtype=torch.float64)
    assert_equal_mean(
        gradients((images, targets), MeanSquaredError(), 4), oracle((images, targets), nn.MSELoss())
    )
    with pytest.raises(ValueError, match="one shape"):
        MeanSquaredError()(torch.zeros(4, 1), torch.zeros(4))


@pytest.mark.parametrize(
    "criterion",
    [
        nn.TripletMarginLoss(),
        nn.CTCLoss(),
        nn.CrossEntropyLoss(reduction="none"),
        nn.MSELoss(reduction="sum"),
    ],
    ids=lambda criterion: f"{type(criterion).__name__} {criterion.reduction}",
)
def test_a_criterion_whose_count_is_not_known_is_refused_at_construction(criterion: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"does not tell how many items.*\(sum over the items, number of"):
        trainer(net(), loss=criterion)


def test_a_function_that_returns_a_mean_is_refused_with_the_fix() -> None:
    stepper: Trainer = trainer(net(), loss=nn.functional.cross_entropy)
    with pytest.raises(ValueError, match=r"returns \(sum over the items, number of items\)"):
        stepper.step(window(8))


def test_a_sum_in_half_precision_does_not_overflow() -> None:
    """2,000 outputs of 100: their sum is past float16's 65,504."""
    model = nn.Linear(1, 1000, bias=False)
    nn.init.constant_(model.weight, 100.0)
    stepper = trainer(
        model, precision="amp_fp16", scale=1.0, loss=lambda outputs, targets: (outputs.float().sum(), 2)
    )
    assert stepper.step((torch.ones(2, 1), torch.zeros(2))).loss == 100_000.0
