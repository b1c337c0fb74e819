"""The search for the micro-batch, on a model of memory that is known exactly, and its edges."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.memory.ledger import COMPONENTS
from pipeline.memory.planner import (
    CHECKPOINTING,
    CHECKPOINTING_HALF,
    OFFLOAD,
    OPTIMIZER_ON_HOST,
    Planner,
)
from pipeline.memory.prediction import CUDA, MIB, Prediction, Rates, Savers, Work, on_the_line

RATES = Rates(1e12, 1e10, 0.0)  # no cost of launching: every micro-batch takes the same time


def measured(fixed: int, each: int, step: int, bend: float = 0.0):
    """Bytes at a micro-batch: a line that may bend upwards, and a step; counts how often it was asked."""
    asked: list[int] = []

    def measure(savers: Savers, size: int) -> Prediction:
        asked.append(size)
        growing = fixed + each * size + round(bend * each * size**1.5)
        total = max(growing, step)
        components = dict.fromkeys(COMPONENTS, 0) | {
            "parameters": fixed,
            "activations": growing - fixed,
            "temporaries": total - growing,
        }
        phases = {"forward": growing - 1, "backward": growing, "step": step}
        return prediction(savers, size, components, phases)

    return measure, asked


def prediction(
    savers: Savers,
    size: int,
    components: dict[str, int],
    phases: dict[str, int],
    work: Work = Work(1e9, 100, 0, 0),  # noqa: B008  frozen
) -> Prediction:
    total = sum(components.values())
    return Prediction(
        savers=savers,
        micro_batch_size=size,
        components=components,
        highest=dict.fromkeys(COMPONENTS, 0) | {"activations": components["activations"]},
        allocated=total,
        reserved=total,
        rounding=0,
        context=0,
        workspaces=0,
        host=0,
        phases=phases,
        phase="backward",
        operation="",
        module="",
        work=work,
    )


def best_by_hand(planner: Planner, measure, budget: int) -> int | None:
    fitting = [size for size in planner.candidates() if measure((), size).required <= budget]
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
    planner = Planner(measure, window, rates=RATES)
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
    found = measure((), 1)
    with_context = Prediction(**(vars(found) | {"context": CUDA.context_bytes, "rounding": 5 * MIB}))
    assert with_context.required == found.allocated + CUDA.context_bytes + 5 * MIB
    assert with_context.as_dict()["required"] == with_context.required


@pytest.mark.parametrize("window", [1, 2, 7, 64, 1000])
def test_candidates_each_save_a_step(window: int) -> None:
    measure, _ = measured(0, 1, 0)
    sizes = Planner(measure, window, rates=RATES).candidates()
    steps = [-(-window // size) for size in sizes]
    assert sizes[0] == 1
    assert sizes[-1] == window
    assert len(set(steps)) == len(steps)


def ladder(step_seconds: dict[Savers, float], bytes_at_1: dict[Savers, int]):
    """Combinations whose time and memory are given; 10 MiB more a sample."""
    traced: list[tuple[Savers, int]] = []

    def measure(savers: Savers, size: int) -> Prediction:
        traced.append((savers, size))
        total = bytes_at_1[savers] + (size - 1) * 10 * MIB
        components = dict.fromkeys(COMPONENTS, 0) | {"activations": total}
        work = Work(step_seconds[savers] * RATES.flops_per_second / 64, 0, 0, 0)
        return prediction(
            savers, size, components, dict.fromkeys(("forward", "backward", "step"), total), work
        )

    return measure, traced


LADDER = {
    (): (1.0, 1000 * MIB),
    (CHECKPOINTING_HALF,): (1.17, 600 * MIB),
    (CHECKPOINTING,): (1.33, 300 * MIB),
    (CHECKPOINTING, OFFLOAD): (1.5, 200 * MIB),
}


@pytest.mark.parametrize(
    ("budget", "taken"),
    [(2000, ()), (999, (CHECKPOINTING_HALF,)), (599, (CHECKPOINTING,)), (250, (CHECKPOINTING, OFFLOAD))],
)
def test_the_fastest_combination_that_fits_is_taken(budget: int, taken: Savers) -> None:
    measure, traced = ladder(*({key: value[i] for key, value in LADDER.items()} for i in (0, 1)))
    plan = Planner(measure, 64, combinations=list(LADDER), rates=RATES).plan(budget * MIB)
    assert plan.fits
    assert plan.best.savers == taken
    assert plan.relative_time == pytest.approx(LADDER[taken][0])
    assert {tried.savers for tried in plan.not_taken} == set(LADDER) - {taken}
    slower = [savers for savers in LADDER if LADDER[savers][0] > LADDER[taken][0]]
    assert not [savers for savers, _ in traced if savers in slower and savers != ()], "the search stopped"
    reasons = {tried.savers: tried.reason for tried in plan.not_taken}
    assert all(reasons[savers] == "slower than what fits" for savers in slower)
    assert all(reasons[savers] == "does not fit" for savers in set(reasons) - set(slower))


def test_what_does_not_fit_with_any_saver_is_refused_with_the_least_there_is() -> None:
    measure, _ = ladder(*({key: value[i] for key, value in LADDER.items()} for i in (0, 1)))
    plan = Planner(measure, 64, combinations=list(LADDER), rates=RATES).plan(100 * MIB)
    assert not plan.fits
    assert plan.best.savers == (CHECKPOINTING, OFFLOAD)
    assert plan.best.required == 200 * MIB


def test_what_state_alone_overfills_is_refused_without_a_trace() -> None:
    traced: list[Savers] = []

    def measure(savers: Savers, size: int) -> Prediction:
        traced.append(savers)
        state = 0 if OPTIMIZER_ON_HOST in savers else 800 * MIB
        components = dict.fromkeys(COMPONENTS, 0) | {"parameters": 400 * MIB, "optimizer_state": state}
        found = prediction(savers, size, components, dict.fromkeys(("forward", "backward", "step"), 0))
        return Prediction(**vars(found) | {"highest": components})

    combinations = [(), (CHECKPOINTING,), (OPTIMIZER_ON_HOST,), (CHECKPOINTING, OPTIMIZER_ON_HOST)]
    plan = Planner(measure, 8, combinations=combinations, rates=RATES).plan(500 * MIB)
    assert plan.best.savers == (OPTIMIZER_ON_HOST,)
    assert (CHECKPOINTING,) not in traced


def test_a_micro_batch_that_is_given_is_kept_and_savers_are_found_for_it() -> None:
    measure, traced = ladder(*({key: value[i] for key, value in LADDER.items()} for i in (0, 1)))
    plan = Planner(measure, 64, combinations=list(LADDER), fixed=16, rates=RATES).plan(700 * MIB)
    assert plan.best.savers == (CHECKPOINTING,), "600 + 150 are too many"
    assert plan.best.micro_batch_size == 16
    assert {size for _, size in traced} == {16}


def test_a_small_micro_batch_costs_its_launches() -> None:
    """Checkpointing at a larger micro-batch can be faster than none at a tiny one."""
    work = Work(flops=1e9, launches=1000, moved_once=0, moved=0)
    rates = Rates(1e12, 1e10, 1e-5)
    assert work.seconds(64, 64, rates) == pytest.approx(0.064)  # computing
    assert work.seconds(64, 1, rates) == pytest.approx(64 * 1000 * 1e-5)  # launching


def test_what_is_carried_to_the_host_costs_its_bytes() -> None:
    work = Work(flops=0, launches=0, moved_once=4e9, moved=1e8)
    assert work.seconds(64, 8, RATES) == pytest.approx((4e9 + 64e8) / 1e10)


def test_a_line_through_two_real_steps_gives_every_number_in_between_and_beyond() -> None:
    measure, _ = measured(100 * MIB, 10 * MIB, 0)
    one, two, eight = (measure((), size) for size in (1, 2, 8))
    assert on_the_line(one, two, 8) == eight


def test_a_limit_of_33_for_100_samples_becomes_four_micro_batches_of_25() -> None:
    """Halving 64 or 128 would stop at 32, four steps of uneven parts."""
    measure, _ = measured(0, MIB, 0)
    plan = Planner(measure, 100, rates=RATES).plan(33 * MIB)
    assert (plan.best.micro_batch_size, plan.accumulation_steps) == (25, 4)
