"""The loop: epochs of windows. What happens between steps is a plain call, given by whoever trains."""

from collections.abc import Callable, Iterable

from pipeline.engine.step import StepResult, Trainer
from pipeline.engine.window import Batch


def fit(
    trainer: Trainer,
    windows: Callable[[int, int], Iterable[Batch]],
    *,
    epochs: int,
    after_step: Callable[[StepResult], None],
    after_epoch: Callable[[int], None],
    step: Callable[[Batch], StepResult] | None = None,
) -> None:
    """Trains until `epochs` epochs are completed, from wherever `trainer.state` stands.

    windows(epoch, seen) gives the windows of that epoch (counted from 0) that follow its first `seen`
    samples: 0 but where a training is resumed. after_step gets each result, after_epoch the number of epochs
    trained; only when it has returned is the epoch completed, so that what was stopped in it is done again.
    step: what takes a step of the trainer where something stands around it, such as recovery from out of
    memory; else `trainer.step`. The model is in training mode in each step, but for those of its modules that
    were in evaluation mode when it was in training mode itself: a frozen BatchNorm.
    """
    model, state, take = trainer.model, trainer.state, step or trainer.step
    frozen = [module for module in model.modules() if model.training and not module.training]
    while state.epoch < epochs:
        for window in windows(state.epoch, state.epoch_samples):
            if not model.training:
                model.train()
            for module in frozen:
                module.training = False
            after_step(take(window))
        after_epoch(state.epoch + 1)
        state.end_epoch()
