"""One optimizer step over one window: exact accumulation, one decision, and a skip that moves nothing.

    save buffers -> for each micro-batch: forward, backward -> unscale -> norm -> one read -> update or skip

The backward of each micro-batch starts from 1 / samples of the *window*, so that the gradients add up to
that of the whole window at once, however it is split. Where the loss counts other items (tokens, pixels,
class weights), their number is known only at the end. Until then a power of two near the items of a sample
stands for it, as the last window had them, so that the loss scale means what it means in torch; then one
factor puts it right, and goes into the update together with the clipping. Nothing is read from the device
until the norm is known. Then a single transfer brings the norm, the loss, the items and the scaler's state,
and one value, whether the norm is finite, decides everything that follows: the weights, the buffers, the
average, the schedule, the counters and the scaler.
"""

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeline.engine.averaging import WeightAverage
from pipeline.engine.batchnorm import BatchNormStatistics
from pipeline.engine.buffers import Buffers
from pipeline.engine.diagnosis import Diagnosis, Finding, first_nonfinite
from pipeline.engine.distributed import Ranks
from pipeline.engine.losses import Loss, as_loss, checked
from pipeline.engine.optimizer import base_rates, check_trainable, owned_parameters, set_rate
from pipeline.engine.precision import Precision
from pipeline.engine.state import TrainState
from pipeline.engine.transfer import on_device
from pipeline.engine.window import Batch, micro_batches, samples

SCALE_CHANGES_KEPT = 100


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


class _Reading(NamedTuple):
    """The window's numbers on the host; `norm` is of the gradients of the mean over samples."""

    loss_sum: float
    items: float
    samples: int
    norm: float
    scale: float
    tracker: float


class CollapseError(RuntimeError):
    """Training has gone wrong for good: the loss scale fell under its floor, or too many skips in a row."""

    def __init__(self, message: str, diagnosis: Diagnosis) -> None:
        super().__init__(message)
        self.diagnosis = diagnosis


def supervised(model: nn.Module, batch: Batch) -> tuple[Any, ...]:
    """The default `forward`: a batch is (inputs, targets), the loss gets (outputs, targets)."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise ValueError(
            f"a window is expected to be (inputs, targets), not {type(batch).__name__}: give Trainer a "
            "forward=lambda model, batch: (…what the loss takes…)"
        )
    inputs, targets = batch
    return model(inputs), targets


def positions(window: Batch) -> Iterable[int]:
    """The default `sample_ids`: where in the window a sample stands."""
    return range(samples(window))


class Trainer:
    """Takes optimizer steps, one per window.

    model, optimizer: yours; the optimizer holds float32 master weights (float64 is fine in fp32).
    loss: `loss(*forward(model, micro_batch)) -> (sum over items, number of items)`, see engine.losses; of
        torch's criteria those that average in a known way.
    schedule: factor on each group's first learning rate, from the number of applied steps; without one
        the learning rates are left to you.
    max_grad_norm: limit of the gradient's 2-norm over the optimizer's parameters; 0 is without.
    batchnorm_per_window: BatchNorm's running statistics as if the window were one batch.
    max_consecutive_skips: so many skipped windows in a row are a collapse; so many whose loss depends on
        no parameter of the optimizer are an error.
    sample_ids: names of a window's samples, for the diagnosis of a collapse.
    Raises ValueError, with what to do, for what cannot be trained as asked.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss | nn.Module,
        *,
        precision: Precision,
        micro_batch_size: int,
        max_grad_norm: float = 0.0,
        schedule: Callable[[int], float] | None = None,
        average: WeightAverage | None = None,
        forward: Callable[[nn.Module, Batch], tuple[Any, ...]] = supervised,
        batchnorm_per_window: bool = True,
        max_consecutive_skips: int = 50,
        sample_ids: Callable[[Batch], Iterable[Any]] = positions,
    ) -> None:
        check_trainable(optimizer, precision.device, half=precision.name == "fp32")
        if not max_grad_norm >= 0:
            raise ValueError(f"max_grad_norm={max_grad_norm} must be at least 0; 0 is without clipping")
        if min(micro_batch_size, max_consecutive_skips) < 1:
            raise ValueError(
                f"micro_batch_size={micro_batch_size} and max_consecutive_skips={max_consecutive_skips} must "
                "be at least 1"
            )
        self.model = model
        self.optimizer = optimizer
        self.loss = as_loss(loss)
        self.precision = precision
        self.micro_batch_size = micro_batch_size
        self.max_grad_norm = max_grad_norm
        self.schedule = schedule
        self.average = average or WeightAverage(model, 0.0)
        self.forward = forward
        self.max_consecutive_skips = max_consecutive_skips
        self.sample_ids = sample_ids
        self.state = TrainState()
        self._assumed_items = 1.0  # per sample, in the present window
        self.unlearnable = 0  # windows in a row
        self._parameters = list(model.parameters())
        self.ranks = Ranks(model)
        self.replayable = True  # the window that is being trained on, from its start: nothing has moved yet
        self.scale_history: deque[tuple[int, float]] = deque(maxlen=SCALE_CHANGES_KEPT)
        self._statistics = BatchNormStatistics(model, batchnorm_per_window)
        self._buffers = Buffers(model, steady=self._statistics.buffers)

    def step(self, window: Batch) -> StepResult:
        """Trains on one window; raises CollapseError when training cannot go on."""
        started = time.perf_counter()
        self.replayable = True
        rate = self._set_learning_rate()
        self._buffers.save()
        self._clear_gradients()  # what something else left there is not of this window
        try:
            result = self._attempt(window, started, rate)
        except BaseException:
            self._buffers.restore()
            self.precision.forget(self.optimizer)
            raise
        finally:
            self._clear_gradients()
        if result.applied:
            self._statistics.apply()
            self.average.update()
        else:
            self._buffers.restore()
        self._check_collapse(result, window)
        return result

    def forget(self) -> None:
        """Drops what windows leave to each other to save time; the next one allocates as a first one does."""
        self._statistics.forget()

    def _attempt(self, window: Batch, started: float, rate: float) -> StepResult:
        of_ranks = self.ranks.total(samples(window), self.precision.device)
        try:
            losses, items = self._accumulate(window, of_ranks)
        except Exception as error:
            self.ranks.finish(error, self.precision.device)
            raise
        self.ranks.finish(None, self.precision.device)
        gradients = [p.grad for p in owned_parameters(self.optimizer) if p.grad is not None]
        if gradients:
            self.precision.unscale(self.optimizer)
        read = self._read(losses, gradients, items, of_ranks)
        self.replayable = False
        empty = not gradients or read.items == 0
        # the gradients are divided by samples * items_per_sample; a mean over items is wanted
        factor = 1.0 if empty else read.samples * self._assumed_items / read.items
        norm = read.norm * factor
        applied = not empty and math.isfinite(norm)
        if applied:
            self.precision.apply(self.optimizer, gradients, factor * self._clipping(norm))
        if empty:
            self.precision.forget(self.optimizer)
        else:
            self.precision.update(self.optimizer, applied=applied)
        self.state.count(read.samples, applied=applied, empty=empty)
        if read.items > 0:
            self.state.items_per_sample = _power_of_two(read.items / read.samples)
            self._check_learnable(has_gradients=bool(gradients))
        return StepResult(
            step=self.state.step,
            applied=applied,
            found_inf=not empty and not applied,
            loss=read.loss_sum / read.items if read.items else 0.0,
            grad_norm=0.0 if empty else norm,
            loss_scale=read.scale,
            growth_tracker=int(read.tracker),
            learning_rate=rate,
            samples=read.samples,
            micro_batch_size=self.micro_batch_size,
            seconds=time.perf_counter() - started,
        )

    def _accumulate(self, window: Batch, total: int | Tensor) -> tuple[list[Tensor], int | Tensor]:
        """Adds the window's gradients up in `.grad`; returns the micro-batches' losses and the items.

        total: samples of the window, over all ranks (whose gradients DDP averages).
        """
        losses: list[Tensor] = []
        items: int | Tensor = 0
        seed: Tensor | None = None
        batches = micro_batches(window, self.micro_batch_size)
        with self._statistics.window(), self.precision.autocast():
            for index, batch in enumerate(on_device(batches, self.precision.device), start=1):
                with self.ranks.accumulating(last=index == len(batches)):
                    with self._statistics.micro_batch():
                        loss, count = checked(self.loss(*self.forward(self.model, batch)))
                    if loss.requires_grad:  # a constant loss has no gradient to add
                        if seed is None:
                            self._assumed_items = self._items_of_a_sample(count, batch)
                            divisor = total * self._assumed_items / self.ranks.size
                            seed = self.precision.seed(loss, divisor)
                        self.precision.backward(loss, seed)
                losses.append(loss.detach())
                items = items + count
        return losses, items

    def _items_of_a_sample(self, count: int | Tensor, batch: Batch) -> float:
        """A power of two, alike on all ranks: of the last window, or of the first micro-batch there is."""
        known = self.state.items_per_sample
        if known or isinstance(count, Tensor) or count <= 0 or self.ranks.size > 1:
            return known or 1.0
        return _power_of_two(count / samples(batch))

    def _read(
        self, losses: list[Tensor], gradients: list[Tensor], items: int | Tensor, total: int | Tensor
    ) -> _Reading:
        """Brings what the decision needs to the host, summed over the ranks where there are several."""
        loss = torch.stack(losses).sum() if losses else torch.zeros((), device=self.precision.device)
        norm = _norm(gradients) if gradients else torch.zeros_like(loss)
        counted = isinstance(items, Tensor) or self.ranks.size > 1
        sums = [loss] + ([_as_tensor(items, loss.device)] if counted else [])
        summed = self.ranks.sum(torch.stack([value.detach().double() for value in sums]))
        others = [norm, *self.precision.scale_and_tracker()] + ([total] if isinstance(total, Tensor) else [])
        packed = torch.cat([summed, torch.stack([value.double() for value in others])])
        loss_sum, *rest = self.read_device(packed)
        return _Reading(
            loss_sum=loss_sum,
            items=rest.pop(0) if counted else float(items),
            samples=int(rest.pop()) if isinstance(total, Tensor) else total,
            norm=rest.pop(0),
            scale=rest.pop(0) if rest else 1.0,
            tracker=rest.pop(0) if rest else 0.0,
        )

    def read_device(self, packed: Tensor) -> list[float]:
        """The one device-to-host read of an optimizer step. Whoever runs it on fake tensors answers here."""
        values: list[float] = packed.tolist()
        return values

    def _clipping(self, norm: float) -> float:
        """The coefficient of torch.nn.utils.clip_grad_norm_, from a norm that is known and finite."""
        return min(1.0, self.max_grad_norm / (norm + 1e-6)) if self.max_grad_norm else 1.0

    def _set_learning_rate(self) -> float:
        if self.schedule is None:
            return float(self.optimizer.param_groups[0]["lr"])
        factor = self.schedule(self.state.optimizer_steps)
        for group, base in zip(self.optimizer.param_groups, base_rates(self.optimizer), strict=True):
            set_rate(group, base * factor)
        return float(base_rates(self.optimizer)[0] * factor)

    def _clear_gradients(self) -> None:
        """Of the model's parameters too: what the optimizer does not own gathers gradients as well."""
        for parameter in itertools.chain(owned_parameters(self.optimizer), self._parameters):
            parameter.grad = None

    def _check_learnable(self, *, has_gradients: bool) -> None:
        """A window may have a constant loss; a training whose windows all have is a mistake."""
        self.unlearnable = 0 if has_gradients else self.unlearnable + 1
        if self.unlearnable >= self.max_consecutive_skips:
            raise RuntimeError(
                f"in {self.unlearnable} windows in a row the loss depended on none of the optimizer's "
                "parameters: is the optimizer of this very model, are the outputs detached, is the step "
                "taken under torch.no_grad()?"
            )

    def _check_collapse(self, result: StepResult, window: Batch) -> None:
        if not self.scale_history or self.scale_history[-1][1] != result.loss_scale:
            self.scale_history.append((result.step, result.loss_scale))
        if not result.found_inf:
            return
        settings = self.precision.settings
        next_scale = result.loss_scale * settings.backoff_factor
        if self.precision.scales and next_scale < settings.min_scale:
            reason = f"the loss scale would fall to {next_scale:g}, under its floor {settings.min_scale:g}"
        elif self.state.consecutive_skips >= self.max_consecutive_skips:
            reason = f"{self.state.consecutive_skips} windows in a row were skipped"
        else:
            return
        diagnosis = self._diagnose(result, window)
        raise CollapseError(
            f"training collapsed at step {result.step}: {reason}. {diagnosis} The weights are those of "
            f"optimizer step {self.state.optimizer_steps}. Try a lower learning rate, more warm-up, or "
            "amp_bf16 or fp32, and look at these samples.",
            diagnosis,
        )

    def _diagnose(self, result: StepResult, window: Batch) -> Diagnosis:
        """One replay of the window, micro-batch by micro-batch, up to the first tensor that is not finite."""
        ids = [one.item() if isinstance(one, Tensor) else one for one in self.sample_ids(window)]
        found, start, here = Finding("nothing"), 0, []
        seed = result.loss_scale / (result.samples * self._assumed_items)
        self._buffers.save()
        with self._statistics.window(), self.precision.autocast():
            for batch in on_device(micro_batches(window, self.micro_batch_size), self.precision.device):
                with self.ranks.accumulating(last=False):  # each rank looks at its own part
                    found = first_nonfinite(
                        self.model,
                        batch,
                        lambda batch: checked(self.loss(*self.forward(self.model, batch)))[0],
                        lambda loss: self.precision.backward(loss, torch.full_like(loss, seed)),
                    )
                here = ids[start : start + samples(batch)]
                start += samples(batch)
                if found.kind != "nothing":
                    break
        self._clear_gradients()
        self._buffers.restore()
        return Diagnosis(
            result.step, found, ids, here if found.kind != "nothing" else [], list(self.scale_history)
        )


def _norm(gradients: list[Tensor]) -> Tensor:
    """The 2-norm over all gradients: the bits of torch.nn.utils.get_total_norm, without its sorting."""
    device = gradients[0].device
    halves = gradients[0].dtype in (torch.float16, torch.bfloat16)  # their norm would overflow at 65,504
    norms = torch._foreach_norm(gradients, 2, torch.float32) if halves else torch._foreach_norm(gradients)
    return torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]))


def _power_of_two(value: float) -> float:
    """The nearest one: a product with it changes no bit but the exponent."""
    return 2.0 ** round(math.log2(value))


def _as_tensor(value: float | Tensor, device: torch.device) -> Tensor:
    return value if isinstance(value, Tensor) else torch.full((), value, device=device)
