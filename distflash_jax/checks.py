"""What distflash_attention refuses before anything is traced: arrays and masks, by name, value and what is allowed."""

import jax.numpy as jnp
from jaxtyping import Array

from distflash_jax.executor import Segments
from pallas_kernels.block import check_softcap


def check_arrays(q: Array, k: Array, v: Array, causal: bool) -> None:
    """Raises ValueError where shapes or dtypes of q, k and v do not fit each other."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name}: must have 4 dimensions [batch, sequence, heads, head dim], got shape {x.shape}")
        if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
            raise ValueError(f"{name}: dtype must be float32, bfloat16 or float16, got {x.dtype}")
        if x.dtype != q.dtype:
            raise ValueError(f"{name}: dtype must be that of q, {q.dtype}, got {x.dtype}")
        if 0 in x.shape:
            raise ValueError(f"{name}: must not be empty, got shape {x.shape}")
    if k.shape != v.shape:
        raise ValueError(f"v: shape must be that of k, {k.shape}, got {v.shape}")
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"k, v: batch size must be that of q, {q.shape[0]}, got {k.shape[0]}")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"k, v: head dim must be that of q, {q.shape[3]}, got {k.shape[3]}")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"q: number of heads {q.shape[2]} must be a multiple of the {k.shape[2]} heads of k, v")
    if causal and q.shape[1] != k.shape[1]:
        raise ValueError(f"causal=True: k, v must be as long as q, {q.shape[1]}, got {k.shape[1]}")


def check_mask(
    q: Array, k: Array, causal: bool, window: int | None, softcap: float | None, segment_ids: Array | None,
    kv_segment_ids: Array | None, sinks: Array | None,
) -> Segments | None:  # fmt: skip
    """The segments of both sides, None without.

    Raises:
        ValueError: a mask that cannot be, or whose arrays do not fit q and k.
    """
    if window is not None and not causal:
        raise ValueError(f"window={window}: needs causal=True")
    if window is not None and window < 1:
        raise ValueError(f"window={window}: must be at least 1, the token itself, or None")
    check_softcap(softcap)
    if sinks is not None and (sinks.shape != q.shape[2:3] or not jnp.issubdtype(sinks.dtype, jnp.floating)):
        raise ValueError(f"sinks: must be floats of shape {q.shape[2:3]}, one a head, got {sinks.dtype}{sinks.shape}")
    if segment_ids is None:
        if kv_segment_ids is not None:
            raise ValueError("kv_segment_ids: needs segment_ids, those of the queries")
        return None
    segments = Segments(segment_ids, segment_ids if kv_segment_ids is None else kv_segment_ids)
    for name, x, like in (("segment_ids", segments.q, q), ("kv_segment_ids", segments.kv, k)):
        if x.shape != like.shape[:2] or not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(f"{name}: must be integers of shape {like.shape[:2]}, got {x.dtype}{x.shape}")
    return segments
