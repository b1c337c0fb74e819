import math

import pytest

from pipeline.engine import Schedule


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
    with pytest.raises(ValueError, match="constant, cosine"):
        Schedule("cosin", total_steps=3)
    with pytest.raises(ValueError, match="total_steps"):
        Schedule("cosine", total_steps=0)
