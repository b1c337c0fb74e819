"""The lesson: what mixed precision and gradient accumulation do, alone and together, on one task.

    make lesson          # or: python benchmarks/lesson.py

Trains the same model on the digits four times, with the same data order and effective batch. Prints one
table, draws docs/lesson.png, and logs four comparable runs to the MLflow experiment `tightfit-lesson`.

seconds: of the whole training. peak: the most bytes that tensors held in one window, by the ledger of
pipeline.memory. underflow: the share of weight gradients that float16 without a loss scale makes zero
although they are not; and the same with the loss scale.
"""

import sys
import tempfile
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import Tensor

from pipeline import models, tracking
from pipeline.data import sources, splits
from pipeline.engine import CrossEntropy, Precision, ScalerSettings, Trainer, allocate_state, build_optimizer
from pipeline.memory.trace import count_step

FIGURE = Path(__file__).resolve().parents[1] / "docs" / "lesson.png"
BATCH, EPOCHS, RATE, WIDTH = 64, 6, 0.005, 32
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Variant:
    name: str
    precision: str
    micro_batch_size: int


VARIANTS = [
    Variant("fp32", "fp32", BATCH),
    Variant("AMP", "amp_fp16", BATCH),
    Variant("accumulation", "fp32", BATCH // 8),
    Variant("both", "amp_fp16", BATCH // 8),
]


def main() -> None:
    train, test = data()
    rows = []
    for variant in VARIANTS:
        peak, stepper = peak_mib(variant, train), trainer(variant)
        with tempfile.TemporaryDirectory() as journal, run_of(variant, Path(journal), stepper) as run:
            run.params(vars(variant) | {"effective_batch_size": BATCH, "epochs": EPOCHS, "lr": RATE})
            rows.append(measure(variant.name, peak, stepper, train, test, run))
    shares = underflow(train)
    print(f"{'':14}{'seconds':>9}{'peak MiB':>10}{'accuracy':>10}{'skipped':>9}")
    for row in rows:
        print(f"{row['name']:14}{row['seconds']:9.1f}{row['peak_mib']:10.1f}", end="")
        print(f"{row['accuracy']:10.1%}{row['skipped']:9}")
    print(
        f"weight gradients that underflow in float16: {shares[0]:.2%}; with the loss scale: {shares[1]:.2%}"
    )
    draw(rows, shares)


def run_of(variant: Variant, journal: Path, stepper: Trainer) -> AbstractContextManager[tracking.Run]:
    return tracking.training_run(
        "tightfit-lesson",
        variant.name,
        journal,
        resumed=False,
        run_id=None,
        step=lambda: stepper.state.step,
    )


def draw(rows: list[dict[str, Any]], underflow: tuple[float, float]) -> None:
    """Bars of seconds, peak and accuracy a variant, and of the gradients that float16 loses."""
    plt.switch_backend("Agg")  # a file alone: no display
    figure, panels = plt.subplots(1, 4, figsize=(14, 3.5), layout="constrained")
    names = [row["name"] for row in rows]
    for axes, key, title, pattern in zip(
        panels,
        ("seconds", "peak_mib", "accuracy"),
        ("training, seconds", "peak of one window, MiB", "test accuracy"),
        ("{:.1f}", "{:.1f}", "{:.1%}"),
        strict=False,
    ):
        bars = axes.bar(names, [row[key] for row in rows], color="tab:blue")
        axes.bar_label(bars, labels=[pattern.format(row[key]) for row in rows])
        axes.set(title=title)
        axes.margins(y=0.15)
    bars = panels[3].bar(["without", "with loss scale"], underflow, color="tab:red")
    panels[3].bar_label(bars, labels=[f"{share:.2%}" for share in underflow])
    panels[3].set(title="float16 gradients that underflow")
    panels[3].margins(y=0.15)
    figure.savefig(FIGURE, dpi=100)


def measure(
    name: str, peak: float, stepper: Trainer, train: Batch, test: Batch, run: tracking.Run
) -> dict[str, Any]:
    started = time.perf_counter()
    for epoch in range(EPOCHS):
        for window in windows(train, epoch):
            result = stepper.step(window)
            if result.applied:
                run.metrics({"train/loss": result.loss, "amp/loss_scale": result.loss_scale}, result.step)
    seconds = time.perf_counter() - started
    with torch.no_grad():
        accuracy = float((stepper.model(test[0]).argmax(1) == test[1]).float().mean())
    measured = {"seconds": seconds, "peak_mib": peak, "accuracy": accuracy}
    run.metrics({f"lesson/{name}": value for name, value in measured.items()}, stepper.state.step)
    return {"name": name, **measured, "skipped": stepper.state.skipped_steps}


def data() -> tuple[Batch, Batch]:
    """Training and test digits as float32 in -1..1, (N, 1, 8, 8)."""
    digits = sources.read("digits")
    parts = splits.split(digits, validation=0.15, test=0.15, seed=0)
    images = torch.from_numpy(np.asarray(digits.images)).float() / 127.5 - 1
    labels = torch.from_numpy(np.asarray(digits.labels))
    first, second = parts["train"], parts["test"]
    return (images[first], labels[first]), (images[second], labels[second])


def windows(batch: Batch, epoch: int) -> list[Batch]:
    order = torch.randperm(len(batch[1]), generator=torch.Generator().manual_seed(epoch)).split(BATCH)
    return [(batch[0][ids], batch[1][ids]) for ids in order]


def trainer(variant: Variant, scale: float = 2.0**16) -> Trainer:
    torch.manual_seed(0)
    model = models.small_cnn(10, width=WIDTH)
    optimizer = build_optimizer(model, "adamw", lr=RATE, weight_decay=0.05)
    allocate_state(optimizer)
    scaler = ScalerSettings(init_scale=scale, growth_interval=20)
    return Trainer(
        model,
        optimizer,
        CrossEntropy(),
        precision=Precision(variant.precision, scaler=scaler if variant.precision == "amp_fp16" else None),
        micro_batch_size=variant.micro_batch_size,
        max_grad_norm=1.0,
    )


def peak_mib(variant: Variant, train: Batch) -> float:
    """Of one window, in a fresh trainer."""
    return count_step(trainer(variant), windows(train, 0)[0]).peak.total / 2**20


def underflow(train: Batch) -> tuple[float, float]:
    """Shares of zeros among weight gradients that are not zero in float32: without a loss scale, with one."""
    window = windows(train, 0)[0]
    exact = gradients("fp32", 1.0, window)
    without, scaled = (gradients("amp_fp16", scale, window) for scale in (1.0, 2.0**16))
    nonzero = exact != 0
    return tuple(float(((tensor == 0) & nonzero).sum() / nonzero.sum()) for tensor in (without, scaled))  # type: ignore[return-value]


def gradients(precision: str, scale: float, window: Batch) -> Tensor:
    """After three epochs of float32: all weight gradients of a window, in one vector."""
    stepper = trainer(Variant("fp32", "fp32", BATCH))
    train, _ = data()
    for epoch in range(3):
        for batch in windows(train, epoch):
            stepper.step(batch)
    probe = trainer(Variant("probe", precision, BATCH), scale)
    probe.model.load_state_dict(stepper.model.state_dict())
    seen: list[Tensor] = []
    weights = [parameter for parameter in probe.model.parameters() if parameter.ndim > 1]
    probe.optimizer.register_step_pre_hook(
        lambda *_: seen.append(torch.cat([w.grad.flatten() for w in weights if w.grad is not None]))
    )
    probe.step(window)
    return seen[0].clone()


if __name__ == "__main__":
    main()
