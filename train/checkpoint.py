"""Checkpoints: saves the training state with its data position and restores the newest whole pair."""

import concurrent.futures
import contextlib
import copy
import functools
import json
import logging
import shutil
import sys
import threading
import zlib
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint import v1 as orbax

from train import checksum, distributed
from train.faults import fault
from train.flags import InputError

# Orbax would compile a slice for each array that replicas share in writing; those of a state that has any are small.
_CONTEXT = orbax.Context()
_CONTEXT.array.saving.use_replica_parallel = False
# It would take four times the processor's time to make floats 8 % smaller.
_CONTEXT.array.saving.use_compression = False
_PARTIAL = orbax.Context()
_PARTIAL.pytree.loading.partial_load = True
# What Orbax appends to the name of a checkpoint that is not whole yet, and we to that of one that is being deleted.
_TEMPORARY = ".orbax-checkpoint-tmp"
_DELETED = ".deleted"


class Restored(NamedTuple):
    """What a checkpoint holds: the state after `step` steps, the data position, and the checksum of the state."""

    step: int
    state: Any
    position: dict[str, Any]
    checksum: str


class Checkpoints:
    """The last checkpoints in a folder, each renamed from a temporary name once it is whole.

    A save starts a copy of the state off the devices and returns; the files follow in the background, and older
    checkpoints go once the new one is whole. `pending` tells how that stands, and at last the checksum of the state.
    With the state, those of its arrays are saved, by which a restore finds out whether it is the same to the last bit.

    Args:
      keep: how many checkpoints stay.
    """

    def __init__(self, directory: Path, *, keep: int = 3) -> None:
        self._directory = directory.absolute()
        self._keep = keep
        self._copies = False
        self.pending: concurrent.futures.Future[str] | None = None
        self.notes: list[str] = []

    def prepare(self, state: Any, *, copies: bool) -> bool:
        """Compiles what saves of such a state need; all processes have to ask.

        Args:
          copies: from now on a save does not wait until the state is off the devices, as it goes through pinned memory
            of the host, which keeps room for it. On CPUs, where it is read in place, that is only more memory.

        Returns:
          Whether there is that room, if asked for.
        """
        arrays = by_name(state)
        checksum.digests(arrays)
        if copies:
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                jax.block_until_ready(jax.tree.map(_copy, arrays))
                self._copies = True
        return self._copies == copies

    def save(self, step: int, state: Any, position: dict[str, Any]) -> None:
        """Begins to save what is needed to go on after `step` steps; the state may then be donated.

        To be called when no save is under way. `position` is JSON. What goes wrong is in `pending`, nothing is raised.
        """
        arrays, position, metadata = by_name(state), copy.deepcopy(position), {}
        digests = checksum.begin(arrays)
        complete = lambda: metadata.update(_sealed({"position": position, "arrays": digests()}))
        self.pending = saving = concurrent.futures.Future()

        def write() -> None:
            try:
                response.result()
                fault("whole", step, jax.process_index())
                if distributed.is_first():
                    self._delete_old()
                saving.set_result(checksum.of_state(digests()))
            # Orbax, TensorStore and the disk each have their own errors; all of them are to be told and tried again.
            except BaseException as error:
                self._fail(saving, step, error)

        try:
            fault("save", step, jax.process_index())
            read = jax.tree.map(_copy, arrays) if self._copies else arrays
            tree = _Tree(read, complete, waits=not self._copies)
            with _CONTEXT:
                response = orbax.save_checkpointables_async(
                    str(self._directory / str(step)), {"state": tree}, custom_metadata=metadata
                )
        except Exception as error:
            self._fail(saving, step, error)
        else:
            threading.Thread(target=write, name="save", daemon=True).start()

    def restore(self, state_struct: Any, *, step: int | None = None) -> Restored | None:
        """Returns the newest whole checkpoint, or None where there is none. To be called before the first save.

        A checkpoint that cannot be read, or is not what was saved, is moved to `broken/` beside this folder, with a
        line in `notes`, and the next older one is taken. What an interrupted save left is removed, with a line too.

        Args:
          state_struct: ShapeDtypeStructs with shardings, in the structure of the state.
          step: the only one to look at; newer ones are moved to `later/`.

        Raises:
          InputError: the saved state has other shapes or dtypes, or no checkpoint is whole.
        """
        self._remove_leftovers()
        steps = self._steps()
        if step is not None and step not in steps:
            allowed = f"one of the steps {steps}" if steps else "left out, as there is no checkpoint"
            raise InputError(f"--checkpoint {step}: {allowed} in {self._directory.parent}")
        candidates = steps if step is None else [step]
        for index, candidate in enumerate(candidates):
            found, reason = self._load_everywhere(candidate, state_struct)
            if found is not None:
                newer = steps[: steps.index(candidate)]
                self._move_away(newer, "broken" if step is None else "later")
                if step is not None and newer:
                    self.notes.append(f"checkpoints {newer} are moved to later/, as --checkpoint {step} begins before")
                return found
            more = index + 1 < len(candidates)
            self.notes.append(f"checkpoint {candidate} is not whole{', trying an older one' * more} ({reason})")
        if candidates:
            raise InputError(
                f"--run-dir {self._directory.parent}: a folder with a whole checkpoint, "
                f"and none of the steps {candidates} can be read; {self.notes[-len(candidates)]}"
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
        step, path = steps[0], self._directory / str(steps[0])

        def is_not_whole(reason: str) -> InputError:
            return InputError(f"--run-dir {self._directory.parent}: a whole checkpoint {step} ({reason})")

        try:
            found = _unsealed(path)["arrays"]
            orbax.checkpointables_metadata(str(path)).metadata["state"].items()
        # As in `_load_everywhere`.
        except Exception as error:
            raise is_not_whole(cause(error)) from error
        parts = {name.partition(".")[0] for name in struct}
        self._check_same(step, struct, {name: x for name, x in found.items() if name.partition(".")[0] in parts})

        def read(name: str) -> jax.Array:
            sharding = struct[name].sharding or SingleDeviceSharding(jax.local_devices()[0])
            wanted = {name: jax.ShapeDtypeStruct(struct[name].shape, struct[name].dtype, sharding=sharding)}
            try:
                with _PARTIAL:
                    array = orbax.load_checkpointables(str(path), {"state": wanted})["state"][name]
            except Exception as error:
                raise is_not_whole(cause(error)) from error
            if checksum.digests({name: array})[name] != found[name]:
                raise is_not_whole(f"{name} is not what was saved")
            return array

        return step, read

    def close(self) -> None:
        """Waits until the last save, if any, has succeeded or failed."""
        if self.pending is not None:
            self.pending.exception()

    def _steps(self) -> list[int]:
        """The newest first."""
        return sorted((int(path.name) for path in self._directory.glob("[0-9]*") if path.name.isdigit()), reverse=True)

    def _fail(self, saving: concurrent.futures.Future[None], step: int, error: BaseException) -> None:
        # The disk may be full, and no more of it should be taken by each failure. Where another process has failed
        # before, this one may be late, and the same step be saved again already.
        if distributed.is_first() and self.pending is saving:
            for path in self._directory.glob(f"{step}{_TEMPORARY}*"):
                shutil.rmtree(path, ignore_errors=True)
        fault("failed", step, jax.process_index())
        saving.set_exception(error)

    def _delete_old(self) -> None:
        """Under another name first: a folder that is deleted in part could be taken for a checkpoint."""
        for path in self._directory.glob(f"*{_TEMPORARY}*"):  # of saves that failed
            shutil.rmtree(path, ignore_errors=True)
        for old in self._steps()[self._keep :]:
            target = self._directory / f"{old}{_DELETED}"
            with contextlib.suppress(OSError):
                (self._directory / str(old)).rename(target)
                fault("delete", old)
            shutil.rmtree(target, ignore_errors=True)

    def _remove_leftovers(self) -> None:
        for path in sorted(self._directory.glob("*")) if distributed.is_first() else ():
            if _TEMPORARY in path.name or path.name.endswith(_DELETED):
                shutil.rmtree(path, ignore_errors=True)
                self.notes.append(f"removed {path.name}, left by a run that was killed")

    def _load_everywhere(self, step: int, state_struct: Any) -> tuple[Restored | None, str]:
        """The checkpoint if it is whole in all processes, else None and why not."""
        found, reason = None, "in another process"
        try:
            with _alone():
                found = self._load(step, state_struct)
        except InputError:
            raise
        # Orbax, TensorStore and JSON each have their own errors for damaged files, KeyError among them.
        except Exception as error:
            reason = cause(error)
        if distributed.any_process(found is None) or found is None:
            return None, reason
        state, saved = found
        digests = checksum.digests(by_name(state))
        wrong = [name for name, digest in digests.items() if digest != saved["arrays"][name]]
        if distributed.any_process(bool(wrong)):
            return None, f"{wrong[0]} is not what was saved" if wrong else reason
        return Restored(step, state, saved["position"], checksum.of_state(digests)), ""

    def _load(self, step: int, state_struct: Any) -> tuple[Any, dict[str, Any]]:
        """This process's part, and what was saved with it."""
        path, wanted = self._directory / str(step), by_name(state_struct)
        saved = _unsealed(path)
        self._check_same(step, wanted, saved["arrays"])
        loaded = orbax.load_checkpointables(str(path), {"state": wanted})["state"]
        return jax.tree.unflatten(jax.tree.structure(state_struct), [loaded[name] for name in wanted]), saved

    def _check_same(self, step: int, wanted: dict[str, Any], found: dict[str, str]) -> None:
        """Orbax itself would cast another dtype in silence."""
        for name in sorted(wanted.keys() | found.keys()):
            ours = checksum.describe(wanted[name]) if name in wanted else "absent"
            theirs = found.get(name, "absent").split()[0]
            if ours != theirs:
                raise InputError(
                    f"--run-dir {self._directory.parent}: a folder of the same model; "
                    f"{name} is {theirs} in its step {step} and {ours} here"
                )

    def _move_away(self, steps: list[int], folder: str) -> None:
        for step in steps if distributed.is_first() else ():
            target = self._directory.with_name(folder) / str(step)
            shutil.rmtree(target, ignore_errors=True)
            target.parent.mkdir(exist_ok=True)
            (self._directory / str(step)).rename(target)
        if steps:
            distributed.barrier("checkpoints are moved away")


class _Tree:
    """What Orbax saves as it does any tree, but all of it in a thread of its own.

    Args:
      complete: is called there before the end.
      waits: the arrays are read before, as they may be donated.
    """

    def __init__(self, arrays: dict[str, jax.Array], complete: Callable[[], None], *, waits: bool) -> None:
        self._arrays = arrays
        self._complete = complete
        self._waits = waits

    async def save(self, directory: orbax.path.PathAwaitingCreation) -> Awaitable[None]:
        # The handler keeps the options that hold here, and not in that thread.
        begin = functools.partial(orbax.handlers.PyTreeHandler().save, directory, self._arrays)
        begun = await begin() if self._waits else None

        async def write() -> None:
            await (begun or await begin())
            self._complete()

        return write()

    async def load(self, directory: orbax.path.Path) -> Awaitable[None]:
        """Orbax's own handler does."""
        raise NotImplementedError


def _copy(array: jax.Array) -> jax.Array:
    """The same in pinned memory of the hosts, which may not be there yet as this returns."""
    pinned = lambda sharding: sharding.with_memory_kind("pinned_host")
    parts = [shard.data for shard in array.addressable_shards]
    copies = jax.device_put(parts, [pinned(part.sharding) for part in parts])
    return jax.make_array_from_single_device_arrays(array.shape, pinned(array.sharding), copies)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps from stderr what Orbax, asyncio and TensorStore print at length of errors that a run tells in one line."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    shown = sys.unraisablehook
    # Of each array after the first that failed, as Orbax has closed the loop by then.
    sys.unraisablehook = lambda found: None if str(found.exc_value) == "Event loop is closed" else shown(found)
    yield
    # Not where an error ends the run: threads of TensorStore may still find the loop closed.
    sys.unraisablehook = shown


def _sealed(content: dict[str, Any]) -> dict[str, Any]:
    """What Orbax keeps with a checkpoint: JSON that tells if a bit of it is flipped."""
    text = json.dumps(content)
    return {"content": text, "crc32": zlib.crc32(text.encode())}


def _unsealed(path: Path) -> dict[str, Any]:
    """What was saved beside the state of a checkpoint.

    Raises:
      Exception: of any kind, as it is damaged.
    """
    # Orbax's own function also reads the metadata of all arrays, and leaves coroutines behind where they are damaged.
    metadata = json.loads((path / "_CHECKPOINT_METADATA").read_text())["custom_metadata"]
    if metadata["crc32"] != zlib.crc32(metadata["content"].encode()):
        raise ValueError("its metadata are not what was saved")
    return json.loads(metadata["content"])


def _alone() -> orbax.Context:
    """Reads this process's part without waiting for the others, of which one may find a damaged file."""
    context = orbax.Context()
    context.multiprocessing.primary_host = jax.process_index()
    context.multiprocessing.active_processes = {jax.process_index()}
    return context


def by_name(tree: Any) -> dict[str, Any]:
    """The leaves by their path, so that a checkpoint does not depend on the classes that hold them."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def cause(error: BaseException) -> str:
    """The first line of what began a chain of errors."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"
