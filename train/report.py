"""Progress: a live line on a terminal, a JSON line a step elsewhere, scalars always; where the time went; profiles."""

import contextlib
import json
import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, Self, get_args

import jax
import numpy as np
import rich.console
import rich.progress

from train import distributed
from train.flags import StepRange
from train.sinks import Sink

_AVERAGED = 10

Phase = Literal["compile", "restore", "data", "step", "save", "evaluate", "wait", "other"]


class Clock:
    """What the time since its creation went to: every moment belongs to one phase, so the parts make up the whole.

    A phase inside another is no part of the outer one; what is in none is `other`. `since` changes with each moment
    at which a phase begins or ends; `step_seconds` has the last steps.

    Args:
      now: nanoseconds of a clock that never goes back.
    """

    def __init__(self, now: Callable[[], int] = time.perf_counter_ns) -> None:
        self._now = now
        self._spent: dict[Phase, int] = dict.fromkeys(get_args(Phase), 0)
        self.phase_now: Phase = "other"
        self.since = now()
        self.step_seconds: deque[float] = deque(maxlen=20)

    @contextlib.contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """What is done inside belongs to this phase."""
        outer = self.phase_now
        self._enter(phase)
        try:
            yield
        finally:
            self._enter(outer)

    @property
    def spent(self) -> dict[Phase, int]:
        """Nanoseconds of each phase up to now."""
        self._enter(self.phase_now)
        return dict(self._spent)

    def _enter(self, phase: Phase) -> None:
        now = self._now()
        self._spent[self.phase_now] += now - self.since
        if self.phase_now == "step" and phase != "step":
            self.step_seconds.append((now - self.since) / 1e9)
        self.phase_now, self.since = phase, now


class Pace:
    """What the processes of a run tell each other between steps: what each of them asks for, and which is slow.

    All devices take a step together, so a process shows itself in what it does alone, outside of the phases step and
    wait. `metrics` has the seconds of that, since they last asked, over the processes, and the number of the slowest.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._told = self._own_seconds()
        self.metrics: dict[str, float] = {}

    def any_of(self, *flags: bool) -> list[bool]:
        """Whether each flag is up in any process; all of them have to ask."""
        told, self._told = self._told, self._own_seconds()
        with self.clock.phase("wait"):
            *raised, seconds = distributed.of_all(*flags, self._told - told).T
        if len(seconds) > 1:
            values = {"min": seconds.min(), "median": np.median(seconds), "max": seconds.max()}
            self.metrics = {f"own_seconds_{name}": float(value) for name, value in values.items()}
            self.metrics["slowest_process"] = int(seconds.argmax())
        return [bool(column.any()) for column in raised]

    def _own_seconds(self) -> float:
        return sum(part for phase, part in self.clock.spent.items() if phase not in ("step", "wait")) / 1e9


class Report:
    """Tells of steps and evaluations, and hands their numbers on to sinks.

    JSON lines go to stdout and sentences to stderr, so that a pipe receives nothing but JSON.

    Args:
      clock: its phases data and step tell how long a step took.
      ideal_seconds: of a step at the peak of all devices; None leaves out the utilisation.
    """

    def __init__(
        self, clock: Clock, sinks: Sequence[Sink], *, first_step: int, num_steps: int, ideal_seconds: float | None
    ) -> None:
        self._clock = clock
        self._sinks = sinks
        self._num_steps = num_steps
        self._ideal_seconds = ideal_seconds
        self._live = _live_line() if sys.stdout.isatty() else None
        self._task = self._live and self._live.add_task(
            "",
            total=num_steps,
            completed=first_step - 1,
            loss=math.nan,
            evaluated="",
            speed=0.0,
            used="",
            left="   compiling",
        )
        self._seconds: deque[float] = deque(maxlen=50)
        self._spent = clock.spent
        self.losses: list[float] = []
        self.speeds: list[float] = []
        self.save_seconds = 0.0

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()
        for sink in self._sinks:
            sink.close()

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Tells of one finished step; `metrics` holds at least loss and num_tokens.

        Added are step_seconds, data_seconds (those that the step waited for its batch), tokens_per_second over
        both, and utilisation: of the devices' peak, the share that the model's FLOPs need in that time. After a save
        also save_seconds, those that the step waited for it.
        """
        spent, before = self._clock.spent, self._spent
        self._spent = spent
        taken = {phase: (spent[phase] - before[phase]) / 1e9 for phase in spent}
        data_seconds, step_seconds, save_seconds = taken["data"], taken["step"], taken["save"]
        seconds = data_seconds + step_seconds
        self._seconds.append(seconds)
        self.speeds.append(metrics["num_tokens"] / seconds)
        if math.isfinite(metrics["loss"]):
            self.losses.append(metrics["loss"])
        left = (self._num_steps - step) * statistics.median(self._seconds)
        metrics = {"loss": metrics["loss"], "tokens_per_second": self.speeds[-1]} | metrics
        metrics |= {"step_seconds": step_seconds, "data_seconds": data_seconds}
        if self._ideal_seconds is not None:
            metrics["utilisation"] = self._ideal_seconds / seconds
        if save_seconds:
            metrics["save_seconds"] = save_seconds
            self.save_seconds += save_seconds
        self._pass_on(step, metrics)
        if self._live and self._task is not None:
            fields = {
                "loss": metrics["loss"],
                "speed": metrics["tokens_per_second"],
                "used": f"   {metrics['utilisation']:.0%} of peak" if "utilisation" in metrics else "",
                "left": f"   {left:.0f} s left",
            }
            self._live.update(self._task, completed=step, **fields)
        else:
            _print_line({"step": step, **metrics, "seconds_left": left})

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Tells of an evaluation after a step; `metrics` holds eval_loss."""
        self._pass_on(step, metrics)
        if self._live and self._task is not None:
            self._live.update(self._task, evaluated=f" (eval {metrics['eval_loss']:.3f})")
        else:
            _print_line({"step": step, **metrics})

    def sample(self, step: int, text: str) -> None:
        """Shows what the model writes after a step."""
        for sink in self._sinks:
            sink.text(step, "sample", text)
        if self._live:
            say(f"sample    {text}")
        else:
            print(json.dumps({"step": step, "sample": text}), flush=True)

    def _pass_on(self, step: int, metrics: dict[str, float]) -> None:
        for sink in self._sinks:
            sink.scalars(step, metrics)

    @property
    def summary(self) -> str:
        """The first loss of this session, the last ones, and the median speed."""
        last = self.losses[-_AVERAGED:]
        return (
            f"loss {self.losses[0]:.3f} -> {statistics.fmean(last):.3f} "
            f"(mean of the last {len(last)} of {len(self.losses)} steps), "
            f"{statistics.median(self.speeds):,.0f} tokens/s"
        )


class Profile:
    """Writes the steps of a range as one XLA profile, which TensorBoard finds in the run-dir."""

    def __init__(self, steps: StepRange | None, run_dir: Path) -> None:
        self._steps = steps
        self._run_dir = run_dir
        self._is_running = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_running:
            self._stop()

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Marks a step; the profile begins before the first and ends after the last of the range."""
        if self._steps is not None and number in self._steps and not self._is_running:
            jax.profiler.start_trace(self._run_dir)
            self._is_running = True
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            yield
        if self._steps is not None and self._is_running and number == self._steps.last:
            self._stop()

    def _stop(self) -> None:
        self._is_running = False
        jax.profiler.stop_trace()


def say(sentence: str) -> None:
    """A line for people, on stderr, from the first process alone; above the live line where there is one."""
    if not distributed.is_first():
        return
    rich.console.Console(stderr=True, soft_wrap=True).print(sentence, markup=False, highlight=False)


def _print_line(values: dict[str, float]) -> None:
    print(json.dumps({k: v if math.isfinite(v) else None for k, v in values.items()}), flush=True)


def _live_line() -> rich.progress.Progress:
    return rich.progress.Progress(
        rich.progress.TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
        rich.progress.BarColumn(),
        rich.progress.TextColumn(
            "loss {task.fields[loss]:.3f}{task.fields[evaluated]}   {task.fields[speed]:,.0f} tokens/s"
            "{task.fields[used]}{task.fields[left]}"
        ),
    )
