"""Keeps a second run out of a run-dir, and clears away what a killed run left half-written in it."""

import contextlib
import datetime
import fcntl
import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from train.flags import InputError

# Of config.json, and of tokens that are kept.
_HALF_WRITTEN = ("*.partial", "tokens/*.partial", "tokens/*.starts.*.npy")


@contextlib.contextmanager
def locked(run_dir: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Holds the lock of a run-dir, which the system lets go of whichever way the process ends.

    Tells `say` what was removed, and where the file system knows no locks.

    Raises:
      InputError: another process has it.
    """
    with (run_dir / "lock").open("a+") as file:
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


def _owner(file) -> str:
    try:
        file.seek(0)
        owner = json.loads(file.read())
        return f"process {owner['pid']} on {owner['host']} has it since {owner['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process has it"
