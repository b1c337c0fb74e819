import io

import pytest
from rich.console import Console

from pipeline.engine import StepResult
from pipeline.stages.progress import TrainingProgress, duration


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")],
)
def test_durations_read_well(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def result(step: int) -> StepResult:
    return StepResult(step, True, False, 0.5, 1.0, 65536.0, step, 0.1, 8, 4, 0.01)


def test_without_a_terminal_it_is_an_estimate_and_a_line_an_epoch() -> None:
    written = io.StringIO()
    with TrainingProgress(2, 40, Console(file=written, width=200)) as progress:
        for epoch in (1, 2):
            for step in range(20):
                progress.after_step(result(20 * (epoch - 1) + step + 1), skipped=1)
            progress.after_epoch(epoch, loss=0.25, accuracy=0.9, skipped=1, scale=65536.0)
    estimate, first, second = written.getvalue().splitlines()
    assert estimate == "about 0 s for 40 windows in 2 epochs"
    assert first == "epoch 1/2  loss 0.2500  val/accuracy 0.9000  scale 65536  skipped 1  0 s"
    assert second.startswith("epoch 2/2")


def test_on_a_terminal_it_is_a_bar_with_the_numbers() -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=200)
    with TrainingProgress(1, 4, console) as progress:
        for step in range(1, 5):
            progress.after_step(result(step), skipped=2)
        progress.after_epoch(1, loss=0.25, accuracy=0.875, skipped=2, scale=65536.0)
    for part in ("4/4", "loss 0.5000", "val/accuracy 0.8750", "scale 65536", "skipped 2"):
        assert part in written.getvalue()
