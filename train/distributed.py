"""What the first process of a run does alone, what all agree on, and the parts of arrays that each of them has.

Of a single process every function here does the obvious.
"""

import functools
import re
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src.distributed import global_state  # nothing public says it until JAX starts and reads XLA's flags no more
from jax.experimental import multihost_utils
from jax.sharding import Sharding

from train.exits import Exit, Stop
from train.flags import InputError

RESUMES = "started again, the job resumes from its newest checkpoint"
_BARRIER_SECONDS = 300
_FIRST_ALONE_SECONDS = 24 * 3600

# Rows and columns of a batch.
Part = tuple[slice, slice]
WHOLE: Part = (slice(None), slice(None))


def num_processes() -> int:
    """Known before JAX starts, unlike `jax.process_count`."""
    return global_state.num_processes


def is_first() -> bool:
    """Whether this process writes: lines, scalars, and files other than checkpoints."""
    return global_state.process_id == 0


def barrier(name: str, seconds: float = _BARRIER_SECONDS) -> None:
    """Waits until every process is here.

    Raises:
      Stop: not all came in time; names those that are missing.
    """
    client = global_state.client
    if client is None:
        return
    try:
        client.wait_at_barrier(name, int(seconds * 1000))
    except jax.errors.JaxRuntimeError as error:
        if found := re.search(r"timed out task names:\s*((?:\d+\s+)+)", str(error)):
            hosts = dict(client.key_value_dir_get("host/"))
            missing = ", ".join(f"process {i} ({hosts[f'host/{i}']})" for i in found[1].split())
            message = f"{name}: {missing} did not come within {seconds:g} s; {RESUMES}"
            raise Stop(Exit.PEER_LOST, message) from None
        raise


def first_alone[T](name: str, make: Callable[[], T]) -> T:
    """make() in process 0 and then, once that is done, in each of the others, who find what it wrote.

    An InputError of process 0 ends all, whereby the others say nothing.
    """
    client = global_state.client
    if client is None:
        return make()
    if not is_first():
        if client.blocking_key_value_get(name, _FIRST_ALONE_SECONDS * 1000) != "done":
            sys.exit(Exit.BAD_INPUT)
        return make()
    try:
        made = make()
    except InputError:
        client.key_value_set(name, "refused")
        raise
    client.key_value_set(name, "done")
    return made


def any_process(flag: bool) -> bool:
    """Whether the flag is up in any process; all of them have to ask."""
    return bool(of_all(float(flag)).any())


def of_all(*numbers: float) -> np.ndarray:
    """The numbers of every process, a row each; all of them have to give theirs."""
    return np.atleast_2d(multihost_utils.process_allgather(np.array(numbers, np.float32)))


def part_of(sharding: Sharding, shape: tuple[int, int]) -> Part:
    """Rows and columns of a global array from the first to the last that devices of this process hold."""

    def hull(axis: int) -> slice:
        ends = [index[axis].indices(shape[axis])[:2] for index in indices.values() if index is not None]
        return slice(min(first for first, _ in ends), max(last for _, last in ends))

    indices = sharding.addressable_devices_indices_map(shape)
    return hull(0), hull(1)


def place(
    batch: dict[str, np.ndarray], sharding: Sharding, shape: tuple[int, int], part: Part = WHOLE
) -> dict[str, jax.Array]:
    """Global arrays of this shape, of which each process gives a part that holds at least its own."""
    offsets = [given.start or 0 for given in part]

    def block(array: np.ndarray, index: Any) -> np.ndarray:
        ends = [own.indices(size)[:2] for own, size in zip(index, shape, strict=True)]
        return array[tuple(slice(a - offset, b - offset) for (a, b), offset in zip(ends, offsets, strict=True))]

    return {
        name: jax.make_array_from_callback(shape, sharding, functools.partial(block, array))
        for name, array in batch.items()
    }


def gather(array: jax.Array) -> np.ndarray:
    """The whole of an array whose parts lie on devices of many processes."""
    return multihost_utils.process_allgather(array, tiled=True)
