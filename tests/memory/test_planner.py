"""The search for the micro-batch, on a model of memory that is known exactly, and its edges."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.memory.ledger import COMPONENTS
from pipeline.memory.planner import CUDA, MIB, Planner, Prediction


def measured(fixed: int, each: int, step: int, bend: float = 0.0):
    """Bytes at a micro-batch: a line that may bend upwards, and a step; counts how often it was asked."""
    asked: list[int] = []

    def measure(size: int) -> Prediction:
        asked.append(size)
        growing = fixed + each * size + round(bend * each * size**1.5)
        total = max(growing, step)
        components = dict.fromkeys(COMPONENTS, 0) | {"activations": total}
        phases = {"forward": growing - 1, "backward": growing, "step": step}
        return Prediction(size, components, total, total, 0, 0, 0, phases, "backward", "", "")

    return measure, asked


def best_by_hand(planner: Planner, measure, budget: int) -> int | None:
    fitting = [size for size in planner.candidates() if measure(size).required <= budget]
    return max(fitting, default=None)


@settings(max_examples=100, deadline=None)
@given(
    window=st.integers(1, 300),
    fixed=st.integers(1, 1000),
    each=st.integers(1, 100),
    step=st.integers(0, 3000),
    bend=st.sampled_from([0.0, 0.0005]),  # under 1 % at 300, as models have it
    budget=st.integers(1, 20000),
)
def test_the_largest_that_fits_is_found_by_few_traces(
    window: int, fixed: int, each: int, step: int, bend: float, budget: int
) -> None:
    measure, asked = measured(fixed * MIB, each * MIB, step * MIB, bend)
    planner = Planner(measure, window)
    plan = planner.plan(budget * MIB)
    traces = len(asked)
    expected = best_by_hand(planner, measured(fixed * MIB, each * MIB, step * MIB, bend)[0], budget * MIB)
    assert plan.fits == (expected is not None)
    if plan.fits:
        assert plan.best.required <= budget * MIB, "what is chosen was traced and fits"
        assert plan.best.micro_batch_size == expected
        assert traces <= 6


def test_of_equal_numbers_of_steps_the_smallest_micro_batch_is_taken() -> None:
    """256 samples: 54 would fit, and 52 needs five steps as well."""
    measure, _ = measured(0, MIB, 0)
    plan = Planner(measure, 256).plan(54 * MIB)
    assert (plan.best.micro_batch_size, plan.accumulation_steps) == (52, 5)


def test_the_window_caps_the_micro_batch() -> None:
    """Of a tiny data set, or the effective batch; not a batch of 67 million."""
    measure, asked = measured(0, 1, 0)
    plan = Planner(measure, 40).plan(2**60)
    assert (plan.best.micro_batch_size, plan.accumulation_steps) == (40, 1)
    assert max(asked) == 40


def test_below_micro_batch_1_nothing_fits_and_the_numbers_are_there() -> None:
    measure, asked = measured(100 * MIB, 10 * MIB, 0)
    plan = Planner(measure, 64).plan(109 * MIB)
    assert not plan.fits
    assert plan.best.required - plan.budget == MIB
    assert asked == [1]


def test_several_budgets_share_their_traces() -> None:
    measure, asked = measured(0, MIB, 0)
    planner = Planner(measure, 64)
    sizes = [planner.plan(budget * MIB).best.micro_batch_size for budget in (8, 16, 16, 32, 64)]
    assert sizes == [8, 16, 16, 32, 64]
    assert len(asked) == len(set(asked))


def test_what_a_device_takes_besides_tensors_is_counted() -> None:
    measure, _ = measured(100 * MIB, 10 * MIB, 0)
    found = measure(1)
    with_context = Prediction(**(vars(found) | {"context": CUDA.context_bytes, "rounding": 5 * MIB}))
    assert with_context.required == found.allocated + CUDA.context_bytes + 5 * MIB
    assert with_context.as_dict()["required"] == with_context.required


@pytest.mark.parametrize("window", [1, 2, 7, 64, 1000])
def test_candidates_each_save_a_step(window: int) -> None:
    measure, _ = measured(0, 1, 0)
    sizes = Planner(measure, window).candidates()
    steps = [-(-window // size) for size in sizes]
    assert sizes[0] == 1
    assert sizes[-1] == window
    assert len(set(steps)) == len(steps)
