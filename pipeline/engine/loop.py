"""The loop: epochs of windows. What happens between steps is a plain call, given by whoever trains."""

from collections.abc import Callable, Iterable

from pipeline.engine.step import StepResult, Trainer
from pipeline.engine.window import Batch


def fit(
    trainer: Trainer,
    windows: Callable[[int], Iterable[Batch]],
    *,
    epochs: int,
    after_step: Callable[[StepResult], None],
    after_epoch: Callable[[int], None],
) -> None:
    """Trains until `epochs` epochs are completed, from wherever `trainer.state` stands.

    windows(epoch) gives the windows of that epoch (counted from 0); after_step gets each result,
    after_epoch the number of epochs completed. The model is in training mode in each step.
    """
    while trainer.state.epoch < epochs:
        trainer.model.train()
        for window in windows(trainer.state.epoch):
            after_step(trainer.step(window))
        trainer.state.epoch += 1
        after_epoch(trainer.state.epoch)
