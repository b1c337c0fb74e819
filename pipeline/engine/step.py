"""One optimizer step over one window: exact accumulation, one decision, and a skip that moves nothing.

    clear -> for each micro-batch: forward, backward -> unscale -> norm -> one read -> clip, update or skip

Each micro-batch's summed loss is divided by the samples of the *window* before its backward, so that the
gradients add up to that of the whole window at once, however it is split; where the loss counts other
items (tokens, pixels), one factor, samples / items, puts that right at the end. Nothing is read from the
device until the norm is known. Then a single transfer brings the norm, the loss, the items and the
scaler's state, and one value, whether the norm is finite, decides everything that follows: the weights,
the buffers, the average, the schedule, the counters and the scaler.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.engine.averaging import WeightAverage
from pipeline.engine.losses import Loss, checked
from pipeline.engine.optimizer import owned_parameters
from pipeline.engine.precision import Precision
from pipeline.engine.state import TrainState
from pipeline.engine.window import Batch, micro_batches, samples, to_device


@dataclass(frozen=True)
class StepResult:
    """What one window did. `loss` and `grad_norm` may be non-finite when it was not applied."""

    step: int  # windows attempted, this one included
    applied: bool  # whether the weights moved
    found_inf: bool  # the unscaled gradient, or its norm, held an inf or NaN
    loss: float  # mean over the window's items
    grad_norm: float  # after unscaling, before clipping
    loss_scale: float  # the one used in this window; 1 without a scaler
    growth_tracker: int  # clean steps since the scale last changed, before this window
    learning_rate: float  # of the first parameter group
    samples: int
    micro_batch_size: int  # samples of the largest micro-batch allowed
    seconds: float


class CollapseError(RuntimeError):
    """Training has gone wrong for good: the loss scale fell under its floor, or too many skips in a row."""


def supervised(model: nn.Module, batch: Batch) -> tuple[Any, ...]:
    """The default `forward`: a batch is (inputs, targets), the loss gets (outputs, targets)."""
    inputs, targets = batch
    return model(inputs), targets


class Trainer:
    """Takes optimizer steps, one per window.

    model, optimizer: yours; the optimizer holds float32 master weights (float64 is fine in fp32).
    loss: `loss(*forward(model, micro_batch)) -> (sum over items, number of items)`, see engine.losses.
    schedule: factor on each group's learning rate, from the number of applied steps.
    max_grad_norm: limit of the gradient's 2-norm over the optimizer's parameters; 0 is without.
    Raises ValueError, with what to do, for a model or optimizer that cannot be trained as asked.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        *,
        precision: Precision,
        micro_batch_size: int,
        max_grad_norm: float = 0.0,
        schedule: Callable[[int], float] = lambda optimizer_steps: 1.0,
        average: WeightAverage | None = None,
        forward: Callable[[nn.Module, Batch], tuple[Any, ...]] = supervised,
    ) -> None:
        _check_trainable(optimizer, precision)
        self.model = model
        self.optimizer = optimizer
        self.loss = loss
        self.precision = precision
        self.micro_batch_size = micro_batch_size
        self.max_grad_norm = max_grad_norm
        self.schedule = schedule
        self.average = average or WeightAverage(model, 0.0)
        self.forward = forward
        self.state = TrainState()
        self._parameters = owned_parameters(optimizer)
        self._base_rates = [float(group["lr"]) for group in optimizer.param_groups]
        self._buffers = [
            (module._buffers, name)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def step(self, window: Batch) -> StepResult:
        """Trains on one window; raises CollapseError when training cannot go on."""
        started = time.perf_counter()
        buffers = [_SavedBuffer(owner, name) for owner, name in self._buffers]
        rate = self._set_learning_rate()
        try:
            result = self._attempt(window, started, rate)
        finally:
            self.optimizer.zero_grad(set_to_none=True)
        if result.applied:
            self.average.update()
        else:
            for buffer in buffers:
                buffer.restore()
        self._check_collapse(result)
        return result

    def _attempt(self, window: Batch, started: float, rate: float) -> StepResult:
        total = samples(window)
        loss_sum, items = self._accumulate(window, total)
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if gradients:
            self.precision.unscale(self.optimizer)
            _normalise(gradients, total, items)
        loss, norm, count, scale, tracker = self._read(loss_sum, gradients, items)
        empty = not gradients or count == 0
        applied = not empty and math.isfinite(norm)
        if applied:
            _clip(gradients, norm, self.max_grad_norm)
            self.optimizer.step()
        if empty:
            self.precision.forget(self.optimizer)
        else:
            self.precision.update(self.optimizer, applied=applied)
        self.state.count(total, applied=applied, empty=empty)
        return StepResult(
            step=self.state.step,
            applied=applied,
            found_inf=not empty and not applied,
            loss=loss / count if count else 0.0,
            grad_norm=0.0 if empty else norm,
            loss_scale=scale,
            growth_tracker=int(tracker),
            learning_rate=rate,
            samples=total,
            micro_batch_size=self.micro_batch_size,
            seconds=time.perf_counter() - started,
        )

    def _accumulate(self, window: Batch, total: int) -> tuple[Tensor, int | Tensor]:
        """Adds the window's gradients up in `.grad`; returns the loss's sum and count, on the device."""
        device = self.precision.device
        loss_sum: Tensor = torch.zeros((), device=device)
        items: int | Tensor = 0
        for batch in micro_batches(window, self.micro_batch_size):
            batch = to_device(batch, device)
            with self.precision.autocast():
                loss, count = checked(self.loss(*self.forward(self.model, batch)))
            if loss.requires_grad:  # a constant loss has no gradient to add
                self.precision.backward(loss / total)
            loss_sum = loss_sum + loss.detach()
            items = items + count
        return loss_sum, items

    def _read(
        self, loss_sum: Tensor, gradients: list[Tensor], items: int | Tensor
    ) -> tuple[float, float, float, float, float]:
        """Loss sum, gradient norm, items, loss scale and growth tracker, as numbers."""
        device = loss_sum.device
        norm = torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros((), device=device)
        count = items if isinstance(items, Tensor) else torch.full((), items, device=device)
        packed = [loss_sum, norm, count, *self.precision.scale_and_tracker()]
        # The one device-to-host read of an optimizer step.
        values = torch.stack([tensor.detach().to(device, torch.float64) for tensor in packed]).tolist()
        loss, norm_value, count_value, scale, tracker = values
        return loss, norm_value, count_value, scale, tracker

    def _set_learning_rate(self) -> float:
        factor = self.schedule(self.state.optimizer_steps)
        for group, base in zip(self.optimizer.param_groups, self._base_rates, strict=True):
            group["lr"] = base * factor
        return self._base_rates[0] * factor

    def _check_collapse(self, result: StepResult) -> None:
        if not result.found_inf:
            return
        settings = self.precision.settings
        next_scale = result.loss_scale * settings.backoff_factor
        first = "its gradient" if math.isfinite(result.loss) else "the loss"
        if self.precision.scales and next_scale < settings.min_scale:
            reason = f"the loss scale would fall to {next_scale:g}, under its floor {settings.min_scale:g}"
        elif self.state.consecutive_skips >= settings.max_consecutive_skips:
            reason = f"{self.state.consecutive_skips} windows in a row were skipped"
        else:
            return
        raise CollapseError(
            f"training collapsed at step {result.step}: {reason}. In the last window {first} was not finite "
            f"(loss {result.loss:g}, loss scale {result.loss_scale:g}). The weights are those of optimizer "
            f"step {self.state.optimizer_steps}. Try a lower learning rate, more warm-up, or amp_bf16 or "
            "fp32, and look for broken samples."
        )


def _check_trainable(optimizer: torch.optim.Optimizer, precision: Precision) -> None:
    parameters = [parameter for parameter in owned_parameters(optimizer) if parameter.requires_grad]
    if not parameters:
        raise ValueError(
            "the optimizer holds no trainable parameter: all are frozen, so nothing can be learned"
        )
    half = {parameter.dtype for parameter in parameters} & {torch.float16, torch.bfloat16}
    if half and precision.name != "fp32":
        raise ValueError(
            f"precision {precision.name} needs float32 master weights, and the model's are {half.pop()}: "
            "remove .half() or .to(dtype); autocast chooses the dtype of each operation"
        )
    elsewhere = {parameter.device.type for parameter in parameters} - {precision.device.type}
    if elsewhere:
        raise ValueError(
            f"the model is on {elsewhere.pop()} and precision on {precision.device.type}: "
            "move the model before the optimizer is made"
        )


@torch.no_grad()
def _normalise(gradients: list[Tensor], total: int, items: int | Tensor) -> None:
    """From the sum over items divided by samples to the mean over items; nothing where both are equal."""
    if isinstance(items, Tensor):
        factor = total / items.double()  # an integer count would give a float32 quotient
        torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))
    elif items not in (0, total):
        torch._foreach_mul_(gradients, total / items)


@torch.no_grad()
def _clip(gradients: list[Tensor], norm: float, max_norm: float) -> None:
    """As torch.nn.utils.clip_grad_norm_, from a norm that is known and finite."""
    coefficient = max_norm / (norm + 1e-6) if max_norm else 1.0
    if coefficient < 1.0:
        torch._foreach_mul_(gradients, coefficient)


class _SavedBuffer:
    """A buffer as it stood before the window, the object and its value."""

    def __init__(self, owner: dict[str, Tensor | None], name: str) -> None:
        self.owner, self.name = owner, name
        buffer = owner[name]
        assert buffer is not None
        self.buffer, self.value = buffer, buffer.clone()

    @torch.no_grad()
    def restore(self) -> None:
        """Puts both back: a skipped forward may have made the statistics NaN."""
        self.buffer.copy_(self.value)
        self.owner[self.name] = self.buffer
