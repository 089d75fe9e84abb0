"""When a run saves, and what it says and does where saving fails."""

import concurrent.futures
import time
from typing import Any

from train import distributed
from train.checkpoint import Checkpoints, cause
from train.exits import Exit, Stop
from train.flags import SaveEvery
from train.interrupt import Interrupt
from train.report import Pace, say

_MOST_FAILURES = 3


class Saver:
    """Saves every so many steps or seconds, whenever it is asked to, and at the end.

    A save goes on in the background; whether it has failed is known, and said, after the next step. Training goes on
    and saves again at the next time, but not after the third failure in a row.

    Args:
      step: steps that are done, and saved if there are any.
    """

    def __init__(
        self, checkpoints: Checkpoints, every: SaveEvery, interrupt: Interrupt, pace: Pace, *, step: int
    ) -> None:
        self._checkpoints = checkpoints
        self._every = every
        self._interrupt = interrupt
        self._pace = pace
        self._since = time.monotonic()
        # That of the last save that was begun.
        self._step = step
        self._num_failures = 0

    def after_step(self, step: int, state: Any, position: dict[str, Any]) -> bool:
        """Saves if it is time; returns whether the run has to stop. To be called before the first step too.

        Raises:
          Stop: three saves in a row have failed.
        """
        pending = self._checkpoints.pending
        is_going_on = pending is not None and not pending.done()
        has_failed = pending is not None and pending.done() and pending.exception() is not None
        asked = (self._interrupt.requested, self._is_due(step), has_failed, is_going_on)
        stop, due, failed, going_on = self._pace.any_of(*asked)
        if failed:
            self._tell_of_failure()
        # Not before it is whole for all, who else would not wait together for its end.
        elif pending is not None and not going_on:
            self._tell_of_success(pending.result())
        if due:
            with self._pace.clock.phase("save"):
                self._save(step, state, position)
        return stop

    def finish(self, step: int, state: Any, position: dict[str, Any]) -> None:
        """Returns once a checkpoint of the last step is whole.

        Raises:
          Stop: it, and the two that were begun before it, have failed.
        """
        with self._pace.clock.phase("save"):
            while not (self._settle() and self._step == step):
                self._save(step, state, position)

    def _is_due(self, step: int) -> bool:
        if step <= self._step:
            return False
        steps, seconds = self._every.steps, self._every.seconds
        is_time = step % steps == 0 if steps else time.monotonic() - self._since >= (seconds or 0)
        return self._interrupt.take_save_request() or is_time

    def _save(self, step: int, state: Any, position: dict[str, Any]) -> None:
        self._settle()
        self._since, self._step = time.monotonic(), step
        self._checkpoints.save(step, state, position)

    def _settle(self) -> bool:
        """Waits for the save that was begun last; whether it is whole, in all processes."""
        pending = self._checkpoints.pending
        while pending is not None:
            # Where it has failed in one process, the others would wait long for that one's files.
            is_done = bool(concurrent.futures.wait([pending], timeout=0.1).done)
            done, failed = distributed.of_all(is_done, is_done and pending.exception() is not None).T
            if failed.any():
                self._tell_of_failure()
                return False
            if done.all():
                self._tell_of_success(pending.result())
                return True
        return True

    def _tell_of_success(self, checksum: str) -> None:
        self._checkpoints.pending, self._num_failures = None, 0
        say(f"checkpoint {self._step}: state {checksum}")

    def _tell_of_failure(self) -> None:
        pending, self._checkpoints.pending = self._checkpoints.pending, None
        error = pending.exception() if pending is not None and pending.done() else None
        what = f"checkpoint {self._step} was not saved ({cause(error) if error else 'in another process'})"
        self._num_failures += 1
        if self._num_failures == _MOST_FAILURES:
            others = f"nor were the {_MOST_FAILURES - 1} before it"
            raise Stop(Exit.SAVE_FAILED, f"{what}, {others}; to resume goes on from the last one that is whole")
        # What has failed is tried again, also where the step is the last one.
        self._step = -1
        say(f"warning   {what}; training goes on, and the next save tries again")
