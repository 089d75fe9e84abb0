"""Checksums of arrays, computed where they lie: the same on every mesh, and other if a single bit is."""

import functools
import hashlib
import math
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, UInt32

# Odd multipliers of two sums, so that what one misses, the other finds.
_MULTIPLIERS = (0x9E3779B1, 0x85EBCA6B)


def digests(arrays: Mapping[str, Array]) -> dict[str, str]:
    """Dtype, shape and a checksum of 64 bits of each array, by its name.

    The checksum is a sum of the elements' bits, each times an odd hash of its index, modulo 2^32: exact in any order,
    so whichever devices hold the parts, and changed by every flip of a single bit. Where replicas of an array differ
    between devices of this process, it has the checksums of all of them.
    """
    leaves = list(arrays.values())
    # The sums of all arrays on each device, which should have the same.
    found = [np.asarray(shard.data) for shard in _sums(_replicated(leaves[0].sharding))(leaves).addressable_shards]
    return {
        name: f"{describe(leaf)} {'/'.join(sorted({sums[i].tobytes().hex() for sums in found}))}"
        for i, (name, leaf) in enumerate(arrays.items())
    }


def by_device(arrays: Mapping[str, Array]) -> Array:
    """uint32[devices, arrays, 2]: the sums of the part of each array that each device of their mesh holds.

    Equal where two devices hold the same part. The result is spread over the devices as the arrays are.
    """
    leaves = list(arrays.values())
    return _own_sums(tuple(leaf.sharding for leaf in leaves))(leaves)


def of_state(digests: Mapping[str, str]) -> str:
    """One checksum of all arrays and their names, as 16 hexadecimal digits."""
    text = "\n".join(f"{name} {digests[name]}" for name in sorted(digests))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def describe(array: Array | jax.ShapeDtypeStruct) -> str:
    """As in float32[8,16]."""
    return f"{jnp.dtype(array.dtype).name}[{','.join(map(str, array.shape))}]"


def _replicated(sharding: Sharding) -> Sharding:
    return NamedSharding(sharding.mesh, P()) if isinstance(sharding, NamedSharding) else sharding


@functools.cache
def _own_sums(shardings: tuple[NamedSharding, ...]):
    mesh = shardings[0].mesh

    def sums(leaves: Iterable[Array]) -> UInt32[Array, "1 arrays 2"]:
        return jnp.stack([_sums_of(leaf) for leaf in leaves])[None]

    # Replicas are to be told apart, which shard_map would take for one value.
    specs = [sharding.spec for sharding in shardings]
    own = jax.shard_map(sums, mesh=mesh, in_specs=(specs,), out_specs=P(mesh.axis_names), check_vma=False)
    return jax.jit(own)


@functools.cache
def _sums(replicated: Sharding):
    def sums(leaves: Iterable[Array]) -> UInt32[Array, "arrays 2"]:
        return jnp.stack([_sums_of(leaf) for leaf in leaves])

    return jax.jit(sums, out_shardings=replicated)


def _sums_of(array: Array) -> UInt32[Array, "2"]:
    words = _words(array)
    index = jnp.zeros(words.shape, jnp.uint32)
    for axis in range(words.ndim):
        stride = np.uint32(math.prod(words.shape[axis + 1 :]) % 2**32)
        index += jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) * stride
    return jnp.stack([jnp.sum(words * _odd_hash(index, np.uint32(m)), dtype=jnp.uint32) for m in _MULTIPLIERS])


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
