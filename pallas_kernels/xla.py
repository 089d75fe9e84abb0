"""Block attention in plain jnp, tile by tile: every platform, O(T) memory, tiles that the mask hides are skipped.

Source: FlashAttention-2, arXiv 2307.08691, algorithms 1 and 2.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.block import BlockAttention, Gradients, Operand, Partial, check_softcap
from pallas_kernels.masks import Mask

ROWS_PER_TILE = 256
KEYS_PER_TILE = 512


def forward(
    queries: Operand,
    keys: Operand,
    mask: Mask,
    scale: float,
    softcap: float | None = None,
    dtype: DTypeLike = jnp.float32,
) -> Partial:
    """(out, lse) of one query chunk against one key/value chunk; see BlockAttention."""
    (q,), (k, v) = queries.read(), keys.read()
    _, T, N, _ = q.shape
    _, S, K, _ = k.shape
    rows_per_tile, keys_per_tile = min(ROWS_PER_TILE, T), min(KEYS_PER_TILE, S)
    k, v = _tiles(k, keys_per_tile), _tiles(v, keys_per_tile)
    mask = _with_stop(mask, S)
    table = mask.key_tiles(T, rows_per_tile, S, keys_per_tile)

    def rows(tile: tuple[Array, Array]) -> Partial:
        number, q_tile = tile  # q_tile [B, rows, K, G, H]
        row = number * rows_per_tile

        def step(j: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            acc, top, total = state
            scores = _scores(q_tile, k[j], scale, softcap)[0]
            seen = mask.visible(row + jnp.arange(rows_per_tile), j * keys_per_tile + jnp.arange(keys_per_tile))
            scores = jnp.where(seen[:, :, None, None, :], scores, -jnp.inf)
            new_top = jnp.maximum(top, scores.max(axis=-1))
            shift = jnp.where(new_top == -jnp.inf, 0.0, new_top)  # a row that has seen nothing yet: avoids inf - inf
            weights = jnp.exp(scores - shift[..., None])
            decay = jnp.exp(top - shift)
            update = _dot("bqkgs,bskh->bqkgh", weights.astype(v.dtype), v[j])
            return acc * decay[..., None] + update, new_top, total * decay + weights.sum(axis=-1)

        acc = jnp.zeros_like(q_tile, dtype=jnp.float32)
        state = (acc, acc[..., 0] - jnp.inf, acc[..., 0])
        acc, top, total = lax.fori_loop(table[:, number, 0].min(), table[:, number, 3].max(), step, state)
        out = (acc / jnp.where(total == 0, 1.0, total)[..., None]).astype(dtype)
        return out, top + jnp.log(total)  # a row that saw nothing: -inf + -inf

    q = _tiles(q, rows_per_tile)
    q = q.reshape(*q.shape[:3], K, N // K, q.shape[-1])
    out, lse = lax.map(rows, (jnp.arange(q.shape[0]), q))
    return _untile(out.reshape(*out.shape[:3], N, -1), T), _untile(lse.reshape(*lse.shape[:3], N), T)


def backward(
    queries: Operand,
    keys: Operand,
    mask: Mask,
    scale: float,
    softcap: float | None = None,
    dtype: DTypeLike = jnp.float32,
    deterministic: bool = False,
) -> Gradients:
    """(dq, dk, dv) of one query chunk against one key/value chunk, by the global lse and delta; see BlockAttention."""
    del deterministic  # it always is
    (q, dout, lse, delta), (k, v) = queries.read(), keys.read()
    _, T, N, H = q.shape
    _, S, K, _ = k.shape
    rows_per_tile, keys_per_tile = min(ROWS_PER_TILE, T), min(KEYS_PER_TILE, S)
    mask = _with_stop(mask, S)
    table = mask.query_tiles(T, rows_per_tile, S, keys_per_tile)
    lse = jnp.where(lse == -jnp.inf, 0.0, lse)  # such a row sees nothing, so its weights are masked to 0 below
    split = lambda x: _tiles(x, rows_per_tile).reshape(-1, x.shape[0], rows_per_tile, K, N // K, *x.shape[3:])
    q, dout, lse, delta = map(split, (q, dout, lse, delta))

    def columns(dq: Array, tile: tuple[Array, Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        number, k_tile, v_tile = tile  # [B, keys, K, H]
        column = number * keys_per_tile

        def step(i: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            dq, dk, dv = state
            seen = mask.visible(i * rows_per_tile + jnp.arange(rows_per_tile), column + jnp.arange(keys_per_tile))
            scores, slope = _scores(q[i], k_tile, scale, softcap)
            weights = jnp.where(seen[:, :, None, None, :], jnp.exp(scores - lse[i][..., None]), 0.0)
            dweights = _dot("bqkgh,bskh->bqkgs", dout[i], v_tile)
            dscores = (weights * (dweights - delta[i][..., None]) * slope).astype(q.dtype)
            dv += _dot("bqkgs,bqkgh->bskh", weights.astype(q.dtype), dout[i])
            dk += _dot("bqkgs,bqkgh->bskh", dscores, q[i])
            dq_tile = dq[i] + _dot("bqkgs,bskh->bqkgh", dscores, k_tile)
            return lax.dynamic_update_index_in_dim(dq, dq_tile, i, axis=0), dk, dv

        zeros = jnp.zeros_like(k_tile, dtype=jnp.float32)
        dq, dk, dv = lax.fori_loop(table[:, number, 0].min(), table[:, number, 3].max(), step, (dq, zeros, zeros))
        return dq, (dk.astype(dtype), dv.astype(dtype))

    k, v = _tiles(k, keys_per_tile), _tiles(v, keys_per_tile)
    dq, (dk, dv) = lax.scan(columns, jnp.zeros_like(q, dtype=jnp.float32), (jnp.arange(k.shape[0]), k, v))
    return _untile(dq.astype(dtype).reshape(*dq.shape[:3], N, H), T), _untile(dk, S), _untile(dv, S)


def _dot(subscripts: str, a: Array, b: Array) -> Float[Array, "..."]:
    """einsum that accumulates in float32; float32 operands are never rounded to tf32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=jnp.float32)


def _scores(
    q_tile: Array, k_tile: Array, scale: float, softcap: float | None
) -> tuple[Float[Array, "B T K G S"], Float[Array, "B T K G S"] | float]:
    """The scores, and their derivative by q k^T."""
    scores = _dot("bqkgh,bskh->bqkgs", q_tile, k_tile) * scale
    check_softcap(softcap)
    if softcap is None:
        return scores, scale
    bounded = jnp.tanh(scores / softcap)
    return softcap * bounded, scale * (1 - bounded**2)


def _tiles(x: Float[Array, "B T ..."], size: int) -> Float[Array, "tiles B size ..."]:
    """The rows of x in tiles of `size`, the last one padded with zeros."""
    num_tiles = -(-x.shape[1] // size)
    x = jnp.pad(x, [(0, 0), (0, num_tiles * size - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(x.shape[0], num_tiles, size, *x.shape[2:]), 1, 0)


def _untile(tiles: Float[Array, "tiles B size ..."], num_rows: int) -> Float[Array, "B T ..."]:
    x = jnp.moveaxis(tiles, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :num_rows]


def _with_stop(mask: Mask, num_keys: int) -> Mask:
    """The mask that also hides the padding of the last tile of keys."""
    return dataclasses.replace(mask, k_stop=jnp.minimum(mask.k_stop, mask.k_start + num_keys))


ATTENTION = BlockAttention(forward, backward)
