"""Evaluation metrics of a classifier, from torchmetrics, over batches of logits in float32."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassCalibrationError,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MulticlassPrecision,
    MulticlassRecall,
)

CALIBRATION_BINS = 15  # Guo et al., "On Calibration of Modern Neural Networks", 2017


@dataclass(frozen=True)
class Evaluation:
    """scalars: loss, accuracy, macro_f1, expected_calibration_error and, past five classes, top5_accuracy.

    confusion: (C, C) counts, row the true class, column the predicted one. per_class: a row a class.
    """

    scalars: dict[str, float]
    confusion: list[list[int]]
    per_class: list[dict[str, Any]]


def evaluate(batches: Iterable[tuple[Tensor, Tensor]], classes: list[str]) -> Evaluation:
    """Metrics over all batches of (logits (N, C), labels (N,)); top-5 only where it can be missed."""
    count = len(classes)
    metrics: dict[str, Any] = {
        "accuracy": MulticlassAccuracy(count, average="micro"),
        "macro_f1": MulticlassF1Score(count, average="macro"),
        "expected_calibration_error": MulticlassCalibrationError(count, n_bins=CALIBRATION_BINS),
        "precision": MulticlassPrecision(count, average=None),
        "recall": MulticlassRecall(count, average=None),
        "f1": MulticlassF1Score(count, average=None),
        "confusion": MulticlassConfusionMatrix(count),
    }
    if count > 5:
        metrics["top5_accuracy"] = MulticlassAccuracy(count, average="micro", top_k=5)
    collection = MetricCollection(metrics, compute_groups=False)
    total, samples = 0.0, 0
    for logits, labels in batches:
        logits, labels = logits.float().cpu(), labels.cpu()
        total += F.cross_entropy(logits, labels, reduction="sum").item()
        samples += len(labels)
        collection.update(logits.softmax(1), labels)
    values = collection.compute()
    names = ("accuracy", "top5_accuracy", "macro_f1", "expected_calibration_error")
    scalars = {"loss": total / samples} | {name: float(values[name]) for name in names if name in values}
    confusion = values["confusion"].tolist()
    per_class = [
        {
            "class": name,
            "precision": float(values["precision"][index]),
            "recall": float(values["recall"][index]),
            "f1": float(values["f1"][index]),
            "images": sum(confusion[index]),
        }
        for index, name in enumerate(classes)
    ]
    return Evaluation(scalars, confusion, per_class)


@torch.no_grad()
def logits(model: torch.nn.Module, windows: Iterable[dict[str, Tensor]], transform: Any) -> Iterable[Any]:
    """(logits, labels) of each window, in float32, the model in evaluation mode."""
    device = next(model.parameters()).device
    model.eval()
    for window in windows:
        yield model(transform(window["images"].to(device))), window["labels"]
