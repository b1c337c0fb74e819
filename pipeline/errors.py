"""The one error that is meant for a person: it is printed as its message, without a traceback."""


class UserError(Exception):
    """Something the user can put right; the message names the cause and the way out."""


class Stopped(Exception):
    """A signal asked the process to end, and it does so in order; `number` is the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by signal {number}")
        self.number = number
