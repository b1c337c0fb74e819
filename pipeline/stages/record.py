"""The record of a training: one row per logged step, the same numbers in training.csv and in MLflow."""

import csv
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline import files, tracking
from pipeline.engine import StepResult, Trainer, accumulation_steps
from pipeline.memory import usage
from pipeline.memory.usage import Measured
from pipeline.stages.account import Account

TRAINING_CSV = Path("reports/training.csv")


class Record:
    """Rows at every `every` steps, and where something happens: a change of the loss scale, a skipped step, a
    count of the memory, the end of an epoch.

    A row's values are those of its step; samples_per_second and the device's peaks are of the steps since
    the row before. Non-finite values are left out: `train/nonfinite` says that there was one. Of steps that
    a resumed training takes again, the rows stand as they were logged first.
    """

    def __init__(
        self,
        run: tracking.Run,
        trainer: Trainer,
        account: Account,
        *,
        every: int,
        epoch_samples: int,
        effective_batch_size: int,
    ) -> None:
        self._run = run
        self._trainer = trainer
        self._account = account
        self._counted: Measured | None = None  # of the memory, what was logged
        self._every = every
        self._epoch_samples = epoch_samples
        self._effective_batch_size = effective_batch_size
        self._last: StepResult | None = None
        self._logged_step = 0
        self._seconds = 0.0
        self._samples = 0

    def after_step(self, result: StepResult) -> None:
        before, self._last = self._last, result
        self._seconds += result.seconds
        self._samples += result.samples
        rescaled = before is not None and before.loss_scale != result.loss_scale
        meter = self._account.meter
        counted = meter.measured is not self._counted
        self._counted = meter.measured
        memory = {f"memory/{name}": value for name, value in meter.logged().items()} if counted else {}
        if result.step % self._every == 0 or rescaled or not result.applied or counted:
            self._add(self._row(result) | memory)

    def after_epoch(self, validation: dict[str, float]) -> None:
        """Joins the epoch's validation to the row of its last step."""
        assert self._last is not None
        row = {} if self._logged_step == self._last.step else self._row(self._last)
        self._add(row | validation)

    @property
    def loss_scale(self) -> float:
        """Of the last step."""
        return self._last.loss_scale if self._last else math.nan

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Of the whole training, also of what came before it was resumed."""
        return self._run.rows

    def state_dict(self) -> dict[str, Any]:
        """What the next row depends on, besides the trainer."""
        return {
            "last": asdict(self._last) if self._last else None,
            "logged_step": self._logged_step,
            "seconds": self._seconds,
            "samples": self._samples,
            "meter": self._account.meter.state_dict(),
            "retries": self._account.recovery.retries,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._last = StepResult(**state["last"]) if state["last"] else None
        self._logged_step = state["logged_step"]
        self._seconds, self._samples = state["seconds"], state["samples"]
        self._account.meter.load_state_dict(state["meter"])
        self._counted = self._account.meter.measured
        self._account.recovery.retries = state["retries"]

    def _add(self, values: dict[str, Any]) -> None:
        """A new row, or more of the last one."""
        assert self._last is not None
        self._logged_step = self._last.step
        self._run.row(values, self._last.step)

    def _row(self, result: StepResult) -> dict[str, float]:
        state, elapsed = self._trainer.state, max(self._seconds, 1e-9)
        row = {
            "train/epoch": state.samples_seen / self._epoch_samples,
            "train/loss": result.loss,
            "train/learning_rate": result.learning_rate,
            "train/grad_norm": result.grad_norm,
            "train/nonfinite": float(result.found_inf or not math.isfinite(result.loss)),
            "train/samples_per_second": self._samples / elapsed,
            "amp/skipped_steps": state.skipped_steps,
            "amp/optimizer_steps": state.optimizer_steps,
            "amp/loss_scale": result.loss_scale,  # 1 without a scaler
            "amp/growth_tracker": result.growth_tracker,
            "amp/found_inf": float(result.found_inf),
            "memory/micro_batch_size": result.micro_batch_size,
            "memory/accumulation_steps": accumulation_steps(
                self._effective_batch_size, result.micro_batch_size
            ),
            "memory/oom_retries": self._account.recovery.retries,
        }
        row |= {
            f"memory/{name}": value for name, value in usage.peaks(self._trainer.precision.device).items()
        }
        self._seconds, self._samples = 0.0, 0
        return row

    def write_csv(self) -> None:
        """reports/training.csv: a column a metric, empty where a row has none."""
        columns = list(dict.fromkeys(name for row in self.rows for name in row))
        with files.whole(TRAINING_CSV) as temporary, temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows)
