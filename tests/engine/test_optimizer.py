import pytest
import torch
from nets import copies, equal, net, trainer, window

from pipeline.engine import allocate_state, build_optimizer, freeze, state_tensors


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_allocating_the_state_early_changes_no_bit(name: str) -> None:
    """Training with the state made beforehand equals training with it made at the first step."""
    early, late = net(), net()
    first = build_optimizer(early, name, lr=1e-2, weight_decay=0.1)
    second = build_optimizer(late, name, lr=1e-2, weight_decay=0.1)
    before = copies(early.parameters())
    allocate_state(first)
    assert equal(copies(early.parameters()), before)
    assert any(True for _ in state_tensors(first))
    assert all(float(tensor.abs().sum()) == 0.0 for tensor in state_tensors(first))
    assert [group["lr"] for group in first.param_groups] == [1e-2, 1e-2]
    one, two = trainer(early, first), trainer(late, second)
    for seed in range(4):
        one.step(window(8, seed))
        two.step(window(8, seed))
    assert equal(copies(early.parameters()), copies(late.parameters()))
    assert equal(copies(state_tensors(first)), copies(state_tensors(second)))


def test_norms_and_biases_are_not_decayed_and_frozen_parameters_are_in_no_group() -> None:
    model = net()
    model[0].requires_grad_(False)
    optimizer = build_optimizer(model, "adamw", lr=1e-3, weight_decay=0.1)
    decayed, plain = optimizer.param_groups
    assert [p.shape for p in decayed["params"]] == [torch.Size([5, 128])]
    assert {p.ndim for p in plain["params"]} == {1}
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert not owned & {id(p) for p in model[0].parameters()}


def test_a_model_without_trainable_parameters_and_an_unknown_name_are_refused() -> None:
    with pytest.raises(ValueError, match="no trainable parameter"):
        build_optimizer(net().requires_grad_(False), "adamw", lr=1e-3)
    with pytest.raises(ValueError, match="adamw, sgd"):
        build_optimizer(net(), "adam", lr=1e-3)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_the_optimizers_are_fused(name: str) -> None:
    assert all(group["fused"] for group in build_optimizer(net(), name, lr=1e-3).param_groups)


def test_freezing_by_pattern_names_what_it_froze_and_refuses_what_matches_nothing() -> None:
    model = net()
    assert freeze(model, ["0.*", "1.bias", "1.b*"]) == ["0.weight", "0.bias", "1.bias"]
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, False, True, True]
    with pytest.raises(ValueError, match=r"'encoder\.\*' matches no parameter; the first are 0\.weight"):
        freeze(model, ["encoder.*"])


def test_a_frozen_part_stays_and_the_rest_learns() -> None:
    model = net()
    freeze(model, ["0.*"])
    frozen, free = copies(model[0].parameters()), copies(model[4].parameters())
    trainer(model, build_optimizer(model, "adamw", lr=1e-2)).step(window(8))
    assert equal(copies(model[0].parameters()), frozen)
    assert not equal(copies(model[4].parameters()), free)


def test_parameters_that_the_optimizer_does_not_own_gather_no_gradient() -> None:
    model = net()
    trainer(model, torch.optim.SGD(model[4].parameters(), lr=0.1)).step(window(8))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_group_that_joins_later_is_trained_at_its_own_rate() -> None:
    model = net()
    optimizer = torch.optim.SGD(model[4].parameters(), lr=0.1)
    stepper = trainer(model, optimizer, schedule=lambda steps: 0.5)
    stepper.step(window(8))
    optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})
    before = copies(model[0].parameters())
    stepper.step(window(8))
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.005]
    assert not equal(copies(model[0].parameters()), before)
