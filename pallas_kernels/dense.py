"""The oracle of the tests: attention with all its scores in memory, in float32 or float64, differentiated by JAX."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    visible: Bool[Array, "*B T S"],
    scale: float,
    softcap: float | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """softmax(scale * q k^T) v over the visible keys, and its log-sum-exp; 0 and -inf for rows that see nothing.

    With a softcap, scores s are softcap * tanh(s / softcap).

    Computed and returned in float32, or in float64 if q is; O(T * S) memory.
    """
    dtype = q.dtype if q.dtype == jnp.float64 else jnp.float32
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    B, T, N, H = q.shape
    K = k.shape[2]
    q = q.reshape(B, T, K, N // K, H)
    scores = scale * jnp.einsum("btkgh,bskh->bkgts", q, k, precision=lax.Precision.HIGHEST)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    visible = visible.reshape(-1, *visible.shape[-2:])
    sees_any = visible.any(axis=-1)[..., None]  # [B or 1, T, 1]
    visible = visible[:, None, None]
    # Rows that see nothing get finite stand-in scores, so that neither values nor gradients pass through inf - inf.
    scores = jnp.where(visible, scores, jnp.where(sees_any, -jnp.inf, 0.0)[:, None, None])
    top = lax.stop_gradient(scores.max(axis=-1, keepdims=True))
    weights = jnp.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    out = jnp.einsum("bkgts,bskh->btkgh", weights / total, v, precision=lax.Precision.HIGHEST)
    lse = (top + jnp.log(total))[..., 0].transpose(0, 3, 1, 2)
    out = jnp.where(sees_any[..., None], out.reshape(B, T, N, H), 0.0)
    return out, jnp.where(sees_any, lse.reshape(B, T, N), -jnp.inf)
