"""When a checkpoint is written, and that one which cannot be does not end the training."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hostile import no_file_over

from pipeline.engine import Checkpoints, NonFiniteError
from pipeline.resume.keeper import Keeper


def keeper(folder: Path, content: Any, *, minutes: float = 60.0, steps: int | None = None) -> Keeper:
    def collect() -> dict[str, Any]:
        if isinstance(content, Exception):
            raise content
        return {"content": content}

    return Keeper(Checkpoints(folder, keep=9), collect, every_minutes=minutes, every_steps=steps)


def steps_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_every_so_many_steps_and_minutes(tmp_path: Path) -> None:
    by_steps = keeper(tmp_path / "a", 1, steps=3)
    by_time = keeper(tmp_path / "b", 1, minutes=1e-9)
    rarely = keeper(tmp_path / "c", 1)
    for step in range(1, 8):
        for one in (by_steps, by_time, rarely):
            one.after_step(step)
    assert [by_steps.written, by_time.written, rarely.written] == [2, 7, 0]
    assert steps_of(tmp_path / "a") == ["step-00000003.checkpoint", "step-00000006.checkpoint"]


def test_a_state_is_written_once(tmp_path: Path) -> None:
    once = keeper(tmp_path, 1)
    assert once.save(5)
    assert once.save(5)
    assert once.written == 1


def test_what_is_not_finite_is_not_written_and_training_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Checkpoints(tmp_path).save({"good": 1}, 1)
    assert not keeper(tmp_path, NonFiniteError("head.weight holds an inf or NaN")).save(2)
    said = capsys.readouterr().out
    assert "head.weight holds an inf or NaN; the last one, step-00000001.checkpoint, stays" in said
    assert steps_of(tmp_path) == ["step-00000001.checkpoint"]


def test_a_disk_that_is_full_is_named_with_the_need(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = keeper(tmp_path, torch.zeros(1_000_000))
    with no_file_over(100_000):
        assert not full.save(2)
    said = capsys.readouterr().out
    assert f"{tmp_path} cannot be written to: File too large" in said
    assert "3.8 MiB needed" in said
    assert "there is none yet" in said
    assert full.save(3)
    assert steps_of(tmp_path) == ["step-00000003.checkpoint"]
