"""Where the bytes of a training step are: live tensors by component, counted operation by operation.

A ledger is a dispatch mode: it sees the result of every operation, on real or on fake tensors alike, and
books each new storage once (views share one) under the component that it belongs to, until the storage is
freed. What the peak consisted of, and which operation of which module made it, is kept.

| component | what is booked there |
| --- | --- |
| parameters, buffers, optimizer_state, average, inputs | what `know` was told of |
| gradients | a parameter's `.grad`, from its first accumulation to the window's end |
| cast_weights | half-precision copies of parameters, made by autocast |
| activations | all else that a forward made, and what it saved for the backward |
| temporaries | all else: the backward's and the optimizer's own tensors |

What savers move to the host's memory (engine.transfer.host_like) is counted apart, and is in no total.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from torch.utils.weak import WeakIdKeyDictionary

from pipeline.engine.transfer import allocating_on_host, stands_on_host

COMPONENTS = (
    "parameters",
    "buffers",
    "gradients",
    "optimizer_state",
    "average",
    "cast_weights",
    "activations",
    "temporaries",
    "inputs",
)
HOST = "host"  # no component: what stands in the host's memory on purpose
PHASES = ("forward", "backward", "step")
NEARBY = 4  # autograd nodes behind a module's output that are taken to be of that module


@dataclass(frozen=True)
class Peak:
    """The most bytes that were alive at once, and what they were."""

    total: int = 0
    components: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COMPONENTS, 0))
    phase: str = ""
    operation: str = ""  # "aten.mm.default"
    module: str = ""  # dotted name; "" outside of modules


class Ledger(TorchDispatchMode):
    """Counts while it is entered: bytes on the device, and floating point operations.

    round_to: bytes to which each storage is rounded up (CUDA: 512). device_type: tensors on another one are
    not counted.
    """

    def __init__(self, round_to: int = 1, device_type: str = "cpu") -> None:
        super().__init__()
        self.round_to = round_to
        self.device_type = device_type
        self.phase = "forward"
        self.module = ""
        self.operation = ""  # the last one that began
        self.live = dict.fromkeys(COMPONENTS, 0)
        self.highest = dict.fromkeys(COMPONENTS, 0)  # of each component, whenever that was
        self.host = self.host_peak = self.moved_to_host = 0
        self.flops = 0
        self.operations = 0  # in forward and backward
        self.peak = Peak()
        self.peaks = dict.fromkeys(PHASES, 0)  # of each phase
        self.events: list[tuple[int, int]] = []  # (number of the storage, bytes; negative when freed)
        self._numbers: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._booked: dict[int, tuple[str, int]] = {}
        self._references: dict[int, weakref.ref[Any]] = {}
        self._parameters: set[int] = set()
        self._count = 0

    @property
    def total(self) -> int:
        return sum(self.live.values())

    def know(self, component: str, tensors: Iterable[Tensor]) -> None:
        """Books tensors under a component, or moves them there."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            number = self._numbers.get(storage)
            if number is None:
                self._book(tensor, HOST if stands_on_host(tensor) else component)
            elif number in self._booked and self._booked[number][0] != HOST:
                before, size = self._booked[number]
                self._booked[number] = component, size
                self.live[before] -= size
                self._add(component, size)
            if component == "parameters":
                self._parameters.add(self._numbers[storage])

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Inside, gradients are told from other tensors, and the present module is known by its name."""
        with ExitStack() as stack:
            for parameter in model.parameters():
                if parameter.requires_grad:
                    hook = parameter.register_post_accumulate_grad_hook(self._on_gradient)
                    stack.callback(hook.remove)
            for name, module in model.named_modules():
                before, after = self._hooks(name)
                stack.callback(module.register_forward_pre_hook(before).remove)
                stack.callback(module.register_forward_hook(after).remove)
            yield

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = options or {}
        if operation is _device_of:  # asked of fake tensors alone, thirty times a parameter; no operation
            return arguments[0].device
        self.operation = str(operation)
        results = operation(*arguments, **options)
        self.operations += self.phase != "step"
        if (formula := FLOPS.get(operation.overloadpacket)) is not None:
            self.flops += formula(*arguments, **options, out_val=results)
        component = "activations" if self.phase == "forward" else "temporaries"
        if operation is torch.ops.aten._to_copy.default and self._is_parameter(arguments[0]):
            component = "cast_weights"
        for result in tree_leaves(results):
            if isinstance(result, Tensor) and result.untyped_storage() not in self._numbers:
                on_host = allocating_on_host() or stands_on_host(result)
                self._book(result, HOST if on_host else component)
        return results

    def _book(self, tensor: Tensor, component: str) -> None:
        storage = tensor.untyped_storage()
        number, self._count = self._count, self._count + 1
        size = -(-storage.nbytes() // self.round_to) * self.round_to
        self._numbers[storage] = number
        elsewhere = component != HOST and tensor.device.type != self.device_type
        if not size or elsewhere:
            return
        self._booked[number] = component, size
        self._references[number] = weakref.ref(storage, lambda _: self._free(number))
        if component == HOST:
            self.host += size
            self.host_peak = max(self.host_peak, self.host)
            self.moved_to_host += size
            return
        self.events.append((number, size))
        self._add(component, size)
        total = self.total
        self.peaks[self.phase] = max(self.peaks[self.phase], total)
        if total > self.peak.total:
            self.peak = Peak(total, dict(self.live), self.phase, self.operation, self.present_module())

    def _add(self, component: str, size: int) -> None:
        self.live[component] += size
        self.highest[component] = max(self.highest[component], self.live[component])

    def present_module(self) -> str:
        """The module whose forward runs, or whose node of the backward."""
        # what is recomputed in the backward is left in the middle, without a hook's notice
        return _module_of_backward() if self.phase == "backward" else self.module

    def _free(self, number: int) -> None:
        component, size = self._booked.pop(number)
        del self._references[number]
        if component == HOST:
            self.host -= size
            return
        self.live[component] -= size
        self.events.append((number, -size))

    def _is_parameter(self, tensor: Tensor) -> bool:
        return self._numbers.get(tensor.untyped_storage()) in self._parameters

    def _on_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.know("gradients", [parameter.grad])

    def _hooks(self, name: str) -> tuple[Any, Any]:
        outer: list[str] = []

        def before(module: nn.Module, inputs: Any) -> None:
            outer.append(self.module)
            self.module = name

        def after(module: nn.Module, inputs: Any, outputs: Any) -> None:
            self.module = outer.pop()
            for output in tree_leaves(outputs):
                if isinstance(output, Tensor) and output.grad_fn is not None:
                    _name_nodes(output.grad_fn, name, NEARBY)

        return before, after


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _attention_backward_flops(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape))


_device_of = torch.ops.prim.device.default
_aten: Any = torch.ops.aten
FLOPS = flop_registry | {  # torch's formulas (utils.flop_counter), and the attention of a CPU
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}


def _name_nodes(node: Any, module: str, depth: int) -> None:
    """Leaves the module's name with the autograd nodes that it made, for the backward to find."""
    if node is None or depth == 0 or "module" in node.metadata:
        return
    node.metadata["module"] = module
    for following, _ in node.next_functions:
        _name_nodes(following, module, depth - 1)


def _module_of_backward() -> str:
    node: Any = torch._C._current_autograd_node()
    return str(node.metadata.get("module", "")) if node is not None else ""
