"""The first Ctrl-C or SIGTERM asks a run to end after the step in progress; the second ends it at once.

SIGUSR1, or a file of the name SAVE in the run-dir, asks for a checkpoint.
"""

import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self

_STOP = (signal.SIGINT, signal.SIGTERM)
_SAVE = signal.SIGUSR1


class Interrupt:
    """`requested` turns true at the first signal; the second ends the process with 128 + its number.

    Python runs signal handlers on the main thread between two bytecodes, which a compilation holds up for
    minutes. The byte that a signal also writes to a socket wakes a thread, which answers meanwhile.

    Args:
      save_file: asks for a checkpoint as soon as it exists, and is removed; None: in another process's care.
    """

    def __init__(self, on_request: Callable[[], None], save_file: Path | None = None) -> None:
        self.requested = False
        self._on_request = on_request
        self._save_requested = False
        self._save_file = save_file

    def __enter__(self) -> Self:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno())
        self._previous = {number: signal.signal(number, lambda *_: None) for number in (*_STOP, _SAVE)}
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)
        signal.set_wakeup_fd(self._previous_fd)
        self._writer.close()
        self._thread.join()
        self._reader.close()

    def take_save_request(self) -> bool:
        """Whether a checkpoint was asked for since the last call."""
        requested, self._save_requested = self._save_requested, False
        if self._save_file is not None and self._save_file.exists():
            self._save_file.unlink(missing_ok=True)
            requested = True
        return requested

    def _listen(self) -> None:
        while received := self._reader.recv(1):
            if received[0] == _SAVE:
                self._save_requested = True
            elif received[0] in _STOP:
                if self.requested:
                    os._exit(128 + received[0])
                self.requested = True
                self._on_request()
