"""Why a training collapsed: one replay of the window with hooks that look at every tensor.

The step itself reads one number from the device and knows only that something was not finite. After the
last window of a collapsed run there is time to look: forward hooks see the outputs of each module in the
order of computation, tensor hooks the gradients in the order of the backward. What comes first is named.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.engine.window import Batch, tensors

NAMED = 8  # sample ids and scales in the message; the rest is in the diagnosis


@dataclass(frozen=True)
class Finding:
    """The first tensor that was not finite: "input", "output", "loss", "gradient" or "nothing"."""

    kind: str
    module: str = ""  # dotted name and class: "layer4.1.conv2 (Conv2d)"
    doubtful: bool = False  # -inf alone, which masks leave on purpose

    def __str__(self) -> str:
        return {
            "input": "the window's input was not finite before the model saw it",
            "output": f"the loss went first, in the forward: the output of {self.module}",
            "loss": "the loss went first: the model's outputs were finite, their loss was not",
            "gradient": f"a gradient went first, the loss was finite: of {self.module}",
            "nothing": "a replay of the window was finite, so it hung on random masks, or on the norm itself",
        }[self.kind]


@dataclass(frozen=True)
class Diagnosis:
    """What is known of a collapse; `as_dict` is made for a JSON file."""

    step: int
    first: Finding
    sample_ids: list[Any]  # of the window
    micro_batch_ids: list[Any]  # of the micro-batch in which it was found; [] where nothing was
    scale_history: list[tuple[int, float]]  # (step, the loss scale from that step on), the last changes

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"explanation": str(self.first)}

    def __str__(self) -> str:
        ids = self.micro_batch_ids or self.sample_ids
        scales = ", ".join(f"{scale:g} from step {step}" for step, scale in self.scale_history[-NAMED:])
        return (
            f"First not finite: {self.first}. Samples of that micro-batch: {_few(ids)}. Loss scale: {scales}."
        )


def _few(ids: Sequence[Any]) -> str:
    shown = ", ".join(str(one) for one in ids[:NAMED])
    return f"{shown} and {len(ids) - NAMED} more" if len(ids) > NAMED else shown


def first_nonfinite(
    model: nn.Module,
    batch: Batch,
    forward: Callable[[Batch], Tensor],
    backward: Callable[[Tensor], None],
) -> Finding:
    """Runs one micro-batch through `forward`, to its loss, and `backward`; returns what was not finite first.

    The gradients that this leaves in `.grad` are the caller's to clear.
    """
    if any(not _is_finite(tensor) for tensor in tensors(batch)):
        return Finding("input")
    with _watching(model) as found:
        loss = forward(batch)
        if _is_finite(loss):
            found.clear()  # -inf in masked logits, say: it did no harm
        elif not found:
            return Finding("loss")
        if not found and loss.requires_grad:
            backward(loss)
    return _first(found) if found else Finding("nothing")


@contextmanager
def _watching(model: nn.Module) -> Iterator[list[Finding]]:
    """Collects findings in their order, by hooks that are gone afterwards."""
    found: list[Finding] = []

    def on_gradient(label: str) -> Callable[[Tensor], None]:
        return lambda gradient: None if _is_finite(gradient) else found.append(Finding("gradient", label))

    def on_output(label: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, outputs: Any) -> None:
            for tensor in _tensors_in(outputs):
                if not _is_finite(tensor):
                    negative = not torch.isnan(tensor).any() and not torch.isposinf(tensor).any()
                    found.append(Finding("output", label, doubtful=negative))
                elif tensor.requires_grad:
                    tensor.register_hook(on_gradient(f"the output of {label}"))

        return hook

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            label = f"{name or 'the model'} ({type(module).__name__})"
            hooks.callback(module.register_forward_hook(on_output(label)).remove)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                hooks.callback(parameter.register_hook(on_gradient(f"the parameter {name}")).remove)
        hooks.enter_context(torch.compiler.set_stance("force_eager"))  # compiled code runs no new hooks
        yield found


def _first(found: list[Finding]) -> Finding:
    return next((finding for finding in found if not finding.doubtful), found[0])


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def _tensors_in(outputs: Any) -> list[Tensor]:
    """The tensors of a module's output, which may hold other things too."""
    if isinstance(outputs, Tensor):
        return [outputs]
    if isinstance(outputs, dict):
        outputs = list(outputs.values())
    if isinstance(outputs, tuple | list):
        return [tensor for part in outputs for tensor in _tensors_in(part)]
    return []
