"""What a run checks of its own numbers: that they are finite, and come out the same a second time and everywhere."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from train import checksum
from train.exits import Exit, Stop
from train.report import say


class BadSteps:
    """Tells of steps whose loss or gradient is not finite, and of their batches; the step itself leaves them out.

    Args:
      most: such steps in a row that end the run.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0

    def check(self, step: int, metrics: dict[str, float], rows: str) -> None:
        """Counts one step.

        Raises:
          Stop: there were too many in a row.
        """
        if metrics["is_finite"]:
            self._count = 0
            return
        self._count += 1
        line = (
            f"step {step} has the loss {metrics['loss']:g} and a gradient of norm {metrics['grad_norm']:g}, and "
            f"changed nothing; its batch: {rows}"
        )
        if self._count == self._most:
            raise Stop(
                Exit.NOT_FINITE,
                f"{line}; that makes {self._most} in a row (--max-bad-steps), and the newest checkpoint is from before",
            )
        say(f"warning   {line}")


def checked(
    step: Callable[..., tuple[Any, Any]], every: int | None, by_name: Callable[[Any], dict[str, jax.Array]]
) -> Callable[..., tuple[Any, Any]]:
    """(number, state, batch) -> what the step gives, which is taken twice and compared at every so many of them.

    Then also replicas are compared, the same part of an array on several devices. Devices hold the state twice for
    that time.

    Args:
      step: (state, batch) -> (state, metrics); may donate the state.
      every: None compares nothing.
      by_name: the arrays of a state.

    Raises:
      Stop: something differs; names the first array, and a device.
    """

    def take(number: int, state: Any, batch: Any) -> tuple[Any, Any]:
        if every is None or number % every:
            return step(state, batch)
        first = np.asarray(checksum.by_device(by_name(step(jax.tree.map(jnp.copy, state), batch)[0])))
        state, metrics = step(state, batch)
        arrays = by_name(state)
        second = np.asarray(checksum.by_device(arrays))
        if found := _difference(first, second):
            device, name = _devices(arrays)[found[0]], list(arrays)[found[1]]
            what = f"step {number}, taken twice on the same batch, gave another {name} on {_named(device)}"
            raise Stop(Exit.NOT_DETERMINISTIC, f"{what}: {_ADVICE}")
        _compare_replicas(number, arrays, second)
        return state, metrics

    return take


_ADVICE = "a device that computes wrongly, or without --deterministic a kernel whose sums have no fixed order"


def _compare_replicas(step: int, arrays: dict[str, jax.Array], sums: np.ndarray) -> None:
    devices = _devices(arrays)
    for i, (name, array) in enumerate(arrays.items()):
        first, *others = np.array(checksum.holders(array.sharding, array.shape))
        for replica in others:
            for j in np.flatnonzero((sums[replica, i] != sums[first, i]).any(axis=1)):
                here, there = _named(devices[replica[j]]), _named(devices[first[j]])
                what = f"after step {step}, {name} on {here} is not what it is on {there}"
                raise Stop(Exit.NOT_DETERMINISTIC, f"{what}: {_ADVICE}")


def _devices(arrays: dict[str, jax.Array]) -> list[Any]:
    sharding: Any = next(iter(arrays.values())).sharding
    return list(sharding.mesh.devices.flat)


def _named(device: Any) -> str:
    return f"{device} of process {device.process_index}"


def _difference(first: np.ndarray, second: np.ndarray) -> tuple[int, int] | None:
    """(device, array), of the first array that differs."""
    differs = (first != second).any(axis=2)
    if not differs.any():
        return None
    array = int(differs.any(axis=0).argmax())
    return int(differs[:, array].argmax()), array
