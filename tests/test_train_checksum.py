"""train.checksum: the same wherever the parts lie, and other if a single bit is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from train import checksum

# Checksums of `arrays`, which checkpoints hold.
KNOWN = {
    "float32": "4e3d0d1b25d8075a",
    "bfloat16": "990f928996cc13b1",
    "float16": "050d1e73df838dde",
    "int32": "e16f87bf708a713d",
    "uint8": "6ceaf9e3c8227883",
    "bool": "e29b40a1390410cb",
}


def mesh_of(*shape):
    return Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), ("a", "b")[: len(shape)])


def arrays(dtype="float32"):
    noise = jax.random.bits(jax.random.key(3), (16, 8), jnp.uint32)
    return {"w": noise.astype(dtype), "scalar": jnp.array(noise[0, 0]).astype(dtype)}


@pytest.fixture(params=[2**21, 5], ids=["whole", "in pieces"])
def piece(request, monkeypatch):
    """How many elements are summed at a time."""
    monkeypatch.setattr(checksum, "_PIECE", request.param)
    checksum._sums.cache_clear()
    yield request.param
    checksum._sums.cache_clear()


@pytest.mark.parametrize("dtype", KNOWN)
def test_it_is_the_same_on_every_mesh_and_in_pieces(dtype, piece):
    found = set()
    for shape, spec in (
        ((1,), P()),
        ((8,), P("a")),
        ((2, 4), P("a", "b")),
        ((2, 4), P(("b", "a"))),
        ((4, 2), P(None, "b")),
    ):
        mesh = mesh_of(*shape)
        placed = {
            "w": jax.device_put(arrays(dtype)["w"], NamedSharding(mesh, spec)),
            "scalar": jax.device_put(arrays(dtype)["scalar"], NamedSharding(mesh, P())),
        }
        found.add(checksum.of_state(checksum.digests(placed)))
    assert found == {KNOWN[dtype]}, "that of earlier checkpoints"
    assert next(iter(checksum.digests(arrays(dtype)).values())).startswith(f"{dtype}[16,8] ")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_every_flip_of_one_bit_changes_it(dtype):
    original = np.asarray(arrays(dtype)["w"])
    before = checksum.digests({"w": jnp.asarray(original)})
    for bit in range(0, 8 * original.nbytes, 37):
        flipped = bytearray(original.tobytes())
        flipped[bit // 8] ^= 1 << bit % 8
        other = jnp.asarray(np.frombuffer(bytes(flipped), original.dtype).reshape(original.shape))
        assert checksum.digests({"w": other}) != before


def test_other_shapes_names_orders_and_dtypes_are_other_states():
    w = arrays()["w"]
    states = (
        {"w": w, "v": 2 * w},
        {"w": 2 * w, "v": w},
        {"w": w.T, "v": 2 * w},
        {"w": w[::-1], "v": 2 * w},
        {"w": w, "u": 2 * w},
        {"w": jax.lax.bitcast_convert_type(w, jnp.int32), "v": 2 * w},
    )
    assert len({checksum.of_state(checksum.digests(state)) for state in states}) == len(states)
    assert checksum.of_state({"a": "1", "b": "2"}) == checksum.of_state({"b": "2", "a": "1"})


def test_replicas_that_differ_do_not_pass_as_one():
    mesh = mesh_of(2)
    pieces = [
        jax.device_put(np.float32([1, value]), device) for value, device in zip((2, 3), mesh.devices, strict=True)
    ]
    uneven = jax.make_array_from_single_device_arrays((2,), NamedSharding(mesh, P()), pieces)
    even = [checksum.digests({"x": piece})["x"].split()[1] for piece in pieces]
    assert checksum.digests({"x": uneven})["x"].split()[1] == "/".join(sorted(even))
