"""The thread that takes a journal to MLflow while its run goes on.

Training appends to the journal and never waits. Where the store does not answer, that is said once, and tried
again ever more rarely; when it is back, all that waited is sent. At the end it is waited for as long as
something moves, and what is left is said: a hung server costs a training no time.
"""

import threading
import time

from pipeline.errors import UserError
from pipeline.tracking.delivery import Delivery, GoneError
from pipeline.tracking.journal import Journal, read_delivered, waiting_events
from pipeline.tracking.store import UnreachableError

EVERY_SECONDS = 5.0
AT_MOST_SECONDS = 60.0  # between two attempts


class Courier:
    """error: why nothing is delivered at all, if so."""

    def __init__(self, journal: Journal) -> None:
        self.error: UserError | GoneError | None = None
        self._journal = journal
        self._delivery = Delivery(journal.folder)
        self._wake = threading.Event()
        self._ending = threading.Event()
        self._attempted = threading.Event()
        self._failing = False
        # a daemon: a call that hangs must not keep the process from ending
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)

    def start(self, seconds: float) -> None:
        """Begins, and waits at most so long for the first attempt; raises UserError if that came to one."""
        self._thread.start()
        self._attempted.wait(seconds)
        if isinstance(self.error, UserError):
            raise self.error

    def finish(self, seconds: float) -> None:
        """Returns when all is delivered, or nothing moved for so long; says what waits on, and where."""
        self._ending.set()
        self._wake.set()
        moved_at, position = time.monotonic(), self._position()
        while self._thread.is_alive() and time.monotonic() - moved_at < seconds:
            self._thread.join(0.1)
            if self._position() != position:
                moved_at, position = time.monotonic(), self._position()
        waiting = waiting_events(self._journal.folder)
        if waiting and not isinstance(self.error, GoneError):
            print(
                f"{waiting} events of this run wait in {self._journal.folder}: "
                "`python -m pipeline deliver-metrics` sends them when MLflow answers"
            )

    def _position(self) -> int:
        return int(read_delivered(self._journal.folder)["bytes"])

    def _work(self) -> None:
        pause = EVERY_SECONDS
        while True:
            last = self._ending.is_set()
            pause = self._attempt(pause)
            self._attempted.set()
            if self.error is not None or (last and not self._failing):
                return
            self._wake.wait(min(pause, 1.0) if last else pause)
            self._wake.clear()

    def _attempt(self, pause: float) -> float:
        """Returns the seconds until the next one."""
        try:
            sent = self._delivery.run()
        except UnreachableError as error:
            if not self._failing:
                print(
                    f"MLflow does not answer ({error}): training goes on, and its rows wait in "
                    f"{self._journal.folder}"
                )
            self._failing = True
            return min(2 * pause, AT_MOST_SECONDS)
        except (UserError, GoneError) as error:
            self.error = error
            if self._attempted.is_set() or isinstance(error, GoneError):
                print(f"{error}: nothing more is sent there")
            return pause
        if self._failing:
            print(f"MLflow is back: {sent} events delivered")
            self._failing = False
        return EVERY_SECONDS
