"""Where scalars go: TensorBoard files in the run-dir always, and with --log wandb or trackio as well."""

import contextlib
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, cast

import tensorboardX

from distflash_jax import plot
from distflash_jax.timeline import Timeline
from train.flags import InputError


class Sink(Protocol):
    """Takes the numbers, and the texts, of a step."""

    def scalars(self, step: int, values: dict[str, float]) -> None: ...

    def text(self, step: int, name: str, text: str) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in the run-dir; what an earlier session wrote of `first_step` and later ones is taken back."""

    def __init__(self, run_dir: Path, *, first_step: int) -> None:
        self._writer = tensorboardX.SummaryWriter(
            str(run_dir), purge_step=first_step if first_step > 1 else None, flush_secs=10
        )
        # Of a disk that is full its thread would die, and then the queue of what is to be written block the run.
        events: Any = cast(Any, self._writer.file_writer).event_writer
        events._ev_writer = events._worker._record_writer = _Undisturbed(events._ev_writer)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def text(self, step: int, name: str, text: str) -> None:
        self._writer.add_text(name, _as_code(text), step)

    def describe(self, settings: dict[str, Any], timeline: Timeline | None) -> None:
        """Adds the configuration as text, and the table of attention, if any, with a picture if matplotlib is there."""
        self._writer.add_text("config", _as_code(json.dumps(settings, indent=2)))
        if timeline is None:
            return
        self._writer.add_text("schedule", _as_code(f"{timeline.schedule}\n\n{plot.text(timeline)}"))
        if importlib.util.find_spec("matplotlib"):
            self._writer.add_figure("schedule", plot.figure(timeline))

    def close(self) -> None:
        self._writer.close()


class _Undisturbed:
    """A writer of event files that tells once what its disk refuses, and goes on."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self._has_told = False

    def write_event(self, event: Any) -> None:
        self._try(self._writer.write_event, event)

    def flush(self) -> None:
        self._try(self._writer.flush)

    def close(self) -> None:
        self._try(self._writer.close)

    def _try(self, call: Callable[..., Any], *values: Any) -> None:
        try:
            call(*values)
        except OSError as error:
            if not self._has_told:
                print(f"warning   scalars are missing in TensorBoard's files ({error.strerror})", file=sys.stderr)
            self._has_told = True


class Tracker:
    """wandb or trackio, which share these calls: a run of theirs a session, in a group named as the run-dir.

    The project is that of WANDB_PROJECT or TRACKIO_PROJECT, else distflash_jax.

    Raises:
      InputError: it does not start, as where nobody is logged in.
    """

    def __init__(self, package: str, run_dir: Path, *, first_step: int, settings: dict[str, Any]) -> None:
        self._module = importlib.import_module(package)
        # trackio keeps its data in one folder for all projects.
        place = {"dir": str(run_dir)} if package == "wandb" else {}
        try:
            with _stdout_is_json():
                self._module.init(
                    project=os.environ.get(f"{package.upper()}_PROJECT", "distflash_jax"),
                    group=run_dir.name,
                    name=f"{run_dir.name}-from-{first_step}",
                    config=settings,
                    **place,
                )
        # Each of them has errors of its own: of the network, of keys, of the disk.
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise InputError(f"--log {package}: a {package} that starts ({reason})") from error

    def scalars(self, step: int, values: dict[str, float]) -> None:
        self._module.log(values, step=step)

    def text(self, step: int, name: str, text: str) -> None:
        self._module.log({name: text}, step=step)

    def close(self) -> None:
        with _stdout_is_json():
            self._module.finish()


def _stdout_is_json() -> contextlib.redirect_stdout:
    """Sends what trackio prints to where sentences go."""
    return contextlib.redirect_stdout(sys.stderr)


def _as_code(text: str) -> str:
    """Markdown, as TensorBoard reads it, of a text whose columns stay."""
    return "\n".join(f"    {line}" for line in text.splitlines())
