"""Megatron's layers, for comparison: workers along seq have heads and MLP width of their own, and all tokens.

Between the blocks, attention and MLP, tokens are cut as everywhere else: each block begins with an all-gather of its
input and ends with a reduce-scatter of its output, and backward likewise. Where heads or width do not divide, workers
compute padding; where key/value heads are fewer than the workers, several have the same ones.

Sources: arXiv 1909.08053 (tensor parallelism), arXiv 2205.05198 (sequence parallelism).
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from distflash_jax.schedule import HeadSplit, split_heads
from models.config import LlamaConfig
from models.llama import Projections, project_in, project_out
from train.sharding import TOKENS, tensor_dim

BLOCK_AXES = ("seq",)
HEADS = P("data", None, BLOCK_AXES)


def make_projections(mesh: Mesh) -> Projections:
    """Those before which tokens are gathered, and behind which they are summed and scattered."""

    def into(x: Float[Array, "B T D"], weights: Sequence[Float[Array, "D ..."]]) -> tuple[Array, ...]:
        def worker_into(x, *weights):
            return project_in(lax.all_gather(x, "seq", axis=1, tiled=True), weights)

        specs = (TOKENS, *(P(None, BLOCK_AXES),) * len(weights))
        return jax.shard_map(worker_into, mesh=mesh, in_specs=specs, out_specs=HEADS)(x, *weights)

    def out_of(x: Float[Array, "B T ..."], weight: Float[Array, "... D"]) -> Float[Array, "B T D"]:
        def worker_out_of(x, weight):
            return lax.psum_scatter(project_out(x, weight), "seq", scatter_dimension=1, tiled=True)

        return jax.shard_map(worker_out_of, mesh=mesh, in_specs=(HEADS, P(BLOCK_AXES)), out_specs=TOKENS)(x, weight)

    return Projections(into, out_of)


def split_of(config: LlamaConfig, mesh: Mesh) -> HeadSplit:
    """How the heads are dealt to the workers."""
    return split_heads(config.num_attention_heads, config.num_key_value_heads, mesh.shape["seq"])


def deal(mesh: Mesh, split: HeadSplit, name: str, weight: Float[Array, "..."]) -> Float[Array, "..."]:
    """A weight of one layer with the heads, or the width, that the workers have together; what is added is 0."""
    dim = tensor_dim(name)
    if dim is None or name in ("embed_tokens", "lm_head"):
        return weight
    if name[0] in "qo":
        groups = weight.reshape(*weight.shape[:dim], split.num_kv_heads, -1, *weight.shape[dim + 1 :])
        groups = _pad(groups, dim + 1, split.copies * split.group)
        weight = groups.reshape(*weight.shape[:dim], -1, *weight.shape[dim + 1 :])
    elif name[0] in "kv" and split.copies > 1:
        # Whole before: XLA finds no way to move heads that it repeats.
        whole = lax.with_sharding_constraint(weight, NamedSharding(mesh, P()))
        weight = jnp.repeat(whole, split.copies, axis=dim)
    size = {"q": split.q_heads, "o": split.q_heads, "k": split.kv_heads, "v": split.kv_heads}.get(name[0])
    return _pad(weight, dim, split.num_workers * (size or -(-weight.shape[dim] // split.num_workers)))


def _pad(x: Array, dim: int, size: int) -> Array:
    return jnp.pad(x, [(0, size - x.shape[i] if i == dim else 0) for i in range(x.ndim)])
