"""The two errors that reach a user. Knows nothing of the command line, which turns them into one line and an exit code."""


class UserError(Exception):
    """Wrong use or bad input. The message says what was found, what was expected and what to do. Exit code 2."""


class CheckFailed(Exception):
    """Work was done, and a check of its result failed (parity, exactness, a quality limit). Exit code 1."""
