"""Many processes as one job: who takes part, how they meet, and how all of them end where one does.

SLURM (srun), Open MPI and Kubernetes tell JAX who takes part; elsewhere --coordinator, --num-processes and
--process-id do. A single process starts nothing.
"""

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple, Never

import jax
from jax._src.clusters import ClusterEnv  # nothing public says how many processes there are before it joins them
from jax._src.distributed import global_state

from train.config import Config
from train.distributed import RESUMES, barrier, is_first
from train.exits import Exit, mute, one_line, tell
from train.flags import InputError

_MEETING_SECONDS = 300
# A process that died is missed after so many seconds, by which all others end too.
_HEARTBEAT_SECONDS = 10
# At the end of a run; one that fails does not wait.
_SHUTDOWN_SECONDS = 10
# What one process failed with may well fail all of them, and each then has a line and an exit code of its own.
_GRACE_SECONDS = 2
_FAILED = "what the first process failed with"
# This process is on its way out, for a reason of its own.
_ended = threading.Event()
_LOOPBACK = ("localhost", "127.0.0.1")


class Job(NamedTuple):
    """Who takes part: process 0 listens at `coordinator`; `local_devices` are this process's, None for all."""

    coordinator: str
    num_processes: int
    process_id: int
    local_devices: list[int] | None = None

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.coordinator.rsplit(":", 1)
        return host.strip("[]"), int(port)


def find_job(config: Config) -> Job | None:
    """The job of the flags, else that of the environment; None for a process on its own.

    Raises:
      InputError: the environment starts several processes, and JAX cannot tell how they meet.
    """
    if config.coordinator is not None and config.num_processes is not None and config.process_id is not None:
        job = Job(config.coordinator, config.num_processes, config.process_id)
        return job if job.num_processes > 1 else None
    # A batch script has SLURM's variables too; only in a step, which srun starts, does JAX find all of them.
    tasks = (os.environ.get(name, "1") for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"))
    is_kubernetes = "JOB_COMPLETION_INDEX" in os.environ
    if config.num_processes == 1 or not (is_kubernetes or any(count != "1" for count in tasks)):
        return None
    try:
        coordinator, count, index, devices = ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, None, None, _MEETING_SECONDS
        )
    # Each kind of cluster has its own errors: of a client of Kubernetes, of mpi4py, of a name that is missing.
    except Exception as error:
        raise _cannot_meet(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error
    if coordinator is None or count is None or index is None:
        if is_kubernetes:
            raise _cannot_meet("the package kubernetes is not installed")
        return None
    if "JAX_LOCAL_DEVICE_IDS" in os.environ:  # which JAX reads as it joins
        devices = None
    return Job(coordinator, count, index, list(devices) if devices else None) if count > 1 else None


def _cannot_meet(reason: str) -> InputError:
    return InputError(
        f"--coordinator: HOST:PORT, with --num-processes and --process-id, as JAX cannot tell them here ({reason}); "
        "or --num-processes 1 for a process on its own"
    )


@contextlib.contextmanager
def joined(job: Job | None, seconds: float = _MEETING_SECONDS) -> Iterator[None]:
    """Makes this process one of the job's for the time of a run; only the first has a stdout.

    Must begin before JAX starts. Ends the process with exit code 2 and one line if they have not met in time. What
    one of the processes fails with ends all: itself at once, as Python's own exit would wait for the others, and
    these within `_HEARTBEAT_SECONDS` and `_GRACE_SECONDS`, each with one line.

    Raises:
      InputError: process 0 cannot listen.
    """
    if job is None:
        with _ended_by_threads():
            yield
        return
    _meet(job, seconds)
    client: Any = global_state.client
    client.key_value_set(f"host/{job.process_id}", socket.gethostname())
    _wait_before_abort()
    if not is_first():
        threading.Thread(target=_watch_first, args=(job,), daemon=True).start()
    watches = [threading.Thread(target=f, args=(client, job), daemon=True) for f in (_watch_failures, _watch_lives)]
    for watch in watches:
        watch.start()
    with _stdout_of_first(), _ended_by_threads():
        try:
            yield
            # JAX waits for the others too as it ends, but gives up early.
            barrier("the end of the run")
        except BaseException as error:
            leave(error)
        _ended.set()
        # Ends their calls too, in which no thread may be when Python ends.
        jax.distributed.shutdown()
        for watch in watches:
            watch.join()


def _meet(job: Job, seconds: float) -> None:
    """Returns once all processes are there."""
    host, port = job.address
    if job.process_id == 0:
        # Where gRPC cannot listen, JAX may end in a segmentation fault.
        try:
            socket.create_server((host if host in _LOOPBACK else "", port)).close()
        except OSError as error:
            raise InputError(
                f"--coordinator {job.coordinator}: a free port here ({os.strerror(error.errno or 0)})"
            ) from None
    if host in _LOOPBACK:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    # It would take SIGTERM from `train.interrupt`, and from a process that is not training yet.
    jax.config.update("jax_enable_preemption_service", False)
    # JAX itself aborts with a stack of C++ where the time is over.
    limit = threading.Timer(seconds, _give_up, (job, seconds))
    limit.daemon = True
    limit.start()
    jax.distributed.initialize(
        job.coordinator,
        job.num_processes,
        job.process_id,
        local_device_ids=job.local_devices,
        cluster_detection_method="deactivate",
        initialization_timeout=int(seconds) + 60,
        heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
        shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
        # By itself it would listen on every interface.
        coordinator_bind_address=job.coordinator if host in _LOOPBACK else None,
    )
    limit.cancel()


def _give_up(job: Job, seconds: float) -> None:
    try:
        socket.create_connection(job.address, timeout=5).close()
        reason = f"--num-processes {job.num_processes}: as many as are started; not all came in {seconds:g} s"
    except OSError as error:
        reason = f"--coordinator {job.coordinator}: where process 0 listens; no answer in {seconds:g} s ({error})"
    print(f"error: {reason}", file=sys.stderr, flush=True)
    os._exit(Exit.BAD_INPUT)


@contextlib.contextmanager
def _stdout_of_first() -> Iterator[None]:
    """Gives stdout to Python's prints in the first process alone; what C++ prints (Gloo, NCCL) goes to stderr."""
    sys.stdout.flush()
    original = os.dup(1)
    os.dup2(2, 1)
    try:
        target = os.dup(original) if is_first() else os.open(os.devnull, os.O_WRONLY)
        with os.fdopen(target, "w") as stdout, contextlib.redirect_stdout(stdout):
            yield
    finally:
        os.dup2(original, 1)
        os.close(original)


@contextlib.contextmanager
def _ended_by_threads() -> Iterator[None]:
    """What a thread of its own fails with ends the process too: by itself Python would go on without the thread."""
    previous, threading.excepthook = threading.excepthook, lambda failed: leave(failed.exc_value or SystemExit(1))
    try:
        yield
    finally:
        threading.excepthook = previous


def leave(error: BaseException) -> Never:
    """Prints what ended this process, tells the others of the job, and ends it."""
    client = global_state.client
    # Messages break off before anyone is missed: whoever is gone, `_watch_lives` then ends this process.
    if client is not None and isinstance(error, jax.errors.JaxRuntimeError):
        time.sleep(_HEARTBEAT_SECONDS + 1)
    _ended.set()
    code = tell(error)
    mute()
    if client is not None and not isinstance(error, SystemExit):
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # another one was the first
            name = f"process {global_state.process_id} ({socket.gethostname()})"
            client.key_value_set(_FAILED, f"{name}: {one_line(error)}")
        if is_first():  # without it, none could listen
            time.sleep(_GRACE_SECONDS + 1)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _watch_failures(client: Any, _: Job) -> None:
    # Where process 0 is gone, `_watch_first` tells.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        line = client.blocking_key_value_get(_FAILED, 2**31 - 1)
        time.sleep(_GRACE_SECONDS)
        _end_with(line)


def _watch_first(job: Job) -> None:
    """JAX's client answers no more once it misses process 0; a connection of our own breaks at the same moment."""
    while not _ended.is_set():
        try:
            with socket.create_connection(job.address, timeout=_HEARTBEAT_SECONDS) as connection:
                while connection.recv(4096):  # the server waits for a greeting and at last hangs up
                    pass
        except ConnectionRefusedError:
            _end_with(f"process 0, which listens at {job.coordinator}, is gone")
        except OSError:
            pass
        time.sleep(1)


def _watch_lives(client: Any, job: Job) -> None:
    """JAX knows who is gone after `_HEARTBEAT_SECONDS`, but would only abort, without a line that says who."""
    everyone, hosts = list(range(job.num_processes)), {}
    try:
        # Returns once all who live have asked.
        while len(live := client.get_live_nodes(everyone)) == len(everyone):
            hosts = hosts or dict(client.key_value_dir_get("host/"))  # now: once someone is gone, JAX answers no more
            time.sleep(1)
    except jax.errors.JaxRuntimeError:
        return  # as above
    gone = ", ".join(f"process {i} ({hosts.get(f'host/{i}', 'host unknown')})" for i in everyone if i not in live)
    _end_with(f"{gone} is gone without a word: killed, out of memory, or its host is down")


def _wait_before_abort() -> None:
    """Where another process is gone, JAX aborts as soon as `_watch_failures` and `_watch_lives` learn of it.

    C's sleep as the handler of SIGABRT, whose number it takes for seconds, leaves them time for their line and exit
    code. It needs nothing that the thread which aborts could hold, and the abort then goes on.
    """
    libc = ctypes.CDLL(None)
    libc.signal(ctypes.c_int(signal.SIGABRT), ctypes.cast(libc.sleep, ctypes.c_void_p))


def _end_with(line: str) -> None:
    if not _ended.is_set():
        os.write(mute(), f"error: {line}; {RESUMES}\n".encode())
        os._exit(Exit.PEER_LOST)
