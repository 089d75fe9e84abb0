"""Checkpoints: saves the training state with its data position and restores the newest whole pair."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint import v1 as orbax

from train import distributed
from train.flags import InputError

_KEPT = 3

# Orbax compiles a slice for each array that the replicas share in writing: not worth it below a mebibyte.
_CONTEXT = orbax.Context()
_CONTEXT.array.saving.min_slice_bytes_for_replica_parallel = 2**20
_PARTIAL = orbax.Context()
_PARTIAL.pytree.loading.partial_load = True


class Checkpoints:
    """The last three checkpoints in a folder, each renamed from a temporary name once it is whole.

    A save copies the state off the devices and returns; the files follow in the background, and what goes
    wrong with them is raised by the next save or by `close`.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory.absolute()
        self._checkpointer: orbax.training.Checkpointer | None = None
        self._saving: orbax.AsyncResponse[bool] | None = None
        self.notes: list[str] = []

    def save(self, step: int, state: Any, position: dict[str, Any]) -> None:
        """Saves what is needed to go on after `step` steps; `position` is JSON."""
        self._wait()
        # Not before: opening a folder with a damaged checkpoint fails, and `restore` moves those away.
        self._checkpointer = self._checkpointer or self._open()
        self._saving = self._checkpointer.save_checkpointables_async(
            step, {"state": _by_name(state)}, custom_metadata={"position": position}, force=True
        )

    def restore(self, state_struct: Any) -> tuple[int, Any, dict[str, Any]] | None:
        """Returns (step, state, position) of the newest whole checkpoint, or None where there is none.

        A checkpoint that cannot be read is moved to `broken/` beside this folder, with a line in `notes`, and
        the next older one is taken. To be called before the first save.

        Args:
          state_struct: ShapeDtypeStructs with shardings, in the structure of the state.

        Raises:
          InputError: the saved state has other shapes or dtypes, or no checkpoint is whole.
        """
        steps = self._steps()
        for broken, step in enumerate(steps):
            found, reason = None, "in another process"
            try:
                with _alone():
                    found = self._load(step, state_struct)
            except InputError:
                raise
            # Orbax, TensorStore and JSON each have their own errors for damaged files, KeyError among them.
            except Exception as error:
                reason = _reason(error)
            if distributed.any_process(found is None):
                self.notes.append(f"checkpoint {step} is not whole, trying an older one ({reason})")
            elif found is not None:
                self._move_away(steps[:broken])
                return step, *found
        if steps:
            raise InputError(
                f"--run-dir {self._directory.parent}: a folder with a whole checkpoint, "
                f"and none of the steps {steps} can be read; {self.notes[0]}"
            )
        return None

    def newest(self, struct: dict[str, Any]) -> tuple[int, Callable[[str], jax.Array]]:
        """Returns the step of the newest checkpoint and what reads one of its arrays by name, such as params.norm.

        Args:
          struct: the shapes and dtypes that the arrays must have, by name; all that are in the same parts of the state.
            They come to lie as it says, without shardings on the first device.

        Raises:
          InputError: there is no checkpoint, or it cannot be read, or its arrays are others.
        """
        if not (steps := self._steps()):
            raise InputError(f"--run-dir {self._directory.parent}: a folder with a checkpoint")
        step, path = steps[0], str(self._directory / str(steps[0]))
        try:
            found = orbax.checkpointables_metadata(path).metadata["state"]
        # As in `restore`, whose run would fall back to an older one.
        except Exception as error:
            raise InputError(
                f"--run-dir {self._directory.parent}: a whole checkpoint {step} ({_reason(error)})"
            ) from error
        parts = {name.partition(".")[0] for name in struct}
        self._check_same(step, struct, {name: x for name, x in found.items() if name.partition(".")[0] in parts})

        def read(name: str) -> jax.Array:
            sharding = struct[name].sharding or SingleDeviceSharding(jax.local_devices()[0])
            wanted = {name: jax.ShapeDtypeStruct(struct[name].shape, struct[name].dtype, sharding=sharding)}
            with _PARTIAL:
                return orbax.load_checkpointables(path, {"state": wanted})["state"][name]

        return step, read

    def close(self) -> None:
        """Waits until the last save is on disk; raises what went wrong with it."""
        self._wait()
        if self._checkpointer is not None:
            self._checkpointer.close()

    def _steps(self) -> list[int]:
        """The newest first."""
        return sorted((int(path.name) for path in self._directory.glob("[0-9]*") if path.name.isdigit()), reverse=True)

    def _open(self) -> orbax.training.Checkpointer:
        return orbax.training.Checkpointer(
            str(self._directory),
            context=_CONTEXT,
            preservation_policy=orbax.training.preservation_policies.LatestN(_KEPT),  # pyright: ignore[reportArgumentType]
            cleanup_tmp_directories=True,
        )

    def _wait(self) -> None:
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    # By path, not through the Checkpointer: one checkpoint without its metadata keeps that from opening.
    def _load(self, step: int, state_struct: Any) -> tuple[Any, dict[str, Any]]:
        path, wanted = str(self._directory / str(step)), _by_name(state_struct)
        saved = orbax.checkpointables_metadata(path)
        if saved.metadata["state"] is None:
            raise ValueError("the list of its arrays cannot be read")
        self._check_same(step, wanted, saved.metadata["state"])
        loaded = orbax.load_checkpointables(path, {"state": wanted})["state"]
        state = jax.tree.unflatten(jax.tree.structure(state_struct), [loaded[name] for name in wanted])
        metadata: Any = saved.custom_metadata
        return state, metadata["position"]

    def _check_same(self, step: int, wanted: dict[str, Any], found: dict[str, Any]) -> None:
        """Orbax itself would cast another dtype in silence."""
        for name in sorted(wanted.keys() | found.keys()):
            ours, theirs = (_describe(arrays.get(name)) for arrays in (wanted, found))
            if ours != theirs:
                raise InputError(
                    f"--run-dir {self._directory.parent}: a folder of the same model; "
                    f"{name} is {theirs} in its step {step} and {ours} here"
                )

    def _move_away(self, steps: list[int]) -> None:
        for step in steps if distributed.is_first() else ():
            target = self._directory.with_name("broken") / str(step)
            shutil.rmtree(target, ignore_errors=True)
            target.parent.mkdir(exist_ok=True)
            (self._directory / str(step)).rename(target)
        distributed.barrier("broken checkpoints are moved away")


def _alone() -> orbax.Context:
    """Reads this process's part without waiting for the others, of which one may find a damaged file."""
    context = orbax.Context()
    context.multiprocessing.primary_host = jax.process_index()
    context.multiprocessing.active_processes = {jax.process_index()}
    return context


def _by_name(tree: Any) -> dict[str, Any]:
    """The leaves by their path, so that a checkpoint does not depend on the classes that hold them."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _reason(error: BaseException) -> str:
    """The first line of what began a chain of errors."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"


def _describe(array: Any) -> str:
    return "absent" if array is None else f"{jnp.dtype(array.dtype).name}{list(array.shape)}"
