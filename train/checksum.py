"""Checksums of arrays, computed where they lie: the same on every mesh, and other if a single bit is."""

import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, UInt32

# Odd multipliers of two sums, so that what one misses, the other finds.
_MULTIPLIERS = (0x9E3779B1, 0x85EBCA6B)
# Elements that are summed at a time on CPUs, where XLA would keep every product. On GPUs it fuses them into the sum,
# and a loop would take six times as long to compile.
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
    on_cpu = cast(Mesh, sharding.mesh).devices.flat[0].platform == "cpu"
    size = min(part.size, _PIECE) if on_cpu else part.size

    def add(piece: Array, sums: Array) -> UInt32[Array, "2"]:
        # The last one begins within the one before, of which it leaves out what is summed already.
        begin = piece * np.uint32(size)
        local = jnp.minimum(begin, np.uint32(part.size - size)) + jnp.arange(size, dtype=jnp.uint32)
        elements = jax.lax.dynamic_slice(part.reshape(-1), (local[0],), (size,))
        index = _index(jnp.unravel_index(local, part.shape), part.shape, sharding)
        return sums + _hashed(jnp.where(local >= begin, _words(elements).T, 0).T, index)

    if size < part.size:
        return jax.lax.fori_loop(np.uint32(0), np.uint32(-(-part.size // size)), add, jnp.zeros(2, jnp.uint32))
    # Tied to the array, or XLA makes the hashes of all arrays of a shape once, and keeps them.
    part, zero = jax.lax.optimization_barrier((part, jnp.uint32(0)))
    iota = lambda axis: jax.lax.broadcasted_iota(jnp.uint32, part.shape, axis) + zero
    return _hashed(_words(part), _index(tuple(map(iota, range(part.ndim))), part.shape, sharding))


def _hashed(words: UInt32[Array, "..."], index: UInt32[Array, "..."]) -> UInt32[Array, "2"]:
    """Sums of words times hashes of their elements' indices; of one of 64 bits there are two words, in a last axis."""
    if words.ndim > index.ndim:
        index = index[..., None] * np.uint32(2) + jnp.arange(2, dtype=jnp.uint32)
    return jnp.stack([jnp.sum(words * _odd_hash(index, np.uint32(m)), dtype=jnp.uint32) for m in _MULTIPLIERS])


def _index(
    places: Sequence[UInt32[Array, "..."]], shape: tuple[int, ...], sharding: NamedSharding
) -> UInt32[Array, "..."]:
    """Indices in the whole array, modulo 2^32, of elements of this device's part, by their places along its axes."""
    index, stride = jnp.uint32(0), 1
    for axis in reversed(range(len(shape))):
        names = sharding.spec[axis] if axis < len(sharding.spec) else None
        names = (names,) if isinstance(names, str) else names or ()
        offset = jax.lax.axis_index(names).astype(jnp.uint32) * np.uint32(shape[axis]) if names else np.uint32(0)
        index += (places[axis] + offset) * np.uint32(stride % 2**32)
        stride *= shape[axis] * math.prod(sharding.mesh.shape[name] for name in names)
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
