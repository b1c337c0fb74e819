"""Optimizers as the step wants them: fused, decayed where decay belongs, their state allocated early."""

import fnmatch
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

OPTIMIZERS = ("adamw", "sgd")
STATE_STARTS_AT_ZERO = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RAdam)


def build_optimizer(
    model: nn.Module, name: str, *, lr: float, weight_decay: float = 0.0, momentum: float = 0.9
) -> torch.optim.Optimizer:
    """AdamW, or SGD with Nesterov-free `momentum`, on the trainable parameters of `model`; fused.

    Norms and biases (parameters of fewer than two axes) get no weight decay: they do not grow the
    function's complexity, and decaying them costs accuracy (He et al., "Bag of Tricks", 2019).
    Raises ValueError for another name and for a model without a trainable parameter.
    """
    groups = parameter_groups(model, weight_decay)
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=lr, fused=True)
    if name == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=momentum, fused=True)
    raise ValueError(f"optimizer {name!r}: choose one of {', '.join(OPTIMIZERS)}")


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups, decayed and not; an empty one is left out. Frozen parameters are in none."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise ValueError("the model has no trainable parameter: all are frozen, or it has none")
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def freeze(model: nn.Module, patterns: Iterable[str]) -> list[str]:
    """Freezes the parameters whose dotted names match a pattern ("encoder.layers.*"); returns the names.

    Patterns are those of the shell (fnmatch). Raises ValueError for one that matches no parameter. A frozen
    BatchNorm still takes its statistics from the data, unless its module is in evaluation mode.
    """
    named = dict(model.named_parameters())
    frozen: list[str] = []
    for pattern in patterns:
        matching = fnmatch.filter(named, pattern)
        if not matching:
            raise ValueError(
                f"freeze: {pattern!r} matches no parameter; the first are {', '.join(list(named)[:5])}"
            )
        frozen += matching
    for name in frozen:
        named[name].requires_grad_(False)
    return list(dict.fromkeys(frozen))


def owned_parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters an optimizer moves, over all its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def base_rates(optimizer: torch.optim.Optimizer) -> list[float]:
    """Each group's learning rate before any schedule, kept as `initial_lr` as torch's schedulers do."""
    return [group.setdefault("initial_lr", float(group["lr"])) for group in optimizer.param_groups]


def set_rate(group: dict[str, Any], rate: float) -> None:
    """Some optimizers have the learning rate as a tensor, on the CPU, and compile for that very one."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def check_trainable(optimizer: torch.optim.Optimizer, device: torch.device, *, half: bool) -> None:
    """Raises ValueError, with the fix, for parameters that cannot be trained; `half`: float16 ones may be."""
    owned = owned_parameters(optimizer)
    if len({id(parameter) for parameter in owned}) < len(owned):
        raise ValueError(
            "a parameter is in the optimizer twice and would be updated twice a step: put it into one group"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS evaluates the loss again in its step: it cannot be accumulated and scaled")
    trainable = [parameter for parameter in owned if parameter.requires_grad]
    if not trainable:
        raise ValueError(
            "the optimizer holds no trainable parameter: all are frozen, so nothing can be learned; set "
            "requires_grad on those that should be, before the optimizer is made"
        )
    halves = {parameter.dtype for parameter in trainable} & {torch.float16, torch.bfloat16}
    if halves and not half:
        raise ValueError(
            f"mixed precision needs float32 master weights, and the model's are {halves.pop()}: remove "
            ".half() or .to(dtype); autocast chooses the dtype of each operation"
        )
    elsewhere = {parameter.device.type for parameter in trainable} - {device.type}
    if elsewhere:
        raise ValueError(
            f"the model is on {elsewhere.pop()} and precision on {device.type}: move the model before the "
            "optimizer is made"
        )


def state_tensors(optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    """Every tensor of the optimizer's state; of quantised ones, what they are made of."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                yield from _parts(value)


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _parts(getattr(tensor, name))


@torch.no_grad()
def allocate_state(optimizer: torch.optim.Optimizer, *, starts_at_zero: bool = False) -> None:
    """Makes the optimizer's state before the first window, so that its memory is taken from the start.

    Otherwise it appears in the first update, after the largest activations were seen to fit, and an
    out-of-memory error there cannot be replayed. One step with zero gradients, at a learning rate and
    weight decay of 0, moves no weight and leaves every moment at 0; its count is set back. starts_at_zero:
    says so of an optimizer that is not torch's. Raises ValueError for one of which it is not known to hold.
    """
    damped = any(group.get("dampening") for group in optimizer.param_groups)
    if not starts_at_zero and (type(optimizer) not in STATE_STARTS_AT_ZERO or damped):
        raise ValueError(
            f"{type(optimizer).__name__}: a step with zero gradients may leave something in its state; let "
            "it make its state itself, in its first step"
        )
    parameters = owned_parameters(optimizer)
    settings = [(float(group["lr"]), group["weight_decay"]) for group in optimizer.param_groups]
    gradients = [parameter.grad for parameter in parameters]
    try:
        for group in optimizer.param_groups:
            set_rate(group, 0.0)
            group["weight_decay"] = 0.0
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        for state in optimizer.state.values():
            if isinstance(state.get("step"), Tensor):
                state["step"].zero_()
    finally:
        for group, (rate, decay) in zip(optimizer.param_groups, settings, strict=True):
            set_rate(group, rate)
            group["weight_decay"] = decay
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
