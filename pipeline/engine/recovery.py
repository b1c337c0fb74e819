"""Out of memory while training, survived exactly: the window is taken again, in smaller micro-batches.

The micro-batch is a matter of execution and the window is the unit of training, so that a window which did
not fit can begin anew with half the micro-batch and nobody will notice but by rounding: always from the
original window, with the random state and the buffers as they were before it, without the gradients that the
failed attempt left. What comes out is, bit for bit, what had come out of a window begun at that size.

That holds up to the decision to update. In the update weights have moved, and so has state: nothing can be
replayed, and the error goes on. Optimizer state should be there before the first window (allocate_state), so
that the update needs little that the backward had not.

Several ranks decide together. One that runs out of memory would leave the others waiting in the gradients'
all-reduce for ever: so with recovery no backward communicates. After the last micro-batch the ranks tell each
other how it went, and either all average their gradients or all take the window again at the smallest size
that one of them asks for.
"""

import gc

import torch

from pipeline.engine.distributed import OtherRankError
from pipeline.engine.out_of_memory import is_out_of_memory
from pipeline.engine.random_state import random_state, restore_random_state
from pipeline.engine.step import StepResult, Trainer
from pipeline.engine.window import Batch, accumulation_steps, samples


class DoesNotFitError(RuntimeError):
    """Out of memory where no smaller micro-batch can help."""


class Recovery:
    """Takes the steps of `trainer`; `retries` counts windows taken again, `trainer.micro_batch_size` shrinks.

    Raises DoesNotFitError, from the original error, at micro-batch 1 and in the update. Other errors pass.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.retries = 0
        self._trainer = trainer
        trainer.ranks.defer()

    def step(self, window: Batch) -> StepResult:
        """As Trainer.step."""
        device = self._trainer.precision.device
        before = random_state(device)
        while True:
            try:
                return self._trainer.step(window)
            except Exception as error:
                size = self._smaller(error, window)
            # here the error is gone, and with its traceback the tensors of the failed attempt
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            restore_random_state(before, device)
            self._trainer.micro_batch_size = size
            self.retries += 1

    def _smaller(self, error: Exception, window: Batch) -> int:
        """Half of the largest micro-batch that ran, or what another rank needs; else raises."""
        of_other_rank = isinstance(error, OtherRankError)
        if not of_other_rank and not is_out_of_memory(error):
            raise error
        if not self._trainer.replayable:
            raise DoesNotFitError(
                "out of memory in the optimizer's update: weights have moved, so the window cannot be taken "
                f"again. {_first_line(error)}"
            ) from error
        ran = self._trainer.micro_batch_size
        if not of_other_rank:
            total = samples(window)
            steps = accumulation_steps(total, ran)
            ran = -(-total // steps) // 2
        size = self._trainer.ranks.smallest(ran, self._trainer.precision.device)
        if size < 1:
            raise DoesNotFitError(
                f"out of memory at micro-batch 1, and there is no smaller one. {_first_line(error)}"
            ) from error
        return size


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
