"""The optimizer's state in host memory: the same update, and never more of it on the device than a bucket."""

from collections.abc import Callable, Iterable

import pytest
import torch
from blocky import PRECISIONS, Answered, blocky, fused_adamw, one_thread, saving_trainer, train  # noqa: F401
from nets import copies, equal, net, window
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pipeline.engine import allocate_state, keep_state_on_host, state_tensors
from pipeline.engine.optimizer import owned_parameters, parameter_groups
from pipeline.engine.transfer import stands_on_host
from pipeline.memory.ledger import Ledger
from pipeline.memory.trace import count_step

Optimizers = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizers] = {
    "adamw fused": fused_adamw,
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw plain": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False, amsgrad=True),
    "adam fused": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, fused=True),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, foreach=True),
    "sgd plain": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, dampening=0.1, foreach=False),
    "sgd without state": lambda p: torch.optim.SGD(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
}


def moments(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [tensor for tensor in state_tensors(optimizer) if tensor.ndim]


# --- the same result


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_update_is_the_same_bit_for_bit(name: str) -> None:
    """Over uneven micro-batches, clipping, dropout, BatchNorm and a skipped window."""
    plain = train(saving_trainer(blocky(), (), optimizer=OPTIMIZERS[name]))
    trainer = saving_trainer(blocky(), ["state"], optimizer=OPTIMIZERS[name])
    assert equal(train(trainer), plain)
    assert all(stands_on_host(tensor) for tensor in moments(trainer.optimizer))
    assert bool(moments(trainer.optimizer)) == (name != "sgd without state")


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "savers", [["state"], ["recompute", "state"], ["offload", "state"], ["recompute", "offload", "state"]]
)
def test_alone_and_with_the_other_savers_no_bit_changes(precision: str, savers: list[str]) -> None:
    plain = train(saving_trainer(blocky(), (), precision))
    assert equal(train(saving_trainer(blocky(), savers, precision)), plain)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["adamw fused", "adamw foreach", "sgd plain"])
@pytest.mark.parametrize("savers", [["state"], ["recompute", "offload", "state"]], ids="+".join)
def test_on_cuda_the_update_is_the_same_bit_for_bit(name: str, savers: list[str]) -> None:
    results = []
    for chosen in ([], savers):
        model = blocky().cuda()
        trainer = saving_trainer(model, chosen, "amp_fp16", optimizer=OPTIMIZERS[name], device="cuda")
        results.append([tensor.cpu() for tensor in train(trainer)])
    assert equal(*results)
    assert all(tensor.is_pinned() for tensor in moments(trainer.optimizer))


def test_groups_keep_their_options_and_a_schedule_moves_them() -> None:
    def grouped(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        first, *rest = parameters
        groups = [{"params": [first], "lr": 0.1}, {"params": rest, "weight_decay": 0.5}]
        return torch.optim.AdamW(groups, lr=1e-2, fused=True)

    def half(step: int) -> float:
        return 0.5**step

    plain = train(saving_trainer(blocky(), (), optimizer=grouped, schedule=half))
    assert equal(train(saving_trainer(blocky(), ["state"], optimizer=grouped, schedule=half)), plain)


@pytest.mark.parametrize("kept", [False, True], ids=["plain", "on the host"])
def test_a_scheduler_of_torch_works_on_it(kept: bool) -> None:
    optimizer = fused_adamw(net().parameters())
    if kept:
        keep_state_on_host(optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.005


def test_a_bare_grad_scaler_steps_it() -> None:
    """`grad_scale` and `found_inf` reach the fused kernel, whose own skip leaves all as it was."""
    results = []
    for kept in (False, True):
        model = net()
        optimizer = fused_adamw(model.parameters())
        if kept:
            keep_state_on_host(optimizer, bucket_bytes=1000)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for seed, spoiled in ((0, False), (1, True), (2, False)):
            images, labels = window(4, seed)
            scaler.scale(nn.functional.cross_entropy(model(images), labels)).backward()
            if spoiled:
                next(model.parameters()).grad[0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        results.append(copies([*model.parameters(), *state_tensors(optimizer)]))
    assert equal(*results)
    assert {float(state["step"]) for state in optimizer.state.values()} == {2.0}


# --- memory


def held(optimizer: torch.optim.Optimizer, work: Callable[[], object]) -> int:
    """The most bytes that something made on the device at once, besides what was there."""
    with Ledger() as ledger:
        for parameter in owned_parameters(optimizer):
            ledger.know("parameters", [parameter])
            ledger.know("gradients", [] if parameter.grad is None else [parameter.grad])
        ledger.know("optimizer_state", state_tensors(optimizer))
        before = ledger.total
        work()
    return ledger.peak.total - before


@pytest.mark.parametrize("limit", [1, 3000, 20_000, 10**9])
def test_no_more_than_a_bucket_is_on_the_device(limit: int) -> None:
    model = blocky()
    optimizer = fused_adamw(model.parameters())
    keep_state_on_host(optimizer, limit)
    sizes = [2 * parameter.nbytes for parameter in model.parameters()]
    gradients, counters = sum(sizes) // 2, 4 * len(sizes)
    largest = min(sum(sizes), max(limit, *sizes))
    assert held(optimizer, lambda: allocate_state(optimizer)) <= gradients + counters + largest
    assert len(moments(optimizer)) == 2 * len(sizes)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert 0 < held(optimizer, optimizer.step) <= largest


def test_state_that_is_there_already_is_moved() -> None:
    optimizer = fused_adamw(net().parameters())
    allocate_state(optimizer)
    keep_state_on_host(optimizer)
    assert moments(optimizer)
    assert all(stands_on_host(tensor) for tensor in moments(optimizer))
    assert not any(stands_on_host(tensor) for tensor in state_tensors(optimizer) if not tensor.ndim)


def test_a_window_does_not_hold_the_state() -> None:
    plain = saving_trainer(blocky(), ())
    streamed = saving_trainer(blocky(), ["state"])
    allocate_state(plain.optimizer)
    allocate_state(streamed.optimizer)
    state = sum(tensor.nbytes for tensor in moments(plain.optimizer))
    before, after = count_step(plain, window(8)), count_step(streamed, window(8))
    assert after.host == state
    assert after.peaks["forward"] == before.peaks["forward"] - state
    assert after.peak.total < before.peak.total - state // 2


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_step_on_fake_tensors_streams_the_state(precision: str) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        trainer = saving_trainer(blocky(), ["recompute", "offload", "state"], precision, kind=Answered)
        allocate_state(trainer.optimizer)
        for _ in range(2):
            images, labels = torch.randn(10, 2, 6, 6), torch.zeros(10, dtype=torch.int64)
            assert trainer.step((images, labels)).applied
        assert all(stands_on_host(tensor) for tensor in moments(trainer.optimizer))


# --- around the step


def test_hooks_and_a_closure_run_once_a_step() -> None:
    model, calls = net(), []
    optimizer = fused_adamw(model.parameters())
    keep_state_on_host(optimizer, bucket_bytes=1)

    def closure() -> str:
        calls.append("closure")
        model(window(4)[0]).sum().backward()
        return "loss"

    def before(optimizer: torch.optim.Optimizer, *_: object) -> None:
        calls.append(f"before {len(optimizer.param_groups[0]['params'])}")

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    assert optimizer.step(closure) == "loss"
    assert calls == [f"before {len(list(model.parameters()))}", "closure", "after"]


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    model = net()
    optimizer = fused_adamw(model.parameters())
    keep_state_on_host(optimizer)
    rest = list(model.parameters())[1:]
    for parameter in rest:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert set(optimizer.state) == set(rest)


@pytest.mark.parametrize("name", ["adamw fused", "adamw plain", "sgd fused"])
@pytest.mark.parametrize("allocated", [False, True], ids=["new", "allocated"])
@pytest.mark.parametrize(("saves", "loads"), [(True, True), (True, False), (False, True)])
def test_a_saved_state_continues_bit_for_bit(name: str, allocated: bool, saves: bool, loads: bool) -> None:
    """Between trainings with the state on the host and without, either way."""

    def made(kept: bool, weights: dict[str, Tensor] | None = None):
        model = net()
        if weights:
            model.load_state_dict(weights)
        return saving_trainer(model, ["state"] if kept else (), optimizer=OPTIMIZERS[name])

    first = made(saves)
    for seed in range(2):
        first.step(window(8, seed))
    weights = {key: value.clone() for key, value in first.model.state_dict().items()}
    saved = first.optimizer.state_dict()
    saved["state"] = {
        key: {one: value.clone() for one, value in state.items()} for key, state in saved["state"].items()
    }
    second = made(loads, weights)
    if allocated and name != "adamw plain":
        allocate_state(second.optimizer)
    second.optimizer.load_state_dict(saved)
    assert all(stands_on_host(tensor) == loads for tensor in moments(second.optimizer))
    for trainer in (first, second):
        trainer.step(window(8, 2))
    assert equal(
        copies([*first.model.parameters(), *state_tensors(first.optimizer)]),
        copies([*second.model.parameters(), *state_tensors(second.optimizer)]),
    )


def test_loading_never_has_the_whole_state_on_the_device() -> None:
    model = blocky()
    saved = torch.optim.AdamW(model.parameters())
    allocate_state(saved)
    loaded = saved.state_dict()
    for state in loaded["state"].values():  # of another dtype, so that a CPU has to make copies too
        state["exp_avg"] = state["exp_avg"].double()
        state["exp_avg_sq"] = state["exp_avg_sq"].double()
    optimizer = fused_adamw(model.parameters())
    keep_state_on_host(optimizer)
    largest = max(parameter.nbytes for parameter in model.parameters())
    counters = 4 * len(loaded["state"])
    assert held(optimizer, lambda: optimizer.load_state_dict(loaded)) <= 2 * largest + counters


@pytest.mark.parametrize("failing", range(4))
def test_a_failure_in_a_bucket_leaves_the_optimizer_whole(failing: int) -> None:
    model = net()
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.1), lr=1e-2)
    keep_state_on_host(optimizer, bucket_bytes=1)
    allocate_state(optimizer)
    groups = optimizer.param_groups
    owned = owned_parameters(optimizer)
    for parameter in owned:
        parameter.grad = torch.ones_like(parameter)
    owned[failing].grad = owned[failing].grad.to_sparse()
    with pytest.raises(RuntimeError, match="sparse gradients"):
        optimizer.step()
    assert optimizer.param_groups is groups
    assert all(one is other for one, other in zip(owned_parameters(optimizer), owned, strict=True))
    assert all(stands_on_host(tensor) for tensor in moments(optimizer))
    owned[failing].grad = torch.ones_like(owned[failing])
    optimizer.step()
    assert all(stands_on_host(tensor) for tensor in moments(optimizer))


@pytest.mark.parametrize(
    ("make", "bucket", "message"),
    [
        (lambda p: torch.optim.LBFGS(p), 1, "LBFGS: its state cannot be kept on the host"),
        (lambda p: torch.optim.SGD(p, lr=0.1), 0, "bucket_bytes=0 must be at least 1"),
    ],
)
def test_what_cannot_be_streamed_is_refused(make: Optimizers, bucket: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        keep_state_on_host(make(net().parameters()), bucket)


def test_it_is_put_in_place_once() -> None:
    optimizer = fused_adamw(net().parameters())
    keep_state_on_host(optimizer)
    with pytest.raises(ValueError, match="and once"):
        keep_state_on_host(optimizer)
