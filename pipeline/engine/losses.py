"""Losses as the step wants them: the sum over a micro-batch's items, and their count.

A mean over a micro-batch cannot be put together again to the mean over the window unless its count is
known. So a loss here is a callable `loss(outputs, targets) -> (sum, count)`: the window adds up both and
divides once. Items are what the loss counts: samples, unmasked tokens, labelled pixels, class weights.

`count` is an int, or a 0-dim tensor where it depends on the data (it is then never read on the way).
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NOTHING_IGNORED = -(2**62)  # torch always ignores one index; this one is no label

Loss: TypeAlias = Callable[..., tuple[Tensor, int | Tensor]]

# what `reduction="mean"` of these divides by is the number of elements, or of rows (KLDivLoss batchmean)
ELEMENTWISE = (
    nn.BCELoss,
    nn.BCEWithLogitsLoss,
    nn.GaussianNLLLoss,
    nn.HuberLoss,
    nn.KLDivLoss,
    nn.L1Loss,
    nn.MSELoss,
    nn.PoissonNLLLoss,
    nn.SmoothL1Loss,
    nn.SoftMarginLoss,
)


def in_float32(tensor: Tensor) -> Tensor:
    """Half-precision outputs as float32: a sum in float16 overflows at 65,504. float64 stays."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


class CrossEntropy:
    """Softmax cross entropy, summed; over a window, the mean that torch's CrossEntropyLoss gives.

    outputs: (N, C) or (N, C, ...) logits; targets: class indices (N,) or (N, ...), or probabilities of the
    outputs' shape. Items: the targets that are not `ignore_index`, each counting its class's weight
    (class_weights: C numbers); for probabilities the samples (or pixels).
    """

    def __init__(
        self,
        label_smoothing: float = 0.0,
        class_weights: Sequence[float] | Tensor | None = None,
        ignore_index: int | None = None,
    ) -> None:
        self.label_smoothing = label_smoothing
        self.class_weights = None if class_weights is None else torch.as_tensor(class_weights).float()
        self.ignore_index = ignore_index

    def __call__(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, int | Tensor]:
        outputs = in_float32(outputs)
        weights = self._weights_like(outputs)
        total = F.cross_entropy(
            outputs,
            targets,
            weight=weights,
            ignore_index=NOTHING_IGNORED if self.ignore_index is None else self.ignore_index,
            reduction="sum",
            label_smoothing=self.label_smoothing,
        )
        if targets.is_floating_point():
            return total, outputs.numel() // outputs.shape[1]
        if self.ignore_index is None and weights is None:
            return total, targets.numel()
        counted = torch.ones_like(targets, dtype=torch.bool)
        if self.ignore_index is not None:
            counted = targets != self.ignore_index
        if weights is None:
            return total, counted.sum()
        return total, (weights[targets.where(counted, 0)] * counted).sum()

    def _weights_like(self, outputs: Tensor) -> Tensor | None:
        """The class weights where the outputs are: moved once, as a copy to the device would wait."""
        weights = self.class_weights
        if weights is not None and (weights.device, weights.dtype) != (outputs.device, outputs.dtype):
            weights = self.class_weights = weights.to(outputs.device, outputs.dtype)
        return weights


class MeanSquaredError:
    """Squared error, summed; items are elements. outputs and targets: tensors of one shape."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        check_same_shape(outputs, targets)
        return F.mse_loss(in_float32(outputs), targets, reduction="sum"), outputs.numel()


def check_same_shape(outputs: Tensor, targets: Tensor) -> None:
    if outputs.shape != targets.shape:
        raise ValueError(
            f"outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)} must have one shape: "
            "broadcasting would count elements that are not there"
        )


def as_loss(loss: Any) -> Loss:
    """A loss that keeps the contract, from torch's own criteria; any other callable as it is.

    Criteria with `reduction="mean"` are taken where it is known what their mean divides by, so that the
    window's mean is exact. Raises ValueError for torch's others, with what to write instead. A subclass
    may compute something else: it has to keep the contract itself.
    """
    kind = type(loss)
    if kind.__module__ != "torch.nn.modules.loss":
        return cast(Loss, loss)
    if kind is nn.CrossEntropyLoss and loss.reduction == "mean":
        return CrossEntropy(loss.label_smoothing, loss.weight, loss.ignore_index)
    if kind in ELEMENTWISE and loss.reduction in ("mean", "batchmean"):
        summed, by_rows = copy.copy(loss), loss.reduction == "batchmean"
        summed.reduction = "sum"

        def elementwise(outputs: Tensor, targets: Tensor, *more: Any) -> tuple[Tensor, int]:
            check_same_shape(outputs, targets)
            total = summed(in_float32(outputs), targets, *more)
            return total, outputs.shape[0] if by_rows else outputs.numel()

        return elementwise
    raise ValueError(
        f"{kind.__name__}(reduction={loss.reduction!r}) does not tell how many items it averaged over, "
        "so means of micro-batches cannot be put together exactly: give a function that returns "
        "(sum over the items, number of items), for example lambda outputs, targets: "
        f"({kind.__name__}(reduction='sum')(outputs, targets), len(targets))"
    )


def checked(value: Any) -> tuple[Tensor, int | Tensor]:
    """What a loss returned, if it keeps the contract; else ValueError with what it should return."""
    if isinstance(value, tuple) and len(value) == 2:
        total, count = value
        if isinstance(total, Tensor) and total.numel() == 1 and isinstance(count, int | Tensor):
            if isinstance(count, Tensor):  # in half precision a sum of counts stops at 256 or 2,048
                count = count.detach().double().reshape(())
            return in_float32(total if total.ndim == 0 else total.reshape(())), count
    got = (
        f"{type(value).__name__} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    )
    raise ValueError(
        f"a loss returns (sum over the items, number of items), not {got:.80}; a mean over a micro-batch "
        "does not tell how many items it is of. Where each sample counts alike, return "
        "(criterion(outputs, targets) * len(targets), len(targets))"
    )
