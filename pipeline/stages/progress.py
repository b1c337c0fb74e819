"""What a person sees while it trains: a bar on a terminal, a line an epoch anywhere else."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from pipeline.engine import StepResult

WARM_UP_STEPS = 5  # the first windows are slower: caches fill, kernels are chosen


class TrainingProgress:
    """A context manager around the training; `total` counts windows over all epochs, `completed` those that
    were trained before it was resumed.
    """

    def __init__(
        self, epochs: int, total: int, console: Console | None = None, *, completed: int = 0, epoch: int = 0
    ) -> None:
        self.epochs = epochs
        self.total = total
        self.console = console or Console()
        self.accuracy = "-"
        self._completed = completed
        self._began = time.monotonic()
        self._warmed: float | None = None
        self._bar = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(
                "loss {task.fields[loss]}  val/accuracy {task.fields[accuracy]}  "
                "scale {task.fields[scale]}  skipped {task.fields[skipped]}"
            ),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task(
            "train",
            total=total,
            completed=completed,
            epoch=f"{min(epoch + 1, epochs)}/{epochs}",
            loss="-",
            accuracy="-",
            scale="-",
            skipped=0,
        )

    def __enter__(self) -> "TrainingProgress":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def after_step(self, result: StepResult, skipped: int) -> None:
        self._bar.update(
            self._task, advance=1, loss=f"{result.loss:.4f}", scale=f"{result.loss_scale:g}", skipped=skipped
        )
        steps, left = result.step - self._completed, self.total - self._completed
        if steps == WARM_UP_STEPS:
            self._warmed = time.monotonic()
        elif steps == 2 * WARM_UP_STEPS and self._warmed and not self.console.is_terminal:
            whole = (time.monotonic() - self._warmed) / WARM_UP_STEPS * left
            self.console.print(f"about {duration(whole)} for {left} windows in {self.epochs} epochs")

    def after_epoch(self, epoch: int, loss: float, accuracy: float, skipped: int, scale: float) -> None:
        following = f"{min(epoch + 1, self.epochs)}/{self.epochs}"
        self._bar.update(self._task, epoch=following, accuracy=f"{accuracy:.4f}")
        if not self.console.is_terminal:
            self.console.print(
                f"epoch {epoch}/{self.epochs}  loss {loss:.4f}  val/accuracy {accuracy:.4f}  "
                f"scale {scale:g}  skipped {skipped}  {duration(time.monotonic() - self._began)}",
                highlight=False,
                soft_wrap=True,
            )


def duration(seconds: float) -> str:
    """ "42 s", "3 min 20 s", "2 h 05 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
