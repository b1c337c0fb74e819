"""Writes checkpoints while training goes on: every so many minutes, every so many steps, and when asked.

A checkpoint that cannot be written (a full disk, a quota, a folder that became read-only) or that would hold
a non-finite weight does not end the training: the last good one stays, and it is said what is wrong.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline import files
from pipeline.engine import Checkpoints, NonFiniteError
from pipeline.engine.snapshot import size_in_bytes


class Keeper:
    """collect: a checkpoint's content as things stand; raises NonFiniteError where it must not be kept."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        collect: Callable[[], dict[str, Any]],
        *,
        every_minutes: float,
        every_steps: int | None,
    ) -> None:
        self.seconds = 0.0  # that training waited for checkpoints
        self.written = 0
        self._checkpoints = checkpoints
        self._collect = collect
        self._every_seconds = every_minutes * 60
        self._every_steps = every_steps
        self._saved_at = time.monotonic()
        self._saved_step: int | None = None

    def after_step(self, step: int) -> None:
        """Saves if it is time to."""
        late = time.monotonic() - self._saved_at >= self._every_seconds
        if late or (self._every_steps and step % self._every_steps == 0):
            self.save(step)

    def save(self, step: int) -> bool:
        """Whether the state of that step is kept; says why where it is not."""
        if step == self._saved_step:
            return True
        started = self._saved_at = time.monotonic()
        needed = 0
        try:
            content = self._collect()
            needed = size_in_bytes(content)
            self._checkpoints.save(content, step)
        except NonFiniteError as error:
            print(f"checkpoint of step {step}: not written, as {error}; {self._last()}")
            return False
        except OSError as error:
            why = cannot_write(self._checkpoints.folder, needed, error)
            print(f"checkpoint of step {step}: {why}; {self._last()}")
            return False
        finally:
            self.seconds += time.monotonic() - started
        self._saved_step, self.written = step, self.written + 1
        return True

    def wait(self) -> bool:
        """Until what is being written is on the disk; whether it is."""
        try:
            self._checkpoints.wait()
        except OSError as error:
            print(f"checkpoint: {cannot_write(self._checkpoints.folder, 0, error)}; {self._last()}")
            self._saved_step = None
            return False
        return True

    def _last(self) -> str:
        paths = self._checkpoints.paths()
        return f"the last one, {paths[0].name}, stays" if paths else "there is none yet"


def cannot_write(folder: Path, needed: int, error: OSError) -> str:
    """What is in the way, where, how much was needed and how much there is."""
    return f"{folder} cannot be written to: {error.strerror or error} ({files.room(folder, needed)})"
