"""Progress: a live line on a terminal, a JSON line a step elsewhere, and TensorBoard scalars in any case."""

import json
import math
import statistics
import sys
import time
from collections import deque
from pathlib import Path
from typing import Self

import rich.console
import rich.progress
import tensorboardX

_AVERAGED = 10


class Report:
    """Counts steps and seconds; the first step of a session is left out of the speed, as it compiles.

    JSON lines go to stdout and sentences to stderr, so that a pipe receives nothing but JSON.
    """

    def __init__(self, run_dir: Path, *, first_step: int, num_steps: int) -> None:
        self._num_steps = num_steps
        self._scalars = tensorboardX.SummaryWriter(str(run_dir), purge_step=first_step if first_step > 1 else None)
        self._live = _live_line() if sys.stdout.isatty() else None
        self._task = self._live and self._live.add_task(
            "", total=num_steps, completed=first_step - 1, loss=math.nan, evaluated="", speed=0.0, left="compiling"
        )
        self._seconds: deque[float] = deque(maxlen=50)
        self._clock = time.perf_counter()
        self.losses: list[float] = []
        self.speeds: list[float] = []

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()
        self._scalars.close()

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Tells of one finished step; `metrics` holds at least loss and num_tokens."""
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        if self.losses:
            self._seconds.append(seconds)
            self.speeds.append(metrics["num_tokens"] / seconds)
        self.losses.append(metrics["loss"])
        left = (self._num_steps - step) * statistics.median(self._seconds or [seconds])
        metrics = {"loss": metrics["loss"], "tokens_per_second": metrics["num_tokens"] / seconds} | metrics
        self._add_scalars(step, metrics)
        if self._live and self._task is not None:
            fields = {
                "loss": metrics["loss"],
                "speed": metrics["tokens_per_second"],
                "left": f"{left:.0f} s left",
            }
            self._live.update(self._task, completed=step, **fields)
        else:
            _print_line({"step": step, **metrics, "seconds_left": left})

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Tells of an evaluation after a step, whose time is not the next step's; `metrics` holds eval_loss."""
        self._add_scalars(step, metrics)
        if self._live and self._task is not None:
            self._live.update(self._task, evaluated=f" (eval {metrics['eval_loss']:.3f})")
        else:
            _print_line({"step": step, **metrics})
        self._clock = time.perf_counter()

    def sample(self, step: int, text: str) -> None:
        """Shows what the model writes after a step, whose time is not the next step's."""
        indented = "".join(f"    {line}\n" for line in text.splitlines())  # verbatim in Markdown
        self._scalars.add_text("sample", indented, step)
        if self._live:
            say(f"sample    {text}")
        else:
            print(json.dumps({"step": step, "sample": text}), flush=True)
        self._clock = time.perf_counter()

    def _add_scalars(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._scalars.add_scalar(name, value, step)

    @property
    def summary(self) -> str:
        """The first loss of this session, the last ones, and the median speed."""
        last = self.losses[-_AVERAGED:]
        return (
            f"loss {self.losses[0]:.3f} -> {statistics.fmean(last):.3f} "
            f"(mean of the last {len(last)} of {len(self.losses)} steps), "
            f"{statistics.median(self.speeds or [0]):,.0f} tokens/s"
        )


def say(sentence: str) -> None:
    """A line for people, on stderr; above the live line where there is one."""
    rich.console.Console(stderr=True, soft_wrap=True).print(sentence, markup=False, highlight=False)


def _print_line(values: dict[str, float]) -> None:
    print(json.dumps({k: v if math.isfinite(v) else None for k, v in values.items()}), flush=True)


def _live_line() -> rich.progress.Progress:
    return rich.progress.Progress(
        rich.progress.TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
        rich.progress.BarColumn(),
        rich.progress.TextColumn(
            "loss {task.fields[loss]:.3f}{task.fields[evaluated]}   {task.fields[speed]:,.0f} tokens/s   "
            "{task.fields[left]}"
        ),
    )
