"""The counters of a training. There is one clock, `step`; all metrics are logged at it."""

from dataclasses import asdict, dataclass


@dataclass
class TrainState:
    """step = windows attempted = optimizer_steps + skipped_steps + empty_steps.

    A skipped step had a non-finite loss or gradient; an empty one had no item to learn from (or no
    parameter that the loss depends on). Neither is applied.
    """

    step: int = 0
    optimizer_steps: int = 0
    skipped_steps: int = 0
    empty_steps: int = 0
    consecutive_skips: int = 0
    samples_seen: int = 0
    epoch: int = 0  # epochs completed
    epoch_samples: int = 0  # seen of the present epoch
    items_per_sample: float = 0.0  # of the last window, as a power of two; 0 where none is known

    def count(self, samples: int, *, applied: bool, empty: bool) -> None:
        """Counts one attempted window."""
        self.step += 1
        self.samples_seen += samples
        self.epoch_samples += samples
        self.optimizer_steps += applied
        self.empty_steps += empty
        self.skipped_steps += not applied and not empty
        self.consecutive_skips = 0 if applied or empty else self.consecutive_skips + 1

    def end_epoch(self) -> None:
        self.epoch += 1
        self.epoch_samples = 0

    def as_dict(self) -> dict[str, float]:
        return asdict(self)
