"""The memory account of a run: what was predicted, what was measured, how often it was not enough."""

from collections.abc import Sequence
from typing import Any

from pipeline import figures
from pipeline.engine import Recovery, Trainer
from pipeline.memory import usage
from pipeline.memory.devices import GIB
from pipeline.memory.planner import Plan
from pipeline.memory.usage import MIB, Measured, Meter


class Account:
    """Of one training. plan: None where there is none; count: whether a ledger may look at some windows.

    Compiled code would not be what runs while a ledger looks.
    """

    def __init__(self, plan: Plan | None, savers: Sequence[str], trainer: Trainer, *, count: bool) -> None:
        self.plan = plan
        self._savers = ", ".join(savers)
        self.recovery = Recovery(trainer)
        self.meter = Meter(trainer, self.recovery.step)
        self.step = self.meter.step if count else self.recovery.step
        self._trainer = trainer

    def known_before(self) -> dict[str, float]:
        """MiB that training holds throughout, and what was predicted in all."""
        values = usage.components(self._trainer.model, self._trainer.optimizer)
        if self.plan is not None:
            values["predicted_peak_reserved_mib"] = self.plan.best.required / MIB
        return values

    def known_after(self, rows: list[dict[str, Any]]) -> dict[str, float]:
        """By how much the prediction was wrong; rows: of the record."""
        if self.plan is None:
            return {}
        return usage.prediction_error(self.plan.best, self.meter.measured, highest(rows))

    def sentence(self) -> str:
        """For the run's description."""
        measured = self.meter.measured
        counted = f"{_mib(measured.peak.total)} counted" if measured else "not counted"
        if retries := self.recovery.retries:
            size = self._trainer.micro_batch_size
            counted += (
                f". **Out of memory {retries} times**: windows were taken again, and the micro-batch became "
                f"{size}. Set batch.micro_batch_size to that, or memory.budget_gib lower"
            )
        if self.plan is None:
            return f"Tensors at the peak of a step: {counted}."
        best = self.plan.best
        return (
            f"Tensors at the peak of a step: {_mib(best.allocated)} predicted, {counted}. In all "
            f"{_mib(best.required)} predicted, of a budget of {self.plan.budget / GIB:.4g} GiB."
        )

    def figure(self, rows: list[dict[str, Any]]) -> Any:
        """Predicted and measured MiB of each part, and the budget."""
        peaks, measured = highest(rows), self.meter.measured
        parts = {
            name: [_predicted(self.plan, name), _measured(measured, name)]
            for name in (self.plan.best.components if self.plan else measured.highest if measured else ())
        }
        whole = peaks.get("device_used_mib", peaks.get("host_peak_rss_mib", 0.0))
        tensors = peaks.get("peak_allocated_mib", 0.0)
        predicted = self.plan.best if self.plan else None
        parts["rounding"] = [
            predicted.rounding / MIB if predicted else 0.0,
            max(0.0, peaks.get("peak_reserved_mib", tensors) - tensors),
        ]
        parts["outside of tensors"] = [
            (predicted.context + predicted.workspaces) / MIB if predicted else 0.0,
            max(0.0, whole - peaks.get("peak_reserved_mib", tensors)),
        ]
        parts["all"] = [predicted.required / MIB if predicted else 0.0, whole]
        return figures.memory_account(
            {name.replace("_", " "): values for name, values in parts.items() if any(values)},
            self.plan.budget / MIB if self.plan else None,
            f"micro-batch {self._trainer.micro_batch_size}, savers: {self._savers or 'none'}",
        )


def highest(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The highest value of each memory metric."""
    found: dict[str, float] = {}
    for row in rows:
        for name, value in row.items():
            group, _, metric = name.partition("/")
            if group == "memory":
                found[metric] = max(value, found.get(metric, 0.0))
    return found


def _mib(size: int) -> str:
    return f"{size / MIB:,.1f} MiB"


def _predicted(plan: Plan | None, name: str) -> float:
    return plan.best.components[name] / MIB if plan else 0.0


def _measured(measured: Measured | None, name: str) -> float:
    return measured.peak.components[name] / MIB if measured else 0.0
