import numpy as np
import pytest
import sklearn.metrics as oracle
import torch

from pipeline import metrics


def batches(classes: int, sizes: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(classes)
    logits = torch.randn(sum(sizes), classes, generator=generator) * 3
    labels = torch.randint(0, classes, (sum(sizes),), generator=generator)
    return list(zip(logits.split(sizes), labels.split(sizes), strict=True))


def test_the_metrics_are_those_of_scikit_learn() -> None:
    given = batches(7, [10, 10, 3])
    names = [f"class {index}" for index in range(7)]
    result = metrics.evaluate(given, names)
    logits, labels = (torch.cat(parts).numpy() for parts in zip(*given, strict=True))
    probabilities = torch.from_numpy(logits).softmax(1).numpy()
    predicted, every = logits.argmax(1), range(7)
    expected = {
        "accuracy": oracle.accuracy_score(labels, predicted),
        "macro_f1": oracle.f1_score(labels, predicted, average="macro", labels=every, zero_division=0),
        "top5_accuracy": oracle.top_k_accuracy_score(labels, logits, k=5, labels=every),
        "loss": oracle.log_loss(labels, probabilities.astype(np.float64), labels=every),
        "expected_calibration_error": calibration_error(probabilities, labels),
    }
    assert result.scalars == pytest.approx(expected, rel=1e-5)
    assert result.confusion == oracle.confusion_matrix(labels, predicted, labels=every).tolist()
    precision, recall, f1, support = oracle.precision_recall_fscore_support(
        labels, predicted, labels=every, zero_division=0
    )
    for index, row in enumerate(result.per_class):
        assert row["class"] == names[index]
        assert row["images"] == support[index]
        found = (row["precision"], row["recall"], row["f1"])
        assert found == pytest.approx((precision[index], recall[index], f1[index]), abs=1e-6)


def calibration_error(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """Guo et al.'s definition, by hand: 15 equal bins of confidence."""
    confidence, right = probabilities.max(1), probabilities.argmax(1) == labels
    error = 0.0
    for low in np.arange(15) / 15:
        inside = (confidence > low) & (confidence <= low + 1 / 15)
        if inside.any():
            error += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    return float(error)


def test_top_five_is_left_out_where_it_cannot_be_missed() -> None:
    assert "top5_accuracy" not in metrics.evaluate(batches(5, [8]), list("abcde")).scalars
    assert "top5_accuracy" in metrics.evaluate(batches(6, [8]), list("abcdef")).scalars


def test_how_the_samples_are_batched_changes_nothing() -> None:
    whole, parts = batches(6, [23]), batches(6, [10, 1, 12])
    first, second = (metrics.evaluate(given, list("abcdef")) for given in (whole, parts))
    assert first.scalars == pytest.approx(second.scalars, rel=1e-6)
    assert first.confusion == second.confusion
