import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.engine import Schedule
from pipeline.engine.schedule import SCHEDULES


def test_cosine_goes_from_one_to_zero() -> None:
    schedule = Schedule("cosine", total_steps=100)
    assert [schedule(0), schedule(50)] == pytest.approx([1.0, 0.5])
    assert schedule(99) == pytest.approx(0.5 * (1 + math.cos(math.pi * 0.99)))
    assert schedule(100) == pytest.approx(0.0)


def test_warm_up_rises_linearly_to_one_at_its_last_step() -> None:
    schedule = Schedule("constant", total_steps=100, warmup_fraction=0.1)
    assert [schedule(step) for step in (0, 4, 9, 10, 99)] == pytest.approx([0.1, 0.5, 1.0, 1.0, 1.0])


def test_past_the_end_the_factor_stays() -> None:
    assert Schedule("cosine", total_steps=10)(50) == pytest.approx(0.0)


def test_warm_up_over_all_steps_is_possible() -> None:
    schedule = Schedule("cosine", total_steps=4, warmup_fraction=1.0)
    assert [schedule(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]


def test_an_unknown_shape_and_no_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="constant, linear, cosine, one_cycle"):
        Schedule("cosin", total_steps=3)
    with pytest.raises(ValueError, match="total_steps"):
        Schedule("cosine", total_steps=0)


def test_linear_goes_from_one_to_zero() -> None:
    schedule = Schedule("linear", total_steps=110, warmup_fraction=10 / 110)
    assert [schedule(step) for step in (9, 10, 60, 110)] == pytest.approx([1.0, 1.0, 0.5, 0.0])


@pytest.mark.parametrize(("total", "warmup"), [(100, 0.3), (37, 0.25), (10, 0.2), (50, 0.05)])
def test_one_cycle_is_torchs(total: int, warmup: float) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0)
    oracle = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=1.0, total_steps=total, pct_start=warmup, cycle_momentum=False
    )
    schedule = Schedule("one_cycle", total, warmup)
    ours, theirs = [], []
    for step in range(total):
        ours.append(schedule(step))
        theirs.append(oracle.get_last_lr()[0])
        optimizer.step()
        if step < total - 1:
            oracle.step()
    assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", SCHEDULES)
@given(total=st.integers(1, 300), warmup=st.floats(0, 1), step=st.integers(0, 400))
def test_every_schedule_is_pure_and_stays_between_zero_and_one(
    name: str, total: int, warmup: float, step: int
) -> None:
    factor = Schedule(name, total, warmup)(step)
    assert 0.0 <= factor <= 1.0 + 1e-12
    assert Schedule(name, total, warmup)(step) == factor
