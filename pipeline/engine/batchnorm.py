"""BatchNorm's running statistics as if the window had been one batch.

torch moves them once per micro-batch: with accumulation over K micro-batches they would forget K times as
fast, would count K batches, and an overflow in float16 would leave them NaN for ever. Here they stand still
during a window. Each training forward puts its batch's mean and variance into scratch rows, which are
merged as the micro-batches come (Chan, Golub and LeVeque, 1979), so that mean and variance are those of the
whole window, between micro-batches included. An applied window then moves the running statistics once; a
skipped one does not. A recomputed forward (activation checkpointing) changes nothing, a forward in
evaluation mode inside a step sees the statistics from before the window, and `momentum=None`, for which
torch reads the device at each forward, needs no read.

The batch statistics that normalise a micro-batch are that micro-batch's own: no method of accumulation
changes that (see engine.dependence).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import UninitializedBuffer

KEPT_COUNTS = 64
Counts = tuple[int, ...]  # elements a channel, for each layer; 0 where a layer was not called


class BatchNormStatistics:
    """The running statistics of all BatchNorm layers of `model`, moved once per applied window.

    Layers that subclass BatchNorm with a forward of their own are left to themselves, and with
    `per_window=False` all are: their statistics then move with every micro-batch.
    """

    def __init__(self, model: nn.Module, per_window: bool = True) -> None:
        layers = [layer for layer in _batchnorms(model) if per_window and _is_handled(layer)]
        layers = [layer for layer in layers if _like(layer) == _like(layers[0])]  # they share vectors
        self.layers = [_Layer(layer, index, self) for index, layer in enumerate(layers)]
        self._sizes = [layer.num_features for layer in layers]
        self._open = False
        self._calls: list[int] = []  # of each layer in the present micro-batch
        self._rows: list[_Row] = []  # the present micro-batch's, one for each time a layer is called
        self._pools: list[_Pool] = []
        self._columns: dict[tuple[Counts, torch.device], Tensor] = {}

    @property
    def buffers(self) -> list[Tensor]:
        """The buffers that only `apply` moves."""
        return [buffer for layer in self.layers for buffer in layer.buffers]

    @contextmanager
    def window(self) -> Iterator[None]:
        """Inside, training forwards leave the running statistics alone."""
        self._pools = []
        try:
            for layer in self.layers:
                layer.divert()
            yield
        finally:
            self._open = False
            for layer in self.layers:
                layer.release()

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Around one micro-batch's forward; forwards elsewhere in the window are not counted."""
        self._calls, self._rows, self._open = [0] * len(self.layers), [], True
        yield
        self._open = False
        for index, row in enumerate(self._rows):
            if index == len(self._pools):
                self._pools.append(_Pool(self._columns_of))
            self._pools[index].merge(row)

    @torch.no_grad()
    def apply(self) -> None:
        """Moves the running statistics, once for each time a layer was called on the window."""
        for pool in self._pools:
            called = [layer for layer in self.layers if pool.counts[layer.index]]
            dtype, _ = _like(self.layers[0].layer)
            means = pool.mean.to(dtype).split(self._sizes)
            variances = (pool.squares / (pool.columns - 1)).to(dtype).split(self._sizes)
            for layer in called:
                layer.move(means[layer.index], variances[layer.index])

    def forget(self) -> None:
        """Drops what one window leaves for the next to save time."""
        self._columns.clear()

    def slot(self, index: int, elements: int) -> tuple[Tensor, Tensor]:
        """Where the layer's next forward puts its mean and variance."""
        if not self._open:
            return _Row(self.layers, self._sizes).slots[index]
        call = self._calls[index]
        self._calls[index] += 1
        if call == len(self._rows):
            self._rows.append(_Row(self.layers, self._sizes))
        self._rows[call].counts[index] = elements
        return self._rows[call].slots[index]

    def _columns_of(self, counts: Counts, device: torch.device) -> Tensor:
        """The counts as one float64 number a channel; kept, as they are the same in most windows."""
        key = counts, device
        if key not in self._columns:
            columns = [count for count, size in zip(counts, self._sizes, strict=True) for _ in range(size)]
            if len(self._columns) >= KEPT_COUNTS:  # inputs of ever other lengths
                self._columns.clear()
            self._columns[key] = torch.tensor(columns, dtype=torch.float64).to(device, non_blocking=True)
        return self._columns[key]


def _batchnorms(model: nn.Module) -> list[_BatchNorm]:
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


def _is_handled(layer: _BatchNorm) -> bool:
    if isinstance(layer.running_mean, UninitializedBuffer):
        raise ValueError(
            f"{type(layer).__name__} does not know its size yet: run one forward of the model first"
        )
    plain = type(layer).forward is _BatchNorm.forward and "forward" not in vars(layer)
    return plain and layer.running_mean is not None


def is_diverted(module: nn.Module) -> bool:
    """Whether a window is open in which the module's training forwards leave its running statistics alone."""
    return isinstance(getattr(vars(module).get("forward"), "__self__", None), _Layer)


def _like(layer: _BatchNorm) -> tuple[torch.dtype, torch.device]:
    assert layer.running_mean is not None
    return layer.running_mean.dtype, layer.running_mean.device


class _Layer:
    """One BatchNorm layer, whose forward goes to scratch rows while it is diverted."""

    def __init__(self, layer: _BatchNorm, index: int, statistics: BatchNormStatistics) -> None:
        self.layer, self.index, self.statistics = layer, index, statistics

    @property
    def buffers(self) -> list[Tensor]:
        return [buffer for buffer in self.layer._buffers.values() if buffer is not None]

    def divert(self) -> None:
        self.layer.__dict__["forward"] = self.forward

    def release(self) -> None:
        self.layer.__dict__.pop("forward", None)

    def forward(self, inputs: Tensor) -> Tensor:
        layer = self.layer
        if not (layer.training and layer.track_running_stats):
            return _BatchNorm.forward(layer, inputs)
        layer._check_input_dim(inputs)
        mean, variance = self.statistics.slot(self.index, inputs.numel() // inputs.shape[1])
        # momentum 1: the rows receive the batch's own mean and (unbiased) variance
        return F.batch_norm(inputs, mean, variance, layer.weight, layer.bias, True, 1.0, layer.eps)

    def move(self, mean: Tensor, variance: Tensor) -> None:
        layer = self.layer
        tracked, momentum = layer.num_batches_tracked, layer.momentum
        assert layer.running_mean is not None
        assert layer.running_var is not None
        if tracked is not None:
            tracked.add_(1)
        weight: float | Tensor = 0.0 if momentum is None else momentum
        if momentum is None and tracked is not None:  # a mean over all windows
            weight = 1 / tracked.to(mean.dtype)
        layer.running_mean += (mean - layer.running_mean) * weight
        layer.running_var += (variance - layer.running_var) * weight


class _Row:
    """The statistics of one call of each layer, side by side in two vectors."""

    def __init__(self, layers: list[_Layer], sizes: list[int]) -> None:
        dtype, device = _like(layers[0].layer)
        self.mean, self.variance = torch.zeros(2, sum(sizes), dtype=dtype, device=device).unbind()
        self.slots = list(zip(self.mean.split(sizes), self.variance.split(sizes), strict=True))
        self.counts = [0] * len(sizes)


class _Pool:
    """Mean and sum of squared deviations over the rows merged so far."""

    def __init__(self, columns_of: Callable[[Counts, torch.device], Tensor]) -> None:
        self._columns_of = columns_of
        self.counts: Counts = ()

    @torch.no_grad()
    def merge(self, row: _Row) -> None:
        counts = tuple(row.counts)
        columns = self._columns_of(counts, row.mean.device)
        squares = row.variance * (columns - 1).clamp(min=0)  # 0 where a layer was not called
        if not self.counts:
            self.counts, self.columns, self.mean, self.squares = counts, columns, row.mean.double(), squares
            return
        self.counts = tuple(a + b for a, b in zip(self.counts, counts, strict=True))
        before, self.columns = self.columns, self._columns_of(self.counts, row.mean.device)
        difference = row.mean - self.mean
        share = columns / self.columns.clamp(min=1)
        self.mean += difference * share
        self.squares += squares + difference.square() * before * share
