"""Where every array of a training run lies on the mesh (data, seq, tensor): the only rules, by parameter name.

Parameters, gradients and moments are cut over data and seq together, as in fully sharded data parallelism, along
their largest dimension that divides, and over tensor along heads, feed-forward width or vocabulary. What does not
divide stays whole over those axes. For the time of a layer its weights are gathered over data and seq.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

Deal = Callable[[str, Float32[Array, "..."]], Float[Array, "..."]]

SHARDS = ("data", "seq")
TOKENS = P("data", "seq")
HEADS = P("data", "seq", "tensor")
BLOCK_AXES = ("tensor",)  # that cut heads and feed-forward width; megatron.py has other ones
_TABLES = ("embed_tokens", "lm_head")
_TENSOR_DIM = {
    "embed_tokens": 0,
    "q_proj": 1,
    "k_proj": 1,
    "v_proj": 1,
    "q_bias": 0,
    "k_bias": 0,
    "v_bias": 0,
    "o_proj": 0,
    "gate_proj": 1,
    "up_proj": 1,
    "down_proj": 0,
    "lm_head": 1,
}


def gathered_spec(name: str, shape: tuple[int, ...], mesh: Mesh, block_axes: tuple[str, ...] = BLOCK_AXES) -> P:
    """How a weight of one layer lies while it is used: cut over tensor alone, or other axes for those of blocks."""
    dim, axes = tensor_dim(name), BLOCK_AXES if name in _TABLES else block_axes
    divides = dim is not None and shape[dim] % math.prod(mesh.shape[axis] for axis in axes) == 0
    return P(*(axes if divides and i == dim else None for i in range(len(shape))))


def tensor_dim(name: str) -> int | None:
    """The dimension of a weight that counts heads, feed-forward width or vocabulary."""
    return _TENSOR_DIM.get(name)


def stored_spec(name: str, shape: tuple[int, ...], mesh: Mesh, block_axes: tuple[str, ...] = BLOCK_AXES) -> P:
    """How a weight of one layer lies between its uses: as then, and cut over data and seq together besides."""
    entries = list(gathered_spec(name, shape, mesh, block_axes))
    shards = tuple(axis for axis in SHARDS if not any(entry and axis in entry for entry in entries))
    count = math.prod(mesh.shape[axis] for axis in shards)
    free = [i for i, entry in enumerate(entries) if entry is None and shape[i] % count == 0]
    if free:
        entries[max(free, key=shape.__getitem__)] = shards
    return P(*entries)


def state_shardings(state: Any, mesh: Mesh, block_axes: tuple[str, ...] = BLOCK_AXES) -> Any:
    """The sharding of each leaf of a train state; moments lie as their parameters, whose names end their paths."""

    def sharding(path, leaf) -> NamedSharding:
        keys = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        stacked = 1 if "layers" in keys else 0
        spec = stored_spec(keys[-1] if keys else "", leaf.shape[stacked:], mesh, block_axes)
        return NamedSharding(mesh, P(*(None,) * stacked, *spec))

    return jax.tree.map_with_path(sharding, state)


def bytes_per_device(struct: Any) -> int:
    """Bytes of one device's part of the arrays, which have shardings."""
    leaves = jax.tree.leaves(struct)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def make_gather(
    mesh: Mesh, dtype: DTypeLike, deal: Deal = lambda name, weight: weight, block_axes: tuple[str, ...] = BLOCK_AXES
) -> Deal:
    """(name, weight of one layer) -> the weight as it is used: gathered, and projections rounded to `dtype` before.

    The gradient is summed over the workers in the dtype of the use and cut right away. The embedding stays float32:
    in it the gradients of many tokens meet in one row.

    Args:
        deal: (name, weight) -> the weight with its heads or its width as the workers divide them.
    """

    def gather(name: str, weight: Float32[Array, "..."]) -> Float[Array, "..."]:
        lies = lambda spec_of: NamedSharding(mesh, spec_of(name, weight.shape, mesh, block_axes))
        if name.endswith("_proj"):
            # Said of the rounded weight too, or XLA may gather first and round then.
            weight = jax.lax.with_sharding_constraint(weight.astype(dtype), lies(stored_spec))
        weight = deal(name, weight)
        return _gather(lies(stored_spec), lies(gathered_spec), weight)

    return gather


# The transpose of a constraint is the same constraint, by which every worker would keep the whole gradient.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather(stored: NamedSharding, gathered: NamedSharding, weight: Array) -> Array:
    return jax.lax.with_sharding_constraint(weight, gathered)


def _gather_fwd(stored, gathered, weight):
    return _gather(stored, gathered, weight), None


def _gather_bwd(stored, gathered, _, gradient):
    # Summed first and cut then, which XLA makes one reduce-scatter: asked for the cut alone, it may gather the tokens.
    summed = jax.lax.with_sharding_constraint(gradient, gathered)
    return (jax.lax.with_sharding_constraint(summed, stored),)


_gather.defvjp(_gather_fwd, _gather_bwd)
