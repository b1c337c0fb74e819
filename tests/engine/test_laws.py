"""The laws of the step, each by its number; oracles are float64, the whole window, torch's GradScaler."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import copies, distance, equal, gradients_of, net, trainer, window
from torch import Tensor, nn

from pipeline.engine import CrossEntropy, Schedule, Trainer, WeightAverage, state_tensors

OPTIMIZERS = {
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw plain": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    "sgd plain": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, foreach=False),
}


# --- 1: exact accumulation


@settings(max_examples=40, deadline=None)
@given(samples=st.integers(1, 40), micro=st.integers(1, 45))
def test_law_1_any_split_gives_the_whole_windows_gradient_in_float64(samples: int, micro: int) -> None:
    batch = window(samples, dtype=torch.float64)
    whole, whole_loss = gradients_of(net(dtype=torch.float64), batch, samples)
    split, split_loss = gradients_of(net(dtype=torch.float64), batch, micro)
    assert distance(split, whole) <= 1e-12
    assert split_loss == pytest.approx(whole_loss, rel=1e-6)  # the report's own sum is float32 or better


def test_law_1_the_oracle_is_torchs_mean_over_the_window() -> None:
    batch, model = window(23, dtype=torch.float64), net(dtype=torch.float64)
    nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
    oracle = [parameter.grad.clone() for parameter in model.parameters()]
    split, _ = gradients_of(net(dtype=torch.float64), batch, 5)
    assert distance(split, oracle) <= 1e-12


@pytest.mark.parametrize(("samples", "micro"), [(64, 16), (41, 16), (7, 3), (64, 1)])
def test_law_1_float32_is_as_near_to_float64_as_the_whole_window_is(samples: int, micro: int) -> None:
    exact, _ = gradients_of(net(dtype=torch.float64), window(samples, dtype=torch.float64), samples)
    whole, _ = gradients_of(net(), window(samples), samples)
    split, _ = gradients_of(net(), window(samples), micro)
    assert distance(split, exact) <= 2 * distance(whole, exact)


def test_law_1_items_that_are_not_samples_are_weighted_by_the_windows_count() -> None:
    """Masked items, most of them in one micro-batch: a mean of means would be wrong."""

    def masked(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        mask = targets != 0
        losses = nn.functional.cross_entropy(outputs, targets, reduction="none")
        return (losses * mask).sum(), mask.sum()

    images, labels = window(10, dtype=torch.float64)
    labels[:4] = 0
    labels[4:] = 1
    model = net(dtype=torch.float64)
    total, count = masked(model(images), labels)
    (total / count).backward()
    oracle = [parameter.grad.clone() for parameter in model.parameters()]
    other = net(dtype=torch.float64)
    seen: list[Tensor] = []
    optimizer = torch.optim.SGD(other.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(lambda *_: seen.extend(p.grad.clone() for p in other.parameters()))
    result = trainer(other, optimizer, micro=4, loss=masked).step((images, labels))
    assert distance(seen, oracle) <= 1e-12
    assert result.loss == pytest.approx(float((total / count).detach()), rel=1e-6)


def test_law_1_the_reported_loss_does_not_depend_on_the_split() -> None:
    losses = [trainer(net(), micro=micro).step(window(12)).loss for micro in (1, 3, 5, 12)]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-6)


def test_law_1_memory_does_not_grow_with_the_number_of_micro_batches() -> None:
    """A backward pass per micro-batch: no more than one micro-batch's graph is alive at a time."""
    alive, most = 0, 0

    class Counted(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            nonlocal alive, most
            alive += 1
            most = max(most, alive)
            outputs = inputs * self.weight
            outputs.register_hook(self.released)
            return outputs.flatten(1)[:, :5]

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def released(self, gradient: Tensor) -> None:
            nonlocal alive
            alive -= 1

    trainer(Counted(), micro=1).step(window(9))
    assert (most, alive) == (1, 0)


# --- 3: one path


@pytest.mark.parametrize("name", ["fp32", "amp_bf16", "amp_fp16"])
def test_law_3_a_disabled_part_does_nothing(name: str) -> None:
    """With a scale of 1 and in each precision, the same step as autocast and the optimizer alone."""
    model, reference = net(), net()
    stepper = trainer(model, precision=name, scale=1.0, micro=16)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
    dtype = {"fp32": None, "amp_bf16": torch.bfloat16, "amp_fp16": torch.float16}[name]
    for seed in range(2):
        images, labels = window(16, seed)
        stepper.step((images, labels))
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss = nn.functional.cross_entropy(reference(images).float(), labels, reduction="sum") / 16
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert equal(copies(model.parameters()), copies(reference.parameters()))


# --- 4: one decision


def textbook(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    batch: tuple,
    clip: float,
) -> float:
    """The step as torch's AMP examples have it, with the right divisor; returns the norm."""
    images, labels = batch
    for part in (slice(0, 4), slice(4, 8)):
        with torch.autocast("cpu", dtype=torch.float16):
            outputs = model(images[part])
            loss = nn.functional.cross_entropy(outputs.float(), labels[part], reduction="sum") / len(images)
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return float(norm)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_law_4_bit_equal_to_torchs_gradscaler_where_clipping_is_inactive(kind: str) -> None:
    """Over clean windows, growth and a real overflow in float16."""
    ours, theirs = net(), net()
    stepper = trainer(ours, OPTIMIZERS[kind](ours.parameters()), precision="amp_fp16", scale=2.0**14)
    optimizer = OPTIMIZERS[kind](theirs.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=3)
    applied = []
    for seed in range(14):
        before = copies(theirs.parameters())
        scale = scaler.get_scale()
        norm = textbook(theirs, optimizer, scaler, window(8, seed), math.inf)
        result = stepper.step(window(8, seed))
        applied.append(result.applied)
        assert result.applied == (not equal(copies(theirs.parameters()), before)), f"window {seed}"
        assert result.loss_scale == scale
        assert result.grad_norm == norm or not result.applied
        assert equal(copies(ours.parameters()), copies(theirs.parameters())), f"window {seed}"
        assert stepper.precision.state_dict() == scaler.state_dict()
    assert False in applied, "no overflow happened: the test would show nothing"
    assert applied.count(True) > 5


@pytest.mark.parametrize("fused", [False, True])
def test_law_4_active_clipping_is_torchs_within_float32_rounding(fused: bool) -> None:
    """A clipped gradient is rounded at most three times instead of twice: 2^-24 each, relative.

    torch: coefficient to float32, product. Ours: 1 / coefficient to float32 and a quotient (fused), or a
    product with the float64 coefficient. After one step of SGD the update is lr times that, so the weights
    differ by at most 4 such roundings of the update, and one of the weight itself.
    """
    ours, theirs = net(), net()
    before = copies(theirs.parameters())
    sgd = {"lr": 0.5, "momentum": 0.0, "fused": fused}
    stepper = trainer(
        ours,
        torch.optim.SGD(ours.parameters(), **sgd),
        precision="amp_fp16",
        scale=256.0,
        max_grad_norm=0.05,
    )
    optimizer = torch.optim.SGD(theirs.parameters(), **sgd)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    norm = textbook(theirs, optimizer, scaler, window(8), 0.05)
    result = stepper.step(window(8))
    assert norm > 0.05, "clipping was not active"
    assert result.grad_norm == norm
    for mine, other, start in zip(ours.parameters(), theirs.parameters(), before, strict=True):
        update = (other - start).abs()
        assert ((mine - other).abs() <= 2**-22 * update + 2**-23 * other.abs()).all()


def test_law_4_the_norm_does_not_depend_on_the_loss_scale() -> None:
    norms = [
        trainer(net(), precision="amp_fp16", scale=scale).step(window(8)).grad_norm for scale in (1.0, 256.0)
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-2)  # float16 gradients have 11 bits


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("name", ["fp32", "amp_bf16", "amp_fp16"])
def test_law_4_a_non_finite_gradient_is_never_applied_and_applied_says_so(kind: str, name: str) -> None:
    model = net()
    stepper = trainer(model, OPTIMIZERS[kind](model.parameters()), precision=name)
    images, labels = window(8)
    images[3, 0, 0, 0] = math.nan
    before = copies(model.parameters())
    result = stepper.step((images, labels))
    assert (result.applied, result.found_inf) == (False, True)
    assert equal(copies(model.parameters()), before)
    assert stepper.step(window(8)).applied
    assert not equal(copies(model.parameters()), before)


def test_law_4_a_norm_past_float32_is_a_skip_for_the_scaler_too() -> None:
    """Finite gradients whose norm overflows: the one decision holds for the scaler as well."""
    model = nn.Linear(2, 1, bias=False)
    stepper = trainer(
        model,
        precision="amp_fp16",
        scale=4.0,
        loss=lambda outputs, targets: ((outputs.float() * 3e38).sum(), len(targets)),
    )
    with torch.no_grad():
        model.weight.fill_(0.1)
    # gradients of about 1e29 each by way of float32: their squares overflow
    stepper.forward = lambda model, batch: (model.weight.sum() * 1e-9, batch[1])
    result = stepper.step((torch.ones(4, 2), torch.zeros(4)))
    assert not result.applied
    assert stepper.precision.state_dict()["scale"] == 2.0


# --- 5: a skip moves nothing


@pytest.mark.parametrize("name", ["fp32", "amp_bf16", "amp_fp16"])
def test_law_5_a_skip_moves_nothing_but_the_scaler_and_the_counters(name: str) -> None:
    """All that could move is non-zero before: optimizer state, average, BatchNorm buffers, schedule."""
    model = net(batchnorm=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    average = WeightAverage(model, 0.9)
    stepper = trainer(
        model,
        optimizer,
        precision=name,
        average=average,
        schedule=Schedule("cosine", total_steps=20, warmup_fraction=0.2),
        growth_interval=100,
    )
    for seed in range(5):
        assert stepper.step(window(8, seed)).applied
    images, labels = window(8, 9)
    images[2] = math.inf  # makes the statistics NaN, too
    watched = {
        "weights": lambda: copies(model.parameters()),
        "buffers": lambda: copies(model.buffers()),
        "optimizer": lambda: copies(state_tensors(optimizer)),
        "average": lambda: copies(average.averages),
    }
    before = {key: read() for key, read in watched.items()}
    assert all(any(tensor.abs().sum() > 0 for tensor in tensors) for tensors in before.values())
    result = stepper.step((images, labels))
    assert not result.applied
    for key, read in watched.items():
        assert equal(read(), before[key]), key
    assert all(parameter.grad is None for parameter in model.parameters())
    state = stepper.state
    assert (state.step, state.optimizer_steps, state.skipped_steps, state.consecutive_skips) == (6, 5, 1, 1)
    if name == "amp_fp16":
        assert stepper.precision.state_dict()["scale"] == 512.0
        assert stepper.precision.state_dict()["_growth_tracker"] == 0
    following = stepper.step(window(8, 10))
    assert following.applied
    assert following.learning_rate == result.learning_rate, "the schedule went on over a skip"
    assert stepper.state.consecutive_skips == 0


def test_law_5_a_skip_equals_the_window_never_having_been() -> None:
    """fp32: what follows a skipped window is bit-equal to a training without it."""
    with_skip, without = net(batchnorm=True), net(batchnorm=True)
    first, second = trainer(with_skip), trainer(without)
    for seed in range(6):
        if seed == 3:
            images, labels = window(8, 50)
            images[0] = math.nan
            assert not first.step((images, labels)).applied
        first.step(window(8, seed))
        second.step(window(8, seed))
    assert equal(copies(with_skip.state_dict().values()), copies(without.state_dict().values()))


@settings(max_examples=20, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    bad=st.sets(st.integers(0, 5)),
    value=st.sampled_from([math.inf, -math.inf, math.nan]),
    name=st.sampled_from(["fp32", "amp_bf16", "amp_fp16"]),
)
def test_law_5_and_6_bad_windows_anywhere_might_as_well_not_have_been(
    sizes: list[int], bad: set[int], value: float, name: str
) -> None:
    """Of weights, buffers, optimizer state and average; in fp16 the scale moves, and with it their bits."""

    def trained(skip_bad: bool) -> tuple[Trainer, list[Tensor]]:
        model = net(batchnorm=True)
        average = WeightAverage(model, 0.9)
        stepper = trainer(
            model, precision=name, micro=3, average=average, schedule=Schedule("cosine", 8, 0.25)
        )
        for seed, size in enumerate(sizes):
            images, labels = window(size, seed)
            if seed in bad:
                images[seed % size, 0, 0, 0] = value
                if skip_bad:
                    continue
            assert stepper.step((images, labels)).applied == (seed not in bad)
        tensors = [*model.state_dict().values(), *average.averages, *state_tensors(stepper.optimizer)]
        return stepper, copies(tensors)

    (stepper, moved), (_, expected) = trained(False), trained(True)
    state = stepper.state
    assert state.step == len(sizes) == state.optimizer_steps + state.skipped_steps
    assert state.skipped_steps == len(bad & set(range(len(sizes))))
    assert all(torch.isfinite(tensor).all() for tensor in moved)
    if name != "amp_fp16":
        assert equal(moved, expected)


def test_law_5_a_buffer_that_is_replaced_and_not_written_is_restored() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(72, 5)
            self.register_buffer("seen", torch.ones(()))

        def forward(self, inputs: Tensor) -> Tensor:
            self.seen = self.seen + inputs.sum()
            return self.layer(inputs.flatten(1))

    model = Counting()
    stepper = trainer(model)
    images, labels = window(4)
    stepper.step((images, labels))
    before = model.seen.clone()
    stepper.step((images * math.nan, labels))
    assert torch.equal(model.seen, before)


# --- the average, empty windows, collapse, refusals


def test_the_average_moves_once_per_applied_window() -> None:
    model = net()
    average = WeightAverage(model, 0.5)
    stepper = trainer(model, average=average, micro=2)
    expected = copies(model.parameters())
    for seed in range(3):
        images, labels = window(8, seed)
        if seed == 1:
            images = images * math.nan
        if stepper.step((images, labels)).applied:
            expected = [
                0.5 * old + 0.5 * new for old, new in zip(expected, copies(model.parameters()), strict=True)
            ]
    assert distance(average.averages, expected) < 1e-6


def test_swapping_the_average_in_and_out_leaves_the_weights_as_they_were() -> None:
    model = net()
    average = WeightAverage(model, 0.9)
    trainer(model, average=average).step(window(8))
    before, averages = copies(model.parameters()), copies(average.averages)
    with average.swapped_in():
        assert equal(copies(model.parameters()), averages)
    assert equal(copies(model.parameters()), before)
    assert equal(copies(average.averages), averages)


def _nothing_counts(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return outputs.float().sum() * 0.0, torch.zeros(())


@pytest.mark.parametrize("name", ["fp32", "amp_fp16"])
@pytest.mark.parametrize("kind", ["no items", "no samples", "constant loss"])
def test_an_empty_window_is_counted_and_changes_nothing(name: str, kind: str) -> None:
    model = net()
    loss = {
        "no items": _nothing_counts,
        "no samples": CrossEntropy(),
        "constant loss": lambda outputs, targets: (torch.ones(()), len(targets)),
    }[kind]
    stepper = trainer(model, precision=name, loss=loss)
    before, scale = copies(model.parameters()), stepper.precision.state_dict()
    for _ in range(2):
        result = stepper.step(window(0 if kind == "no samples" else 6))
        assert (result.applied, result.found_inf) == (False, False)
    assert (stepper.state.step, stepper.state.empty_steps, stepper.state.skipped_steps) == (2, 2, 0)
    assert equal(copies(model.parameters()), before)
    assert stepper.precision.state_dict() == scale
    stepper.loss = CrossEntropy()
    assert stepper.step(window(6)).applied


def test_an_error_inside_a_window_leaves_no_gradient_behind() -> None:
    model, calls = net(), 0

    def failing(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("broken")
        return CrossEntropy()(outputs, targets)

    stepper = trainer(model, micro=4, loss=failing)
    with pytest.raises(RuntimeError, match="broken"):
        stepper.step(window(8))
    assert all(parameter.grad is None for parameter in model.parameters())
    reference = net()
    trainer(reference, micro=4).step(window(8))
    stepper.step(window(8))
    assert equal(copies(model.parameters()), copies(reference.parameters()))


@pytest.mark.parametrize(
    ("model", "name", "message"),
    [
        (lambda: net(dtype=torch.float16), "amp_fp16", r"remove \.half\(\)"),
        (lambda: net(dtype=torch.bfloat16), "amp_bf16", "master weights"),
        (lambda: net().requires_grad_(False), "fp32", "no trainable parameter"),
    ],
)
def test_what_cannot_be_trained_is_refused_at_construction(model, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trainer(model(), precision=name)


def test_a_parameter_in_two_groups_is_refused() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.param_groups.append(dict(optimizer.param_groups[0]))
    with pytest.raises(ValueError, match="twice"):
        trainer(model, optimizer)
