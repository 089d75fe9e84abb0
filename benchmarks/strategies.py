"""Causal attention over several GPUs as others spread it: functions of sharded [B, T, N, H] that benchmarks compare."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from pallas_kernels import IMPLEMENTATIONS, Box, Mask, Operand

AXIS = "seq"
CHUNKS = P(None, AXIS)
Attention = Callable[[Array, Array, Array], Array]


def ours(implementation: str, q: Array, k: Array, v: Array, q_start: int | Int[Array, ""] = 0) -> Array:
    """softmax(q k^T / sqrt(H)) v by our block kernels, where query i sees keys 0 to q_start + i."""
    kernel, scale = IMPLEMENTATIONS[implementation], q.shape[-1] ** -0.5

    def operands(
        q_side: tuple[Array, ...], kv_side: tuple[Array, ...], q_start: Array
    ) -> tuple[Operand, Operand, Mask]:
        own = lambda x: Operand(x, Box(0, x[0].shape[1], 0, x[0].shape[2]), None, jnp.array(False))
        return own(q_side), own(kv_side), Mask(q_start, jnp.int32(0), jnp.int32(k.shape[1]), is_causal=True)

    @jax.custom_vjp
    def attention(q: Array, k: Array, v: Array, q_start: Array) -> Array:
        return forward(q, k, v, q_start)[0]

    def forward(q: Array, k: Array, v: Array, q_start: Array):
        out, lse = kernel.forward(*operands((q,), (k, v), q_start), scale, None, q.dtype)
        return out, (q, k, v, q_start, out, lse)

    def backward(residuals, dout: Array):
        q, k, v, q_start, out, lse = residuals
        delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
        return *kernel.backward(*operands((q, dout, lse, delta), (k, v), q_start), scale, None, q.dtype), None

    attention.defvjp(forward, backward)
    return attention(q, k, v, jnp.asarray(q_start, jnp.int32))


def cudnn(q: Array, k: Array, v: Array) -> Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def ulysses(mesh: Mesh, attention: Attention) -> Attention:
    """Heads exchanged for tokens: each worker has the whole sequence of some heads. arXiv 2309.14509."""
    exchange = functools.partial(lax.all_to_all, axis_name=AXIS, tiled=True)

    def attend(*chunks: Array) -> Array:
        whole = (exchange(x, split_axis=2, concat_axis=1) for x in chunks)
        return exchange(attention(*whole), split_axis=1, concat_axis=2)

    return _sharded(mesh, attend)


def all_gather(mesh: Mesh, attention: Callable[..., Array]) -> Attention:
    """Keys and values gathered by every worker, which has chunks w and 2P-1-w of the queries. arXiv 2407.21783.

    The sequence is taken to lie in this order already; in the benchmark only keys and values must be put in order.
    """
    num_workers = mesh.shape[AXIS]
    places = [chunk for worker in range(num_workers) for chunk in (worker, 2 * num_workers - 1 - worker)]

    def in_order(x: Array) -> Array:
        chunks = jnp.split(lax.all_gather(x, AXIS, axis=1, tiled=True), 2 * num_workers, axis=1)
        return jnp.concatenate([chunks[places.index(chunk)] for chunk in range(2 * num_workers)], axis=1)

    def attend(q: Array, k: Array, v: Array) -> Array:
        k, v, worker, size = in_order(k), in_order(v), lax.axis_index(AXIS), q.shape[1] // 2
        starts = worker * size, (2 * num_workers - 1 - worker) * size
        halves = (q[:, i * size : (i + 1) * size] for i in range(2))
        return jnp.concatenate(
            [attention(half, k, v, start) for half, start in zip(halves, starts, strict=True)], axis=1
        )

    return _sharded(mesh, attend)


def _sharded(mesh: Mesh, attend: Attention) -> Attention:
    return jax.shard_map(attend, mesh=mesh, in_specs=(CHUNKS,) * 3, out_specs=CHUNKS, check_vma=False)
