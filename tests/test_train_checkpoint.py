"""train.checkpoint: an exact round trip, and what happens to damaged and to foreign checkpoints."""

import resource
import shutil
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from train import checkpoint, checksum
from train.checkpoint import Checkpoints
from train.flags import InputError, MeshShape
from train.mesh import make_mesh


def make_state(offset: float):
    """A state of three dtypes, replicated and sharded, in nested containers."""
    mesh = make_mesh(MeshShape(seq=8), "cpu")
    state = {
        "step": jnp.int32(offset),
        "params": {"w": jnp.arange(64, dtype=jnp.float32).reshape(8, 8) / 7 + offset},
        "opt": (jnp.full(3, offset, jnp.bfloat16), [jnp.ones((), jnp.uint32)]),
    }
    specs = {"step": P(), "params": {"w": P("seq")}, "opt": (P(), [P()])}
    return jax.tree.map(lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)), state, specs)


def struct_of(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def save_steps(directory: Path, steps: list[int]) -> None:
    checkpoints = Checkpoints(directory)
    for step in steps:
        checkpoints.save(step, make_state(step), {"iterator": {"next_index": step}, "checksum": 2**32 - step})
        checkpoints.pending.result()


def assert_equal(ours, theirs) -> None:
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype
        assert a.sharding == b.sharding
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def restored_step(directory: Path) -> int:
    """Restores, checks that state and position belong together, and returns the step."""
    found = Checkpoints(directory).restore(struct_of(make_state(0)))
    assert found is not None
    assert_equal(found.state, make_state(found.step))
    assert found.position == {"iterator": {"next_index": found.step}, "checksum": 2**32 - found.step}
    return found.step


def test_an_empty_folder_restores_nothing(tmp_path):
    assert Checkpoints(tmp_path / "checkpoints").restore(struct_of(make_state(0))) is None


def test_state_and_position_come_back_exactly_and_three_checkpoints_are_kept(tmp_path):
    directory = tmp_path / "checkpoints"
    save_steps(directory, [1, 2, 3, 10])
    assert restored_step(directory) == 10
    assert sorted(int(path.name) for path in directory.iterdir()) == [2, 3, 10]


@pytest.fixture
def slow_disk(monkeypatch):
    """An event, before which no save is written and no checksum known, and the threads that read arrays for Orbax."""
    gate, readers = threading.Event(), []
    begin, orbax_handler = checksum.begin, checkpoint.orbax.handlers.PyTreeHandler

    def begin_slowly(arrays):
        digests = begin(arrays)
        return lambda: gate.wait(60) and digests()

    class SlowHandler:
        async def save(self, *given):
            readers.append(threading.current_thread())
            begun = await orbax_handler().save(*given)

            async def write():
                gate.wait(60)
                await begun

            return write()

    monkeypatch.setattr(checksum, "begin", begin_slowly)
    monkeypatch.setattr(checkpoint.orbax.handlers, "PyTreeHandler", SlowHandler)
    yield gate, readers
    gate.set()


@pytest.mark.parametrize("copies", [False, True], ids=["in place", "copied"])
def test_a_save_waits_for_no_write_compiles_nothing_and_is_of_the_state_before_the_next_step(
    tmp_path, slow_disk, caplog, copies
):
    step = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    checkpoints, state = Checkpoints(tmp_path / "checkpoints"), make_state(2)
    gate, readers = slow_disk
    gate.set()
    assert checkpoints.prepare(state, copies=copies)
    gate.clear()
    with jax.log_compiles():
        checkpoints.save(2, state, {"iterator": {"next_index": 2}, "checksum": 2**32 - 2})
    assert not any("Compiling" in message for message in caplog.messages)
    for _ in range(3):
        state = jax.block_until_ready(step(state))
    assert not checkpoints.pending.done()
    gate.set()
    assert checkpoints.pending.result() == checksum.of_state(checksum.digests(checkpoint.by_name(make_state(2))))
    assert [reader is threading.main_thread() for reader in readers] == [not copies]
    assert restored_step(tmp_path / "checkpoints") == 2


def test_where_memory_of_the_host_is_short_a_save_does_without_a_copy(tmp_path, monkeypatch):
    def exhausted(_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of host memory")

    monkeypatch.setattr(checkpoint, "_copy", exhausted)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    assert not checkpoints.prepare(make_state(2), copies=True)
    checkpoints.save(2, make_state(2), {"iterator": {"next_index": 2}, "checksum": 2**32 - 2})
    checkpoints.pending.result()
    assert restored_step(tmp_path / "checkpoints") == 2


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
    directory = tmp_path_factory.mktemp("golden") / "checkpoints"
    save_steps(directory, [1, 2])
    return directory


def files_of(checkpoint: Path) -> list[Path]:
    return sorted(path for path in checkpoint.rglob("*") if path.is_file())


# TensorStore reports to an event loop that Orbax has closed after the first error.
@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damage", ["truncate", "empty", "delete", "zeros"])
def test_each_damaged_file_leads_to_the_older_checkpoint_or_does_not_matter(two_checkpoints, tmp_path, damage):
    fallbacks = 0
    for index, file in enumerate(files_of(two_checkpoints / "2")):
        run = tmp_path / str(index)
        shutil.copytree(two_checkpoints, run / "checkpoints")
        victim = run / "checkpoints" / file.relative_to(two_checkpoints)
        content = victim.read_bytes()
        if damage == "delete":
            victim.unlink()
        else:
            victim.write_bytes(
                {"truncate": content[: len(content) // 2], "empty": b"", "zeros": bytes(len(content))}[damage]
            )
        step = restored_step(run / "checkpoints")
        fallbacks += step == 1
        assert (run / "broken" / "2").exists() == (step == 1)
    assert fallbacks >= 2


@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("every", [499, pytest.param(23, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_a_flip_of_one_bit_in_any_file_leads_to_the_older_checkpoint_or_does_not_matter(
    two_checkpoints, tmp_path, every
):
    """`restored_step` has compared what comes back with what was saved."""
    flips = [(file, bit) for file in files_of(two_checkpoints / "2") for bit in range(8 * file.stat().st_size)][::every]
    fallbacks = 0
    directory = tmp_path / "checkpoints"
    shutil.copytree(two_checkpoints, directory)
    for file, bit in flips:
        victim, content = directory / file.relative_to(two_checkpoints), bytearray(file.read_bytes())
        content[bit // 8] ^= 1 << bit % 8
        victim.write_bytes(content)
        is_older = restored_step(directory) == 1
        fallbacks += is_older
        if is_older:
            (tmp_path / "broken" / "2").rename(directory / "2")
        victim.write_bytes(file.read_bytes())
    assert len(flips) / 3 < fallbacks < len(flips)


def test_a_folder_emptied_by_an_interrupted_deletion_is_skipped_and_its_step_can_be_saved_again(
    two_checkpoints, tmp_path
):
    directory = tmp_path / "checkpoints"
    shutil.copytree(two_checkpoints, directory)
    shutil.rmtree(directory / "2")
    (directory / "2").mkdir()
    checkpoints = Checkpoints(directory)
    found = checkpoints.restore(struct_of(make_state(0)))
    assert found is not None
    assert found.step == 1
    assert "checkpoint 2 is not whole, trying an older one" in checkpoints.notes[0]
    checkpoints.save(2, make_state(2), {"iterator": {"next_index": 2}, "checksum": 2**32 - 2})
    checkpoints.pending.result()
    assert restored_step(directory) == 2


def test_a_folder_without_a_whole_checkpoint_is_refused_and_left_as_it_is(two_checkpoints, tmp_path):
    directory = tmp_path / "checkpoints"
    shutil.copytree(two_checkpoints, directory)
    for file in files_of(directory):
        file.write_bytes(b"")
    with pytest.raises(InputError, match=r"none of the steps \[2, 1\] can be read"):
        Checkpoints(directory).restore(struct_of(make_state(0)))
    assert (directory / "2").exists()


@pytest.mark.parametrize(
    "other, message",
    [
        (
            jnp.zeros((8, 8), jnp.bfloat16),
            r"params\.w is float32\[8,8\] in its step 2 and bfloat16\[8,8\] here",
        ),
        (
            jnp.zeros((8, 4), jnp.float32),
            r"params\.w is float32\[8,8\] in its step 2 and float32\[8,4\] here",
        ),
        (None, r"params\.w is float32\[8,8\] in its step 2 and absent here"),
    ],
)
def test_another_dtype_or_shape_is_refused_by_name(two_checkpoints, other, message):
    state = make_state(0)
    state["params"]["w"] = other if other is None else jax.device_put(other, state["step"].sharding)
    with pytest.raises(InputError, match=message):
        Checkpoints(two_checkpoints).restore(struct_of(state))


@pytest.fixture
def small_files_only():
    """Writing past 4 KiB fails in this process, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_save_that_fails_in_the_background_is_known_and_leaves_the_older_ones_and_nothing_else(
    two_checkpoints, tmp_path, small_files_only
):
    directory = tmp_path / "checkpoints"
    shutil.copytree(two_checkpoints, directory)
    checkpoints = Checkpoints(directory)
    noise = jax.random.bits(jax.random.key(0), (2**14,), jnp.uint32)
    checkpoints.save(3, {"noise": noise}, {})
    with pytest.raises(Exception, match="File too large"):
        checkpoints.pending.result()
    assert sorted(path.name for path in directory.iterdir()) == ["1", "2"]
    assert restored_step(directory) == 2
