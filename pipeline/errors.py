"""The one error that is meant for a person: it is printed as its message, without a traceback."""


class UserError(Exception):
    """Something the user can put right; the message names the cause and the way out."""
