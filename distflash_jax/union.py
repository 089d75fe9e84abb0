"""Attention of several masks at once that have no pair of a query and a key in common, and of the first tokens alone.

Like executor.Plan these are hashable, have forward and backward, and are called inside shard_map.

Source: DISTFLASHATTN, arXiv 2310.03294, appendix F, which replicates global tokens.
"""

import functools
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from distflash_jax.collectives import operand, scope
from distflash_jax.masks import Band, Segments
from distflash_jax.placement import Axis
from pallas_kernels.block import BlockAttention, Gradients, Operand, Partial, vary_like
from pallas_kernels.masks import Mask
from pallas_kernels.merge import merge

Arrays = tuple[Array, ...]


@dataclass(frozen=True)
class Union:
    """The plans of the masks, one after the other, each with segments of its own and results in float32.

    Partial results of the same queries are merged by their log-sum-exp. The backward of each has the lse and delta of
    whole rows, so gradients add up.
    """

    members: tuple[Any, ...]

    def forward(self, q: Array, k: Array, v: Array, segments: tuple[Segments | None, ...]) -> Partial:
        """(out, lse) of this worker's chunk."""
        partials = [plan.forward(q, k, v, x) for plan, x in zip(self.members, segments, strict=True)]
        with scope("forward", 0, "merge"):
            out, lse = functools.reduce(merge, partials)
            return out.astype(q.dtype), lse

    def backward(
        self, q: Array, k: Array, v: Array, dout: Array, lse: Array, delta: Array, segments: tuple[Segments | None, ...]
    ) -> Gradients:
        """(dq, dk, dv) of this worker's chunk."""
        members = zip(self.members, segments, strict=True)
        gradients = [plan.backward(q, k, v, dout, lse, delta, x) for plan, x in members]
        with scope("backward", 0, "merge"):
            dq, dk, dv = (functools.reduce(jnp.add, parts) for parts in zip(*gradients, strict=True))
            return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


@dataclass(frozen=True)
class First:
    """The first `count` keys seen by all queries, or the first queries that see all keys: every worker gets a copy.

    of: "keys" or "queries". Each worker has them beside its own chunk of the other side, whatever lies in which chunk.
    """

    kernel: BlockAttention
    axis: Axis
    band: Band
    of: Literal["keys", "queries"]
    count: int
    scale: float
    softcap: float | None = None
    deterministic: bool = False

    def forward(self, q: Array, k: Array, v: Array, segments: Segments | None) -> Partial:
        """(out, lse) of this worker's chunk, in float32."""
        queries, keys = self._operands("forward", (q,), (k, v))
        with scope("forward", 0, "compute"):
            mask = self._mask(q.shape[1], k.shape[1], segments)
            out, lse = self.kernel.forward(queries, keys, mask, self.scale, self.softcap, jnp.float32)
        if self.of == "keys":
            return out, lse
        with scope("forward", 0, "merge"):  # of all workers' keys
            top = lax.pmax(lse, self.axis)
            weight = jnp.exp(lse - jnp.where(top == -jnp.inf, 0.0, top))
            total = lax.psum(weight, self.axis)
            out = lax.psum(out * weight[..., None], self.axis) / jnp.where(total == 0, 1.0, total)[..., None]
            return self._own(out, q.shape[1]), self._own(top + jnp.log(total), q.shape[1], fill=-jnp.inf)

    def backward(
        self, q: Array, k: Array, v: Array, dout: Array, lse: Array, delta: Array, segments: Segments | None
    ) -> Gradients:
        """(dq, dk, dv) of this worker's chunk, in float32."""
        queries, keys = self._operands("backward", (q, dout, lse, delta), (k, v))
        with scope("backward", 0, "compute"):
            mask = self._mask(q.shape[1], k.shape[1], segments)
            dq, dk, dv = self.kernel.backward(
                queries, keys, mask, self.scale, self.softcap, jnp.float32, self.deterministic
            )
        with scope("backward", 0, "return"):
            total = lambda x, own: self._own(lax.psum(x, self.axis), own.shape[1])
            return (dq, total(dk, k), total(dv, v)) if self.of == "keys" else (total(dq, q), dk, dv)

    def _operands(self, direction: str, q_side: Arrays, kv_side: Arrays) -> tuple[Operand, Operand]:
        with scope(direction, 0, "fetch"):
            if self.of == "keys":
                kv_side = tuple(map(self._copy, kv_side))
            else:
                q_side = tuple(map(self._copy, q_side))
        return operand(q_side, self.axis), operand(kv_side, self.axis)

    def _mask(self, rows: int, keys: int, segments: Segments | None) -> Mask:
        """rows, keys: of a worker's own chunk."""
        worker = lax.axis_index(self.axis)
        start = lambda size, of: worker * (0 if self.of == of else size)
        take = lambda ids, size, of: lax.dynamic_slice_in_dim(
            ids, start(size, of), self.count if self.of == of else size, axis=1
        )
        ids = segments and (take(segments.q, rows, "queries"), take(segments.kv, keys, "keys"))
        return self.band.mask(start(rows, "queries"), start(keys, "keys"), ids)

    def _copy(self, x: Float[Array, "B T ..."]) -> Float[Array, "B count ..."]:
        """The first rows of all workers, on each."""
        rows, size = x.shape[1], min(x.shape[1], self.count)
        nothing = jnp.zeros((x.shape[0], self.count + size, *x.shape[2:]), x.dtype)
        mine = lax.dynamic_update_slice_in_dim(vary_like(nothing, x), x[:, :size], self._start(rows), axis=1)
        return vary_like(lax.psum(mine[:, : self.count], self.axis), x)

    def _own(self, x: Float[Array, "B count ..."], rows: int, fill: float = 0.0) -> Float[Array, "B T ..."]:
        """This worker's chunk of so many rows, where what is not among the first is `fill`."""
        padding = [(0, rows if i == 1 else 0) for i in range(x.ndim)]
        padded = jnp.pad(x, padding, constant_values=fill)
        return lax.dynamic_slice_in_dim(padded, self._start(rows), rows, axis=1)

    def _start(self, rows: int) -> Array:
        """Of this worker's chunk, or behind the first rows where none of it is among them."""
        return jnp.minimum(lax.axis_index(self.axis) * rows, self.count)
