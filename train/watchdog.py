"""Ends a process that is alive and does nothing any more, which its peers and its cluster would wait for forever."""

import faulthandler
import statistics
import sys
import threading
from collections.abc import Callable
from typing import Self

from train.exits import Exit, Stop
from train.job import leave
from train.report import Clock, Phase

# How much longer than a step may other phases take; the first step also starts the links between the devices.
_TIMES: dict[Phase, int] = {"compile": 60, "restore": 30, "save": 30, "evaluate": 30}
_FIRST = 60


class Watchdog:
    """Dumps the stacks of all threads, and ends the process, where one phase of a clock takes far too long.

    A step, and what is between steps, may take the given seconds, or five times the median of the last steps where
    that is more. It counts ticks of its own: a process that was stopped for a while (Ctrl-Z, a laptop asleep) is not
    late for it.

    Args:
      seconds: 0 watches nothing.
    """

    def __init__(
        self, clock: Clock, seconds: float, *, tick: float = 1.0, end: Callable[[Stop], object] = leave
    ) -> None:
        self._clock = clock
        self._seconds = seconds
        self._tick = tick
        self._end = end
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        if self._seconds > 0:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()

    def limit(self, phase: Phase) -> float:
        """Seconds that the phase may take now."""
        if phase in _TIMES:
            return _TIMES[phase] * self._seconds
        if not self._clock.step_seconds:
            return _FIRST * self._seconds
        return max(self._seconds, 5 * statistics.median(self._clock.step_seconds))

    def _watch(self) -> None:
        since, waited = self._clock.since, 0.0
        while not self._done.wait(self._tick):
            waited = waited + self._tick if self._clock.since == since else 0.0
            since, phase = self._clock.since, self._clock.phase_now
            if waited > self.limit(phase):
                faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
                message = (
                    f"stuck for {waited:.0f} s in the phase {phase}, where {self.limit(phase):.0f} s are allowed "
                    "(--stuck-after); it wrote the stacks of its threads to stderr"
                )
                self._end(Stop(Exit.STUCK, message))
                return
