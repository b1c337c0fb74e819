"""Law 9, resume is exact: a trainer put back from a snapshot goes on as the one that was not stopped.

Each snapshot goes through a file, into a trainer that was made anew and that stood elsewhere.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blocky import BAD, PRECISIONS, WINDOWS, blocky, one_thread, saving_trainer
from nets import net, window
from nets import trainer as plain_trainer
from torch import Tensor, nn

from pipeline.engine import (
    NonFiniteError,
    Recovery,
    Schedule,
    Trainer,
    WeightAverage,
    fit,
    random_state_kept,
    restore,
    snapshot,
)
from pipeline.engine import checkpoint as checkpoints
from pipeline.engine.snapshot import on_host

__all__ = ["one_thread"]


def made(savers: tuple[str, ...] = (), precision: str = "fp32") -> Trainer:
    """With everything that has a state: dropout, BatchNorm, moments, average, schedule, scaler."""
    model = blocky()
    return saving_trainer(
        model,
        savers,
        precision,
        average=WeightAverage(model, 0.9),
        schedule=Schedule("cosine", len(WINDOWS), 0.3),
    )


def given(index: int) -> tuple[Tensor, Tensor]:
    """The windows of a training; one of them holds an inf and is skipped."""
    images, labels = window(WINDOWS[index], index)
    if index == BAD:
        images[-1, 0, 0, 0] = math.inf
    return images, labels


def through_a_file(folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    path = folder / "step-00000001.checkpoint"
    checkpoints.write(path, state)
    return checkpoints.read(path)


def same(a: Any, b: Any) -> bool:
    """Bit for bit, in trees of tensors and plain values."""
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def uninterrupted(savers: tuple[str, ...] = (), precision: str = "fp32") -> dict[str, Any]:
    trainer = made(savers, precision)
    torch.manual_seed(1)
    for index in range(len(WINDOWS)):
        trainer.step(given(index))
    return on_host(snapshot(trainer))


def stopped_and_resumed(
    folder: Path, at: int, savers: tuple[str, ...] = (), precision: str = "fp32"
) -> dict[str, Any]:
    trainer = made(savers, precision)
    torch.manual_seed(1)
    for index in range(at):
        trainer.step(given(index))
    saved = through_a_file(folder, snapshot(trainer))
    resumed = made(savers, precision)
    torch.manual_seed(99)
    resumed.step(window(6, seed=77))  # it stands elsewhere in every respect
    restore(resumed, saved)
    for index in range(at, len(WINDOWS)):
        resumed.step(given(index))
    return snapshot(resumed)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("at", range(1, len(WINDOWS)))
def test_law_9_resume_is_exact_just_before_and_after_a_skip_too(
    tmp_path: Path, at: int, precision: str
) -> None:
    expected = uninterrupted(precision=precision)
    assert expected["counters"]["skipped_steps"] == 1
    assert same(stopped_and_resumed(tmp_path, at, precision=precision), expected)


@pytest.mark.parametrize(
    "savers", [("recompute",), ("offload",), ("state",), ("recompute", "offload", "state")]
)
def test_law_9_with_savers(tmp_path: Path, savers: tuple[str, ...]) -> None:
    assert same(stopped_and_resumed(tmp_path, 3, savers, "amp_fp16"), uninterrupted(savers, "amp_fp16"))


def test_the_scaler_is_restored_and_loading_moves_nothing(tmp_path: Path) -> None:
    """transformers 34053, ultralytics 22189, accelerate 4289: scale and tracker; loading twice is as once."""
    trainer = made(precision="amp_fp16")
    for index in range(4):
        trainer.step(given(index))
    saved = through_a_file(tmp_path, snapshot(trainer))
    other = made(precision="amp_fp16")
    restore(other, saved)
    once = on_host(snapshot(other))
    restore(other, saved)
    assert same(snapshot(other), once)
    assert other.precision.state_dict() == trainer.precision.state_dict()
    assert other.precision.state_dict()["_growth_tracker"] == 1
    assert other.state.items_per_sample == trainer.state.items_per_sample


def test_a_micro_batch_that_shrank_stays_so(tmp_path: Path) -> None:
    """transformers 25956: after out of memory the training resumes with the size that fitted."""
    trainer, failures = made(), iter([True])
    forward = trainer.forward

    def once_too_much(model: nn.Module, batch: Any) -> Any:
        if next(failures, False):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(model, batch)

    trainer.forward = once_too_much
    recovery = Recovery(trainer)
    recovery.step(given(0))
    assert trainer.micro_batch_size == 2
    saved = through_a_file(tmp_path, snapshot(trainer))
    trainer.forward = forward
    expected = trainer.step(given(1)).loss
    resumed = made()
    restore(resumed, saved)
    assert resumed.micro_batch_size == 2
    assert resumed.step(given(1)).loss == expected


def test_the_position_in_the_data_is_samples_and_no_sample_is_lost_or_seen_twice() -> None:
    """transformers 5605: what is skipped on resume is counted in samples, in any split into windows."""
    seen: list[list[int]] = []

    def windows(epoch: int, start: int) -> list[Any]:
        images, labels = window(13, seed=epoch)
        ids = torch.arange(13)
        parts = [ids[start:][i : i + 5] for i in range(0, 13 - start, 5)]
        return [(images[part], labels[part], part) for part in parts]

    def remembered(model: nn.Module, batch: Any) -> Any:
        seen.append(batch[2].tolist())
        return model(batch[0]), batch[1]

    class Halt(Exception):
        pass

    def halt(result: Any) -> None:
        if result.step == 5:
            raise Halt

    trainer = plain_trainer(net(), forward=remembered, micro=5)
    with pytest.raises(Halt):
        fit(trainer, windows, epochs=3, after_step=halt, after_epoch=lambda epoch: None)
    assert (trainer.state.epoch, trainer.state.epoch_samples) == (1, 10)
    resumed = plain_trainer(net(1), forward=remembered, micro=5)
    restore(resumed, snapshot(trainer))
    fit(resumed, windows, epochs=3, after_step=lambda result: None, after_epoch=lambda epoch: None)
    assert [one for ids in seen for one in ids] == 3 * list(range(13))
    assert resumed.state.samples_seen == 39


def test_an_epoch_whose_end_was_interrupted_ends_again() -> None:
    """Stopped in the validation after the last window: no window is trained twice, the validation is done."""
    ended: list[int] = []
    trainer = plain_trainer(net())

    def windows(epoch: int, start: int) -> list[Any]:
        images, labels = window(8, seed=epoch)
        return [(images[start:], labels[start:])] if start < 8 else []

    def interrupted(epoch: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(trainer, windows, epochs=2, after_step=lambda result: None, after_epoch=interrupted)
    resumed = plain_trainer(net(1))
    restore(resumed, snapshot(trainer))
    fit(resumed, windows, epochs=2, after_step=lambda result: None, after_epoch=ended.append)
    assert ended == [1, 2]
    assert resumed.state.step == 2


def test_python_numpy_and_torch_draw_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    """transformers 17032: every generator a forward may use."""
    import random

    trainer = made()
    saved = through_a_file(tmp_path, snapshot(trainer))

    def drawn() -> list[float]:
        return [random.random(), float(np.random.random()), float(torch.rand(()))]

    first = drawn()
    with random_state_kept(torch.device("cpu")):
        drawn()
    second = drawn()
    restore(trainer, saved)
    assert [drawn(), drawn()] == [first, second]


def test_a_buffer_that_state_dict_leaves_out_is_kept(tmp_path: Path) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()
            self.register_buffer("calls", torch.zeros(()), persistent=False)

        def forward(self, images: Tensor) -> Tensor:
            self.calls += 1
            return self.inner(images) * (1 + self.calls)

    trainer = plain_trainer(Counting())
    trainer.step(window(8))
    resumed = plain_trainer(Counting())
    restore(resumed, through_a_file(tmp_path, snapshot(trainer)))
    assert trainer.step(window(8, 1)).loss == resumed.step(window(8, 1)).loss


@pytest.mark.parametrize("where", ["weight", "buffer", "average"])
def test_law_6_a_state_that_is_not_finite_is_never_kept(where: str) -> None:
    trainer = made()
    trainer.step(given(0))
    tensors = {
        "weight": trainer.model.head.weight.data,
        "buffer": trainer.model.blocks[1].body[1].running_var,
        "average": trainer.average.averages[0],
    }
    tensors[where].view(-1)[0] = math.nan
    with pytest.raises(NonFiniteError, match="average" if where == "average" else "head.weight|running_var"):
        snapshot(trainer)


def test_a_state_of_another_training_is_refused_and_moves_nothing() -> None:
    saved = on_host(snapshot(plain_trainer(net(), precision="amp_fp16")))
    others = {
        "another model: 1.running_mean": plain_trainer(net(batchnorm=True), precision="amp_fp16"),
        "another precision": plain_trainer(net()),
        "average": plain_trainer(model := net(), precision="amp_fp16", average=WeightAverage(model, 0.5)),
        "another optimizer": plain_trainer(
            model := net(),
            torch.optim.SGD([{"params": [one]} for one in model.parameters()], lr=0.1),
            precision="amp_fp16",
        ),
    }
    for message, other in others.items():
        before = on_host(snapshot(other))
        with pytest.raises(ValueError, match=message):
            restore(other, saved)
        assert same(snapshot(other), before)
