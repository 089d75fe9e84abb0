"""The folder of a run: its name, the settings that may not change in it, and the lock that keeps a second run out."""

import contextlib
import datetime
import fcntl
import hashlib
import json
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, cast

from train.config import Config, settings_of
from train.flags import InputError, flag_name

_MAY_CHANGE = {
    *("steps", "save_every", "keep", "profile_steps", "log", "stuck_after", "max_bad_steps", "check_determinism"),
    *("eval_data", "eval_every", "eval_batches", "sample_every", "sample_prompt"),
}
# How a step is computed, not what: another one goes on with the same batches, and the same losses up to rounding. The
# default run-dir tells them apart nevertheless.
_HOW = {"mesh", "remat", "strategy", "accumulate", "platform", "deterministic", "max_bad_lines"}
# Of config.json, and of tokens that are kept.
_HALF_WRITTEN = ("*.partial", "tokens/*.partial", "tokens/*.starts.*.npy")


def run_dir_of(config: Config) -> Path:
    """The folder of the run, which need not exist yet."""
    return config.run_dir or default_run_dir(config)


def default_run_dir(config: Config) -> Path:
    """runs/<model>-<hash>, where the hash covers all that may not change during a run."""
    settings = {name: value for name, value in settings_of(config).items() if name not in _MAY_CHANGE | {"origin"}}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    return Path("runs") / f"{config.model or cast(Path, config.init_from).resolve().name}-{digest}"


def check_run_dir(config: Config) -> None:
    """Finds out at once whether `open_run_dir` will accept the run's folder, which it makes but writes nothing into.

    Raises:
      InputError: the folder holds another configuration, or cannot be written.
    """
    run_dir, settings = run_dir_of(config), settings_of(config)
    path = run_dir / "config.json"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=run_dir):
            saved = dict(json.loads(path.read_text())) if path.exists() else settings
    except (OSError, ValueError, TypeError) as error:
        raise InputError(
            f"--run-dir {run_dir}: a folder that can be written, with a whole config.json ({error})"
        ) from None
    if saved.get("origin") != settings["origin"] and saved.get("init_from") == settings["init_from"]:
        raise InputError(f"--init-from {config.init_from}: the config.json with which the run in {run_dir} began")
    accepted = _MAY_CHANGE | _HOW | {name.replace("-", "_") for name in config.accept} | {"origin"}
    changed = [
        name for name in sorted((saved.keys() | settings.keys()) - accepted) if saved.get(name) != settings.get(name)
    ]
    if changed:
        words = [f"{flag_name(name)} was {saved.get(name)} and is {settings.get(name)}" for name in changed]
        names = ",".join(flag_name(name)[2:] for name in changed)
        raise InputError(
            f"--run-dir {run_dir}: a folder of the same configuration; {', '.join(words)}; --accept {names} goes on so"
        )


def open_run_dir(config: Config, *, is_first: bool = True) -> Path:
    """Gives the run's folder its config.json, or accepts the one that holds this configuration.

    Args:
      is_first: of the run's processes; the others have to find what that one wrote.

    Raises:
      InputError: as `check_run_dir`.
    """
    run_dir = run_dir_of(config)
    path = run_dir / "config.json"
    if not is_first and not path.exists():
        raise InputError(f"--run-dir {run_dir}: a folder that all processes share, and process 0 wrote elsewhere")
    check_run_dir(config)
    if is_first:
        partial = path.with_suffix(".partial")
        try:
            partial.write_text(json.dumps(settings_of(config), indent=2) + "\n")
            partial.replace(path)
        except OSError as error:
            raise InputError(f"--run-dir {run_dir}: a folder that can be written ({error.strerror})") from None
    return run_dir


@contextlib.contextmanager
def locked(run_dir: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Holds the lock of a run-dir, which the system lets go of whichever way the process ends.

    Tells `say` what a killed run left half-written and is removed, and where the file system knows no locks.

    Raises:
      InputError: another process has it, or it cannot be written.
    """
    try:
        file = (run_dir / "lock").open("a+")
    except OSError as error:  # such as another user's
        raise InputError(f"--run-dir {run_dir}: a folder whose file lock can be written ({error.strerror})") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"--run-dir {run_dir}: a folder that no other run is in; {_owner(file)}") from None
        except OSError as error:
            say(f"warning   nothing keeps a second run out of {run_dir}, which cannot be locked ({error.strerror})")
        file.truncate(0)
        started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        file.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": started}) + "\n")
        file.flush()
        for path in sorted(path for pattern in _HALF_WRITTEN for path in run_dir.glob(pattern)):
            path.unlink(missing_ok=True)
            say(f"removed {path.relative_to(run_dir)}, left by a run that was killed")
        yield


def _owner(file: IO[str]) -> str:
    try:
        file.seek(0)
        owner = json.loads(file.read())
        return f"process {owner['pid']} on {owner['host']} has it since {owner['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process has it"
