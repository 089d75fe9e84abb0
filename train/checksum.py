"""Checksums of arrays, computed where they lie: the same on every mesh, and other if a single bit is."""

import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, UInt32

# Odd multipliers of two sums, so that what one misses, the other finds.
_MULTIPLIERS = (0x9E3779B1, 0x85EBCA6B)
# Elements that are summed at a time: of all, XLA:CPU would keep every product.
_PIECE = 2**21


def digests(arrays: Mapping[str, Array]) -> dict[str, str]:
    """Dtype, shape and a checksum of 64 bits of each array, by its name.

    The checksum is a sum of the elements' bits, each times an odd hash of its index, modulo 2^32: exact in any order,
    so whichever devices hold the parts, and changed by every flip of a single bit. Where replicas of an array differ,
    it has the checksums of all of them. All processes that hold parts have to ask.
    """
    return begin(arrays)()


def begin(arrays: Mapping[str, Array]) -> Callable[[], dict[str, str]]:
    """Starts to compute `digests`, for which only what it returns waits: the arrays may be donated before."""
    computed = by_device(arrays)

    def digests() -> dict[str, str]:
        sums, found = np.asarray(computed), {}
        for i, (name, leaf) in enumerate(arrays.items()):
            replicas = sums[list(holders(leaf.sharding, leaf.shape)), i].sum(axis=1, dtype=np.uint32)
            found[name] = f"{describe(leaf)} {'/'.join(sorted({replica.tobytes().hex() for replica in replicas}))}"
        return found

    return digests


def by_device(arrays: Mapping[str, Array]) -> UInt32[Array, "devices arrays 2"]:
    """What each device of their mesh, by the part that it holds, adds to each checksum.

    Equal where two devices hold the same part. All processes that hold parts have to ask.
    """
    leaves = list(arrays.values())
    # Replicated, so that every process has a copy.
    return _sums(tuple(_named(leaf.sharding) for leaf in leaves))(leaves).addressable_data(0)


@functools.cache
def holders(sharding: Sharding, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Replicas of an array, each as the numbers, in the mesh, of devices that together hold it."""
    by_part: dict[str, list[int]] = {}
    indices = sharding.devices_indices_map(shape)
    for number, device in enumerate(cast(Mesh, _named(sharding).mesh).devices.flat):
        by_part.setdefault(str(indices[device]), []).append(number)
    return tuple(zip(*by_part.values(), strict=True))


def of_state(digests: Mapping[str, str]) -> str:
    """One checksum of all arrays and their names, as 16 hexadecimal digits."""
    text = "\n".join(f"{name} {digests[name]}" for name in sorted(digests))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def describe(array: Array | jax.ShapeDtypeStruct) -> str:
    """As in float32[8,16]."""
    return f"{jnp.dtype(array.dtype).name}[{','.join(map(str, array.shape))}]"


def _named(sharding: Sharding) -> NamedSharding:
    """On a mesh also where it is that of a single device."""
    return sharding if isinstance(sharding, NamedSharding) else NamedSharding(Mesh([*sharding.device_set], "x"), P())


@functools.cache
def _sums(shardings: tuple[NamedSharding, ...]):
    def sums(leaves: Iterable[Array]) -> UInt32[Array, "1 arrays 2"]:
        return jnp.stack([_sums_of_part(*given) for given in zip(leaves, shardings, strict=True)])[None]

    mesh, specs = shardings[0].mesh, [sharding.spec for sharding in shardings]
    # Replicas are to be told apart, which shard_map would take for one value.
    own = jax.shard_map(sums, mesh=mesh, in_specs=(specs,), out_specs=P(mesh.axis_names), check_vma=False)
    return jax.jit(own, out_shardings=NamedSharding(mesh, P()))


def _sums_of_part(part: Array, sharding: NamedSharding) -> UInt32[Array, "2"]:
    """Of what a device holds of an array that is spread so."""
    if part.size >= 2**32:
        raise ValueError(f"{describe(part)}: at most 2**32 elements of an array on a device")
    flat, size = part.reshape(-1), min(part.size, _PIECE)

    def add(piece: Array, sums: Array) -> UInt32[Array, "2"]:
        # The last one begins within the one before, of which it leaves out what is summed already.
        begin = piece * np.uint32(size)
        local = jnp.minimum(begin, np.uint32(part.size - size)) + jnp.arange(size, dtype=jnp.uint32)
        words = jnp.where(local >= begin, _words(jax.lax.dynamic_slice(flat, (local[0],), (size,))).T, 0)
        index = _index(local, part.shape, sharding) * np.uint32(words.ndim)
        # Of an element of 64 bits, two words.
        index += jnp.arange(words.ndim, dtype=jnp.uint32)[:, None] if words.ndim == 2 else np.uint32(0)
        hashes = [jnp.sum(words * _odd_hash(index, np.uint32(m)), dtype=jnp.uint32) for m in _MULTIPLIERS]
        return sums + jnp.stack(hashes)

    return jax.lax.fori_loop(np.uint32(0), np.uint32(-(-part.size // size)), add, jnp.zeros(2, jnp.uint32))


def _index(local: UInt32[Array, "n"], shape: tuple[int, ...], sharding: NamedSharding) -> UInt32[Array, "n"]:
    """Indices in the whole array, modulo 2^32, of those in this device's part, which has this shape."""
    index, stride = jnp.zeros_like(local), 1
    for axis in reversed(range(len(shape))):
        names = sharding.spec[axis] if axis < len(sharding.spec) else None
        size, names = np.uint32(shape[axis]), (names,) if isinstance(names, str) else names or ()
        offset = jax.lax.axis_index(names).astype(jnp.uint32) * size if names else np.uint32(0)
        index += (local % size + offset) * np.uint32(stride % 2**32)
        local, stride = local // size, stride * shape[axis] * math.prod(sharding.mesh.shape[name] for name in names)
    return index


def _words(array: Array) -> UInt32[Array, "..."]:
    """The bits of each element; of one of 64 bits, in two words along a last axis."""
    if array.dtype == jnp.bool:
        return array.astype(jnp.uint32)
    size = array.dtype.itemsize
    bits = jax.lax.bitcast_convert_type(array, {1: jnp.uint8, 2: jnp.uint16}.get(size, jnp.uint32))
    return bits.astype(jnp.uint32)


def _odd_hash(index: UInt32[Array, "..."], multiplier: np.uint32) -> UInt32[Array, "..."]:
    """Source: the finaliser of MurmurHash3, Appleby, with another first multiplier."""
    bits = (index + np.uint32(1)) * multiplier
    bits = (bits ^ (bits >> np.uint32(16))) * np.uint32(0xC2B2AE35)
    bits = bits ^ (bits >> np.uint32(13))
    return bits | np.uint32(1)
