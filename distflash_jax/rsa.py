"""Ring Self-Attention: keys go round, then values, and a worker has all scores of its rows in memory. For comparison.

Memory grows with T^2 / P: float32 scores [B, T/P, N, T]. Plain jnp, and no block kernel. Each chunk is passed on to the
next worker, and sums of dk and dv travel along with keys and values, in place of the original's all-reduces.

Source: Sequence Parallelism, arXiv 2105.13120.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from distflash_jax.masks import Band, Segments
from distflash_jax.placement import Axis
from pallas_kernels.block import Gradients, Partial


@dataclass(frozen=True)
class RingSelfAttention:
    """The plan; see executor.Plan. In a block of scores [B, T, K, G, S] both sides are chunks of a worker."""

    axis: Axis
    band: Band
    scale: float
    softcap: float | None = None
    dtype: str | None = None

    def forward(self, q: Array, k: Array, v: Array, segments: Segments | None) -> Partial:
        """(out, lse) of this worker's chunk."""
        with jax.named_scope("forward_step_0"):
            scores = self._scores(q, list(self._round(k)), segments)[0]
            lse = jax.nn.logsumexp(scores, axis=-1)
            weights = _weights(scores, lse).astype(v.dtype)
        with jax.named_scope("forward_step_1"):
            blocks = zip(self._blocks(weights), self._round(v), strict=True)
            out = sum(_dot("btkgs,bskh->btkgh", block, theirs) for block, theirs in blocks)
        return jnp.asarray(out).astype(self.dtype or q.dtype).reshape(q.shape), lse.reshape(q.shape[:3])

    def backward(
        self, q: Array, k: Array, v: Array, dout: Array, lse: Array, delta: Array, segments: Segments | None
    ) -> Gradients:
        """(dq, dk, dv) of this worker's chunk; keys go round once more, as weights are not kept from the forward."""
        rows = lambda x: _groups(x, k.shape[2])
        with jax.named_scope("backward_step_0"):
            keys = list(self._round(k))  # all of them: little beside the scores
            scores, slope = self._scores(q, keys, segments)
            weights = _weights(scores, rows(lse))
        with jax.named_scope("backward_step_1"):
            dweights = jnp.concatenate(
                [_dot("btkgh,bskh->btkgs", rows(dout), theirs) for theirs in self._round(v)], axis=-1
            )
            parts = self._blocks(weights.astype(q.dtype))
            dv = self._sum([_dot("btkgs,btkgh->bskh", block, rows(dout)) for block in parts])
        dscores = (weights * (dweights - rows(delta)[..., None]) * slope).astype(q.dtype)
        with jax.named_scope("backward_step_2"):
            blocks = self._blocks(dscores)
            dq = sum(_dot("btkgs,bskh->btkgh", block, theirs) for block, theirs in zip(blocks, keys, strict=True))
            dk = self._sum([_dot("btkgs,btkgh->bskh", block, rows(q)) for block in blocks])
        to = self.dtype or q.dtype
        return jnp.asarray(dq).astype(to).reshape(q.shape), dk.astype(to), dv.astype(to)

    def _scores(
        self, q: Array, keys: Sequence[Array], segments: Segments | None
    ) -> tuple[Float[Array, "B T K G PS"], Float[Array, "B T K G PS"] | float]:
        """All scores of this worker's rows, -inf where hidden, and their derivative by q k^T. keys: as _round gives."""
        q = _groups(q, keys[0].shape[2])
        blocks = [_dot("btkgh,bskh->btkgs", q, theirs) * self.scale for theirs in keys]
        scores, slope = jnp.concatenate(blocks, axis=-1), self.scale
        if self.softcap is not None:
            bounded = jnp.tanh(scores / self.softcap)
            scores, slope = self.softcap * bounded, self.scale * (1 - bounded**2)
        seen = [self._visible(step, q.shape[1], keys[0].shape[1], segments) for step in range(len(keys))]
        return jnp.where(jnp.concatenate(seen, axis=-1)[:, :, None, None], scores, -jnp.inf), slope

    def _visible(self, step: int, T: int, S: int, segments: Segments | None) -> Array:
        """[B or 1, T, S]: which keys of the worker so many before this one are seen."""
        worker = lax.axis_index(self.axis)
        q_start, k_start = worker * T, (worker - step) % lax.axis_size(self.axis) * S
        ids = None
        if segments is not None:
            take = lambda x, start, size: lax.dynamic_slice_in_dim(x, start, size, axis=1)
            ids = take(segments.q, q_start, T), take(segments.kv, k_start, S)
        return self.band.mask(q_start, k_start, ids).visible(jnp.arange(T), jnp.arange(S))

    def _round(self, x: Array) -> Iterator[Array]:
        """The chunk of this worker, of the one before, and so on."""
        num_workers = lax.axis_size(self.axis)
        for step in range(num_workers):
            yield x
            if step + 1 < num_workers:
                x = self._pass_on(x)

    def _sum(self, partials: Sequence[Array]) -> Array:
        """What all workers have for this worker's chunk; partials: of its own, of the one before, and so on."""
        if len(partials) == 1:
            return partials[0]
        total = jnp.zeros_like(partials[0])
        for partial in partials[1:]:
            total = self._pass_on(total + partial)
        return partials[0] + total

    def _pass_on(self, x: Array) -> Array:
        num_workers = lax.axis_size(self.axis)
        with jax.named_scope("fetch"):
            return lax.ppermute(x, self.axis, [(worker, (worker + 1) % num_workers) for worker in range(num_workers)])

    def _blocks(self, x: Float[Array, "B T K G PS"]) -> list[Float[Array, "B T K G S"]]:
        return jnp.split(x, lax.axis_size(self.axis), axis=-1)


def _weights(scores: Float[Array, "B T K G PS"], lse: Float[Array, "B T K G"]) -> Float[Array, "B T K G PS"]:
    """exp(scores - lse); 0 in rows that see nothing, whose lse is -inf."""
    return jnp.exp(scores - jnp.where(lse == -jnp.inf, 0.0, lse)[..., None])


def _groups(x: Float[Array, "B T N ..."], num_kv_heads: int) -> Float[Array, "B T K G ..."]:
    return x.reshape(*x.shape[:2], num_kv_heads, -1, *x.shape[3:])


def _dot(subscripts: str, a: Array, b: Array) -> Float[Array, "..."]:
    """einsum that accumulates in float32; float32 operands are never rounded to tf32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=jnp.float32)
