"""Exit codes of the training command: what ended a run, for the script or the cluster that started it."""

import enum
import os
import re
import select
import sys
import traceback
from typing import TextIO

from train.flags import InputError


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


def tell(error: BaseException) -> int:
    """Prints what ended the run, one line where it is known and the traceback elsewhere, and returns the exit code."""
    match error:
        case SystemExit():
            return error.code if isinstance(error.code, int) else Exit.ERROR
        case KeyboardInterrupt():
            return 130
        case InputError():
            code, text = Exit.BAD_INPUT, f"error: {one_line(error)}"
        case Stop():
            code, text = error.code, f"error: {one_line(error)}"
        case BrokenPipeError() if _is_unread(sys.stdout):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python still writes as it ends
            code, text = Exit.ERROR, "error: stdout: its reader is gone"
        case _:
            code, text = Exit.ERROR, redact("".join(traceback.format_exception(error)).rstrip())
    sys.stderr.write(text + "\n")  # at once: other threads write too
    sys.stderr.flush()
    return code


def _is_unread(stream: TextIO) -> bool:
    """Whether it is a pipe that nobody reads any more."""
    poll = select.poll()
    poll.register(stream, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def mute() -> int:
    """Lets nothing reach stderr any more but by the file descriptor returned: libraries would have the last word."""
    sys.stderr.flush()
    stderr = os.dup(2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    return stderr


def one_line(error: BaseException) -> str:
    """The message of an error, which those that are not of ours begin with their class."""
    message = " ".join(str(error).splitlines())
    return redact(message if isinstance(error, InputError | Stop) else f"{type(error).__name__}: {message[:200]}")


def redact(text: str) -> str:
    """The text without the values of environment variables that are named as secrets are."""
    for name, value in os.environ.items():
        if len(value) >= 8 and re.search("TOKEN|SECRET|PASSWORD|API_?KEY|CREDENTIAL", name, re.IGNORECASE):
            text = text.replace(value, f"[{name}]")
    return text
