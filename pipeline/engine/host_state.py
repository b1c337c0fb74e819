"""The optimizer's state in host memory, streamed through the device once a window.

Adam's moments take twice the memory of the weights, all through a window, and are touched once at its end.
Here they stand in host memory. The update goes over the parameters bucket by bucket: a bucket's state is
copied to the device, the optimizer's own step runs on the bucket alone, the state is copied back. No more
than one bucket's state is on the device at a time, also when it is made and when it is loaded.

This is exact for optimizers that update each parameter from its own gradient and state: they do the same on
some parameters as on all. (Others, which keep a norm or a count over all of them, are refused.)

On CUDA host memory is pinned and all copies are enqueued on the computing stream: their order is that of
the program, and nothing waits for them on the host. Only who reads the state there has to: `state_dict`
does, and who looks into `optimizer.state` itself must call `torch.cuda.synchronize` first.
"""

import itertools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pipeline.engine.optimizer import owned_parameters
from pipeline.engine.transfer import host_like, stands_on_host

# At some 10 GB/s between host and device a bucket takes milliseconds, a launch microseconds; and against what
# does not fit where this is needed, it is little.
BUCKET_BYTES = 64 * 2**20
STATES_EXPECTED = 2  # tensors of a parameter's size, before there is a state to look at: Adam's
SEPARABLE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
)

Hosts = dict[tuple[int, str], Tensor]  # by the id of the parameter and the name


def keep_state_on_host(optimizer: Optimizer, bucket_bytes: int = BUCKET_BYTES) -> None:
    """Moves the optimizer's state to host memory and lets its step stream it, from now on.

    bucket_bytes: of state on the device at a time; a parameter with more is a bucket of its own. Counters
    (0-dim) stay where they are. Hooks on the step run once a step. Call it before `allocate_state` and before
    a scheduler of torch's is made. Raises ValueError for an optimizer whose parameters cannot be updated one
    by one, and for one whose `step` something else has replaced.
    """
    if type(optimizer) not in SEPARABLE:
        names = ", ".join(kind.__name__ for kind in SEPARABLE)
        raise ValueError(
            f"{type(optimizer).__name__}: its state cannot be kept on the host, as it is not known to update "
            f"each parameter by itself; use one of {names}"
        )
    if "step" in vars(optimizer):
        raise ValueError("the optimizer has a step of its own: keep its state on the host first, and once")
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes={bucket_bytes} must be at least 1")
    plain: Any = vars(type(optimizer).step)["__wrapped__"]  # without the hooks that torch puts around it

    def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, parameters in _buckets(optimizer, bucket_bytes):
            with _on_device(optimizer, parameters), _alone(optimizer, group, parameters):
                plain(optimizer)
        return loss

    hooked = Optimizer.profile_hook_step(step)
    optimizer.step = types.MethodType(hooked, optimizer)  # type: ignore[method-assign]
    loading = _Loading()
    optimizer.register_state_dict_pre_hook(_synchronise)
    optimizer.register_load_state_dict_pre_hook(loading.take_out)
    optimizer.register_load_state_dict_post_hook(loading.put_in)
    _to_host(optimizer, owned_parameters(optimizer), {})


def _buckets(optimizer: Optimizer, limit: int) -> Iterator[tuple[dict[str, Any], list[Tensor]]]:
    """Parameters that have a gradient, in their order and each within one group."""
    for group in optimizer.param_groups:
        bucket: list[Tensor] = []
        filled = 0
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            size = _state_bytes(optimizer, parameter)
            if bucket and filled + size > limit:
                yield group, bucket
                bucket, filled = [], 0
            bucket.append(parameter)
            filled += size
        if bucket:
            yield group, bucket


def _state_bytes(optimizer: Optimizer, parameter: Tensor) -> int:
    if state := optimizer.state.get(parameter):
        return sum(value.nbytes for value in state.values() if _streams(value))
    return STATES_EXPECTED * parameter.nbytes


def _streams(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0


@contextmanager
def _alone(optimizer: Optimizer, group: dict[str, Any], parameters: list[Tensor]) -> Iterator[None]:
    """Inside, the optimizer has these parameters alone, with the options of their group."""
    groups = optimizer.param_groups
    optimizer.param_groups = [{**group, "params": parameters}]
    try:
        yield
    finally:
        optimizer.param_groups = groups


@contextmanager
def _on_device(optimizer: Optimizer, parameters: list[Tensor]) -> Iterator[None]:
    """Inside, the state of these parameters is beside them; afterwards on the host, also after an error."""
    hosts: Hosts = {}
    try:
        for parameter in parameters:
            state = optimizer.state.get(parameter, {})
            for name, value in state.items():
                if _streams(value):
                    copy = torch.empty_like(value, device=parameter.device)
                    state[name] = copy.copy_(value, non_blocking=True)
                    hosts[id(parameter), name] = value
        yield
    finally:
        _to_host(optimizer, parameters, hosts)


def _to_host(optimizer: Optimizer, parameters: list[Tensor], hosts: Hosts) -> None:
    """Moves what is on the device to its place in host memory, or to a new one."""
    for parameter in parameters:
        state = optimizer.state.get(parameter, {})
        for name, value in state.items():
            if _streams(value) and not stands_on_host(value):
                host = hosts.get((id(parameter), name))
                state[name] = (host_like(value) if host is None else host).copy_(value, non_blocking=True)


def _synchronise(optimizer: Optimizer) -> None:
    """Whoever takes the state from the host finds what the last step left there."""
    for device in {parameter.device for parameter in owned_parameters(optimizer)}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


class _Loading:
    """Around load_state_dict, which would move the whole state to the parameters' device.

    What streams is taken out of what torch loads, and put on the host tensor by tensor. By way of the device,
    for the dtype and the pinned memory that a step would have given it.
    """

    def __init__(self) -> None:
        self.loaded: dict[str, Any] = {}

    def take_out(self, optimizer: Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
        self.loaded = loaded
        rest = {
            key: {name: value for name, value in state.items() if not _streams(value)}
            for key, state in loaded["state"].items()
        }
        return {**loaded, "state": rest}

    @torch.no_grad()
    def put_in(self, optimizer: Optimizer) -> None:
        _synchronise(optimizer)
        groups = self.loaded["param_groups"]
        keys = itertools.chain.from_iterable(group["params"] for group in groups)
        for key, parameter in zip(keys, owned_parameters(optimizer), strict=True):
            for name, value in self.loaded["state"].get(key, {}).items():
                if _streams(value):
                    moved = optimizer._process_value_according_to_param_policy(
                        parameter, value, key, groups, name
                    )
                    optimizer.state[parameter][name] = host_like(moved).copy_(moved, non_blocking=True)
        self.loaded = {}
