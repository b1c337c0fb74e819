"""Faults that users reported of tools like this one, each with the right value.

What the law tests hold already is not repeated here. The numbers are issues and pull requests on GitHub.
"""

import math
import warnings

import pytest
import torch
from nets import copies, distance, equal, gradients_of, net, trainer, window
from torch import Tensor, nn

from pipeline.engine import CrossEntropy, Schedule, WeightAverage, fit

SIZE = 4  # samples of a micro-batch


def dataset(samples: int) -> tuple[Tensor, Tensor]:
    return window(samples, 7)


def windows_of(data: tuple[Tensor, Tensor], size: int) -> list[tuple[Tensor, Tensor]]:
    images, labels = data
    return list(zip(images.split(size), labels.split(size), strict=True))


def trained_by_hand(batches: list[tuple[Tensor, Tensor]]) -> nn.Module:
    """The oracle: each window at once, torch's mean, in float32."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for images, labels in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return model


def overflowing(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return batch[0] * 1e30, batch[1]


def test_a_short_last_window_is_divided_by_what_is_in_it() -> None:
    """pytorch-lightning 19987, transformers 38872 and 39659: five micro-batches, three a window."""
    batches = windows_of(dataset(5 * SIZE), 3 * SIZE)
    model = net()
    stepper = trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), micro=SIZE)
    results = [stepper.step(batch) for batch in batches]
    oracle = trained_by_hand(batches)
    # two windows of float32 sums in another order: a few roundings of 2^-24 each
    assert distance(copies(model.parameters()), copies(oracle.parameters())) <= 1e-6
    after_first = trained_by_hand(batches[:1])
    images, labels = batches[1]
    expected = float(nn.functional.cross_entropy(after_first(images), labels).detach())
    assert results[1].loss == pytest.approx(expected, rel=1e-5), "the logged loss of the short window"


def test_micro_batches_of_4_4_and_2_and_a_loss_of_ones_own_share_one_divisor() -> None:
    """transformers 34191, torchtune 1875, ms-swift 10084."""

    def own(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        return nn.functional.cross_entropy(outputs, targets, reduction="sum"), len(targets)

    batch = window(10)
    for loss in (CrossEntropy(), own):
        model = net()
        stepper = trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), micro=4, loss=loss)
        stepper.step(batch)
        oracle = trained_by_hand([batch])
        assert distance(copies(model.parameters()), copies(oracle.parameters())) <= 1e-6


def test_the_order_of_the_micro_batches_does_not_matter() -> None:
    """open_clip 1211: one coefficient a window."""
    images, labels = window(12, dtype=torch.float64)
    order = [8, 9, 10, 11, 0, 1, 2, 3, 4, 5, 6, 7]
    first, _ = gradients_of(net(dtype=torch.float64), (images, labels), 4)
    second, _ = gradients_of(net(dtype=torch.float64), (images[order], labels[order]), 4)
    assert distance(first, second) <= 1e-12


def test_an_epoch_shorter_than_a_window_is_one_step_with_accumulation() -> None:
    """pytorch-lightning 21808: a loader of two micro-batches where four make a window."""
    stepper, results = trainer(net(), micro=SIZE), []
    fit(
        stepper,
        lambda epoch, seen: windows_of(dataset(2 * SIZE), 4 * SIZE),
        epochs=3,
        after_step=results.append,
        after_epoch=lambda epoch: None,
    )
    assert [(result.applied, result.samples) for result in results] == [(True, 2 * SIZE)] * 3


def test_no_sample_is_dropped_at_the_tail_and_the_counters_agree_over_epochs() -> None:
    """ColossalAI 1028; transformers 23935: two epochs, five micro-batches, three a window."""
    seen: list[Tensor] = []

    def remember(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        images, labels, ids = batch
        seen.append(ids)
        return model(images), labels

    images, labels = dataset(5 * SIZE - 1)
    ids = torch.arange(len(labels))
    batches = list(zip(images.split(12), labels.split(12), ids.split(12), strict=True))
    stepper = trainer(net(), precision="amp_fp16", micro=SIZE, max_grad_norm=1.0, forward=remember)
    fit(
        stepper,
        lambda epoch, seen: batches,
        epochs=2,
        after_step=lambda result: None,
        after_epoch=lambda epoch: None,
    )
    assert sorted(torch.cat(seen).tolist()) == sorted([*range(19), *range(19)])
    assert (stepper.state.step, stepper.state.samples_seen) == (4, 38)


def test_the_logged_loss_is_not_divided_by_the_number_of_micro_batches() -> None:
    """pytorch-lightning 2569 and 15315."""
    whole, split = (trainer(net(), micro=micro).step(window(16)).loss for micro in (16, 4))
    assert split == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("fused", [True, False])
def test_overflows_leave_the_learning_rate_where_it_is(fused: bool) -> None:
    """accelerate 4242 (fused AdamW: no skip was seen), pytorch-lightning 5558, 18828 and 21339."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    stepper = trainer(
        model, optimizer, precision="amp_fp16", scale=64.0, schedule=Schedule("linear", total_steps=10)
    )
    stepper.step(window(8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns where a scheduler goes on over a skip
        skipped = [stepper.step(overflowing(window(8))) for _ in range(3)]
    assert [result.applied for result in skipped] == [False] * 3
    assert [result.learning_rate for result in skipped] == pytest.approx([0.009] * 3)
    assert stepper.state.skipped_steps == 3
    assert stepper.step(window(8)).learning_rate == pytest.approx(0.009)


def test_a_loss_that_is_nan_for_ever_ends_at_the_floor_with_finite_weights() -> None:
    """pytorch 99640: the scale goes to 0 and the next clean step makes the weights non-finite."""
    model = net()
    stepper = trainer(model, precision="amp_fp16", scale=65536.0, min_scale=1.0)
    poisoned = window(8)[0] * math.nan, window(8)[1]
    steps = 0
    with pytest.raises(RuntimeError, match="under its floor"):
        for _ in range(200):
            stepper.step(poisoned)
            steps += 1
    assert steps == 16  # 65536 is 2^16; the seventeenth window would halve 1
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_four_micro_batches_with_clipping_run_under_a_scaler_to_the_oracles_norm() -> None:
    """accelerate 641 and 113, Swin-Transformer 311, pytorch-lightning 4427: unscaled once, not twice."""
    batch = window(16)
    oracle = net()
    nn.functional.cross_entropy(oracle(batch[0]), batch[1]).backward()
    expected = float(nn.utils.get_total_norm([parameter.grad for parameter in oracle.parameters()]))
    for scale in (1.0, 1024.0):  # pytorch-lightning 9205 and 4151: the logged norm is not the scaled one
        stepper = trainer(net(), precision="amp_fp16", scale=scale, micro=4, max_grad_norm=0.1)
        assert stepper.step(batch).grad_norm == pytest.approx(expected, rel=1e-2)  # float16 has 11 bits


@pytest.mark.parametrize("name", ["fp32", "amp_bf16", "amp_fp16"])
def test_one_nan_sample_is_a_skip_and_is_seen(name: str) -> None:
    """pytorch 46849 (clipping spreads a NaN to all), habitat-lab 2226, trl 6702 (a clean loss is shown)."""
    model = net()
    images, labels = window(8)
    images[5] = math.nan
    before = copies(model.parameters())
    stepper = trainer(model, precision=name, max_grad_norm=1.0)
    result = stepper.step((images, labels))
    assert equal(copies(model.parameters()), before)
    assert (result.applied, result.found_inf, math.isfinite(result.loss)) == (False, True, False)
    assert stepper.state.skipped_steps == 1


def test_the_average_moves_with_updates_and_not_with_micro_batches() -> None:
    """F5-TTS 631: four micro-batches a window, one skip in three windows, two moves."""
    model = net()
    average = WeightAverage(model, 0.5)
    moves = 0
    update = average.update

    def counted() -> None:
        nonlocal moves
        moves += 1
        update()

    average.update = counted
    stepper = trainer(model, precision="amp_fp16", scale=64.0, micro=2, average=average)
    for batch in (window(8, 0), overflowing(window(8, 1)), window(8, 2)):
        stepper.step(batch)
    assert moves == 2
