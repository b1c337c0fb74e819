"""The figures of a run. The only module that imports matplotlib."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files alone: no window, no display
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, Any]]


def loss_and_accuracy(rows: Rows) -> Figure:
    """train/loss and val/loss over steps above, val/accuracy below."""
    figure, (loss, accuracy) = plt.subplots(2, 1, sharex=True, figsize=(8, 6), layout="constrained")
    for name in ("train/loss", "val/loss"):
        loss.plot(*_series(rows, name), label=name, marker="." if name.startswith("val") else "")
    loss.set(ylabel="loss", yscale="log")
    accuracy.plot(*_series(rows, "val/accuracy"), marker=".", label="val/accuracy", color="tab:green")
    accuracy.set(xlabel="step (windows attempted)", ylabel="accuracy")
    _finish(loss, accuracy)
    return figure


def loss_scale(rows: Rows) -> Figure:
    """The loss scale over steps, each skipped step marked."""
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    axes.plot(*_series(rows, "amp/loss_scale"), drawstyle="steps-post", label="loss scale")
    skipped = [row for row in rows if row.get("amp/found_inf")]
    if skipped:
        axes.plot(
            [row["step"] for row in skipped],
            [row["amp/loss_scale"] for row in skipped],
            "rx",
            label=f"skipped step ({len(skipped)})",
        )
    axes.set(xlabel="step (windows attempted)", ylabel="loss scale")
    axes.set_yscale("log", base=2)
    _finish(axes)
    return figure


def memory_account(parts: Mapping[str, Sequence[float]], budget: float | None, title: str) -> Figure:
    """Two bars in MiB for each part, predicted and measured; the budget as a line."""
    names, height = list(parts), 0.38
    figure, axes = plt.subplots(figsize=(8, 1.2 + 0.45 * len(names)), layout="constrained")
    for place, (label, color) in enumerate((("predicted", "tab:orange"), ("measured", "tab:blue"))):
        values = [values[place] for values in parts.values()]
        heights = [index + (place - 0.5) * height for index in range(len(names))]
        bars = axes.barh(heights, values, height, label=label, color=color)
        axes.bar_label(bars, labels=[_in_mib(value) for value in values], padding=3, fontsize=8)
    if budget is not None:
        axes.axvline(budget, color="black", linestyle="dashed", label=f"budget {budget / 1024:.4g} GiB")
    axes.set(xlabel="MiB", xscale="log", yticks=range(len(names)), yticklabels=names)
    axes.set_xlim(right=8 * max(budget or 0.0, *(max(values) for values in parts.values())))
    axes.invert_yaxis()
    axes.set_title(title, pad=24, fontsize=10)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)
    return figure


def memory_plan(
    names: Sequence[str], parts: Mapping[str, Sequence[float]], budgets: Sequence[float]
) -> Figure:
    """A stacked bar for each budget, `parts` in MiB from the bottom, and the budget as a line over it."""
    figure, axes = plt.subplots(figsize=(max(5.0, 1.6 * len(names)), 5), layout="constrained")
    below = [0.0] * len(names)
    for part, values in parts.items():
        axes.bar(names, values, bottom=below, label=part)
        below = [low + value for low, value in zip(below, values, strict=True)]
    for place, budget in enumerate(budgets):
        axes.hlines(budget, place - 0.45, place + 0.45, color="black", linestyle="dashed")
    axes.set(ylabel="MiB", title="predicted peak by component; dashed: the budget")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), reverse=True)
    return figure


def confusion_matrix(counts: Sequence[Sequence[int]], classes: Sequence[str]) -> Figure:
    """Row the true class, column the predicted one; the counts are written in up to 20 classes."""
    size = min(12.0, 3 + 0.4 * len(classes))
    figure, axes = plt.subplots(figsize=(size, size), layout="constrained")
    axes.imshow(counts, cmap="Blues")
    axes.set(xlabel="predicted", ylabel="true")
    if len(classes) <= 20:
        axes.set_xticks(range(len(classes)), classes, rotation=90)
        axes.set_yticks(range(len(classes)), classes)
        dark = max(map(max, counts)) / 2
        for row, values in enumerate(counts):
            for column, value in enumerate(values):
                if value:
                    color = "white" if value > dark else "black"
                    axes.text(column, row, str(value), ha="center", va="center", color=color)
    return figure


def close(figure: Figure) -> None:
    plt.close(figure)


def _series(rows: Rows, name: str) -> tuple[list[int], list[float]]:
    present = [row for row in rows if row.get(name) is not None]
    return [row["step"] for row in present], [row[name] for row in present]


def _finish(*every: Any) -> None:
    for axes in every:
        axes.grid(alpha=0.3)
        axes.legend()


def _in_mib(value: float) -> str:
    return "" if not value else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
