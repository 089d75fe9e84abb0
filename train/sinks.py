"""Where scalars go: TensorBoard files in the run-dir always, and with --log wandb or trackio as well."""

import contextlib
import importlib
import importlib.util
import json
import os
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from tensorboardX import summary
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore
from tensorboardX.record_writer import masked_crc32c
from tensorboardX.utils import figure_to_image

from distflash_jax import plot
from distflash_jax.timeline import Timeline
from train.flags import InputError


class Sink(Protocol):
    """Takes the numbers, and the texts, of a step."""

    def scalars(self, step: int, values: dict[str, float]) -> None: ...

    def text(self, step: int, name: str, text: str) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in the run-dir; what an earlier session wrote of `first_step` and later ones is taken back.

    Not tensorboardX's writer: its thread ends where a disk is full or the clock is put back by weeks, and then its
    queue blocks the run.
    """

    def __init__(self, run_dir: Path, *, first_step: int) -> None:
        # A buffer in which a record finds room whole is one that keeps records whole where a disk takes them in part.
        self._file = (run_dir / _next_name(run_dir)).open("xb", buffering=2**20)
        self._has_told = False
        self._write(file_version="brain.Event:2")
        if first_step > 1:
            self._write(step=first_step, session_log=SessionLog(status=SessionLog.START))

    def scalars(self, step: int, values: dict[str, float]) -> None:
        found = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(step=step, summary=Summary(value=found))

    def text(self, step: int, name: str, text: str) -> None:
        self._write(step=step, summary=summary.text(name, _as_code(text)))

    def describe(self, settings: dict[str, Any], timeline: Timeline | None) -> None:
        """Adds the configuration as text, and the table of attention, if any, with a picture if matplotlib is there."""
        self.text(0, "config", json.dumps(settings, indent=2))
        if timeline is None:
            return
        self.text(0, "schedule", f"{timeline.schedule}\n\n{plot.text(timeline)}")
        if importlib.util.find_spec("matplotlib"):
            picture = figure_to_image(plot.figure(timeline))
            self._write(summary=summary.image("schedule", picture))

    def close(self) -> None:
        self._try(self._file.close)

    def _write(self, **content: Any) -> None:
        """Adds an event, as a record of its size and itself, each with a checksum."""
        event = Event(wall_time=time.time(), **content).SerializeToString()
        parts = [struct.pack("<Q", len(event)), event]
        record = b"".join(part + struct.pack("<I", masked_crc32c(part)) for part in parts)
        self._try(lambda: (self._file.write(record), self._file.flush()))

    def _try(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except OSError as error:
            if not self._has_told:
                print(f"warning   scalars are missing in TensorBoard's files ({error.strerror})", file=sys.stderr)
            self._has_told = True


def _next_name(run_dir: Path) -> str:
    """TensorBoard reads files in the order of their names, which hold the time: also where the clock was put back."""
    names = (path.name.split(".") for path in run_dir.glob("events.out.tfevents.*"))
    newest = max((int(words[3]) for words in names if words[3].isdecimal()), default=0)
    return f"events.out.tfevents.{max(int(time.time()), newest + 1):010}.{socket.gethostname()}"


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
