"""Faults on demand, for tests/drills.py: FAULT=point,action in the environment makes one happen, and nothing else does.

A point is a name that the code passes, `@N` for its step N alone and `/P` for process P alone: `step@5/1,hang`.
Several faults are separated by spaces. Actions are those of `_ACTIONS`.
"""

import ctypes
import os
import resource
import signal
import time


class FaultError(Exception):
    """What the action `raise` raises."""


def _raise() -> None:
    raise FaultError("asked for by FAULT")


def _limit_files(num_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


def _shift_clock(seconds: int) -> None:
    ctypes.c_long.in_dll(ctypes.CDLL(None), "clock_shift").value += seconds


_ACTIONS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "int": lambda: os.kill(os.getpid(), signal.SIGINT),
    "term": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "usr1": lambda: os.kill(os.getpid(), signal.SIGUSR1),
    "raise": _raise,
    "hang": lambda: time.sleep(3600),
    "pause": lambda: time.sleep(1),
    # No file of this process can grow past 4 KiB, as on a full disk, until `free`.
    "full": lambda: _limit_files(4096),
    "free": lambda: _limit_files(resource.RLIM_INFINITY),
    # The wall clock jumps by 100 days, where tests/clock.c is preloaded.
    "ahead": lambda: _shift_clock(8_640_000),
    "back": lambda: _shift_clock(-8_640_000),
}


def fault(point: str, step: int | None = None, process: int = 0) -> None:
    """Does what FAULT says of this point, if anything."""
    for asked in os.environ.get("FAULT", "").split():
        where, _, action = asked.partition(",")
        where, _, only_process = where.partition("/")
        where, _, only_step = where.partition("@")
        if where == point and only_step in ("", str(step)) and only_process in ("", str(process)):
            _ACTIONS[action]()
