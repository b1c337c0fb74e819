"""SIGTERM and Ctrl-C while training: the window is finished, the state saved, the run closed; then it ends.

The first signal is noted, and raised as `Stopped` where the training stands between two windows. One that
comes later ends the process on the spot: what is saved is whole at any moment, so that nothing but the last
windows is lost. What comes within two seconds of the first is the same request: a service manager, DVC and a
terminal signal the whole group of processes, and parents that die of it pass it on once more.

A stage that DVC or `mlflow run` started has a parent that may be killed alone. The kernel is asked to tell
(Linux's PR_SET_PDEATHSIG; elsewhere there is no such thing, and the stage runs on to its end).
"""

import ctypes
import os
import signal
import sys
import time
from types import FrameType, TracebackType
from typing import Any

from pipeline.errors import Stopped

SIGNALS = (signal.SIGTERM, signal.SIGINT)
SAME_REQUEST_SECONDS = 2.0
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Stop:
    """A context manager: inside, a signal waits for `check`, a second one does not wait."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._at = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Stop":
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.number is None:  # else the process is ending, and the rest of the same request may come
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def check(self) -> None:
        """Raises Stopped if a signal has come; to be called where the training can be left."""
        if self.number is not None:
            raise Stopped(self.number)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.number is None:
            self.number, self._at = number, now
            _say("\nstopping after this window; once more to stop at once\n")
        elif now - self._at > SAME_REQUEST_SECONDS:
            _say("\nstopped at once: the last saved state stays\n")
            os._exit(128 + number)


def die_with_parent() -> None:
    """Asks the kernel for SIGTERM when the process that started this one ends; Linux alone."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before it could be asked for
        os.kill(os.getpid(), signal.SIGTERM)


def _say(text: str) -> None:
    """From a signal handler: print may be in the middle of a line of its own."""
    os.write(2, text.encode())
