"""Exit codes of the training command: what ended a run, for the script or the cluster that started it."""

import enum


class Exit(enum.IntEnum):
    """128 + N ends a run at once at the second of its signals N; other numbers are the platform's own."""

    OK = 0
    ERROR = 1
    BAD_INPUT = 2
    SAVE_FAILED = 3
    NOT_FINITE = 4
    NOT_DETERMINISTIC = 5
    PEER_LOST = 6
    STUCK = 13


class Stop(Exception):  # noqa: N818
    """Ends a run with an exit code of its own; the message is one line: what happened, and what to do."""

    def __init__(self, code: Exit, message: str) -> None:
        super().__init__(message)
        self.code = code
