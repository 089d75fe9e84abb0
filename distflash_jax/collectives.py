"""Strategies that are no table: Ulysses, hybrid and all-gather, by collectives before and after the block kernels.

Like executor.Plan they are hashable, have forward and backward, and are called inside shard_map. These collectives
travel behind no kernel of the same call.

Sources: Ulysses, arXiv 2309.14509; keys and values gathered: Llama 3, arXiv 2407.21783, section 3.3.2.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from distflash_jax.executor import Plan
from distflash_jax.masks import Band, Segments
from distflash_jax.placement import Axis
from distflash_jax.schedule import HeadSplit, deal
from pallas_kernels.block import BlockAttention, Box, Gradients, Operand, Partial
from pallas_kernels.masks import Mask

Arrays = tuple[Array, ...]


@dataclass(frozen=True)
class Ulysses:
    """Heads exchanged for tokens over `axis`: a worker then has some heads of a longer chunk, on which `plan` runs.

    The plan of `ulysses` is of one worker, whose chunk is the whole sequence; that of `hybrid` is a table over the
    outer axis. Results are complete when they travel, so they do in the dtype of the inputs; dk and dv of a head that
    several workers have are summed in float32 then.
    """

    split: HeadSplit
    axis: Axis
    plan: Plan

    def forward(self, q: Array, k: Array, v: Array, segments: Segments | None) -> Partial:
        """(out, lse) of this worker's chunk."""
        with scope("forward", 0, "fetch"):
            q, k, v = self._deal_queries(q), self._deal_keys(k), self._deal_keys(v)
        out, lse = self.plan.forward(q, k, v, segments)
        with scope("forward", len(self.plan.schedule.steps) - 1, "return"):
            return self._collect_queries(out), self._collect_queries(lse)

    def backward(
        self, q: Array, k: Array, v: Array, dout: Array, lse: Array, delta: Array, segments: Segments | None
    ) -> Gradients:
        """(dq, dk, dv) of this worker's chunk."""
        with scope("backward", 0, "fetch"):
            q, dout, lse, delta = map(self._deal_queries, (q, dout, lse, delta))
            k, v = map(self._deal_keys, (k, v))
        dq, dk, dv = self.plan.backward(q, k, v, dout, lse, delta, segments)
        with scope("backward", len(self.plan.schedule.steps) - 1, "return"):
            return self._collect_queries(dq), self._collect_keys(dk), self._collect_keys(dv)

    def _deal_queries(self, x: Float[Array, "B T N ..."]) -> Float[Array, "B T*P N/P ..."]:
        split, (B, T, N, *rest) = self.split, x.shape
        groups = x.reshape(B, T, split.num_kv_heads, N // split.num_kv_heads, *rest)
        groups = _pad(groups, 3, split.copies * split.group)
        return self._deal(groups.reshape(B, T, -1, *rest), split.q_heads)

    def _collect_queries(self, x: Float[Array, "B T*P N/P ..."]) -> Float[Array, "B T N ..."]:
        split, (B, _, _, *rest) = self.split, x.shape
        x = self._collect(x, split.num_kv_heads * split.copies * split.group)
        groups = x.reshape(B, x.shape[1], split.num_kv_heads, split.copies * split.group, *rest)
        groups = groups[:, :, :, : split.num_heads // split.num_kv_heads]
        return groups.reshape(B, x.shape[1], split.num_heads, *rest)

    def _deal_keys(self, x: Float[Array, "B T K H"]) -> Float[Array, "B T*P K/P H"]:
        return self._deal(jnp.repeat(x, self.split.copies, axis=2), self.split.kv_heads)

    def _collect_keys(self, x: Float[Array, "B T*P K/P H"]) -> Float[Array, "B T K H"]:
        split = self.split
        copies = self._collect(x, split.num_kv_heads * split.copies)
        if split.copies == 1:
            return copies
        B, T, _, H = copies.shape
        return copies.reshape(B, T, split.num_kv_heads, split.copies, H).sum(axis=3, dtype=jnp.float32).astype(x.dtype)

    def _deal(self, x: Array, num_heads: int) -> Array:
        """This worker's so many heads of all workers' tokens."""
        x = _pad(x, 2, num_heads * self.split.num_workers)
        return lax.all_to_all(x, self.axis, split_axis=2, concat_axis=1, tiled=True)

    def _collect(self, x: Array, num_heads: int) -> Array:
        """The first so many heads of this worker's tokens."""
        return lax.all_to_all(x, self.axis, split_axis=1, concat_axis=2, tiled=True)[:, :, :num_heads]


@dataclass(frozen=True)
class AllGather:
    """Every worker gathers all keys and values, and dk and dv of all workers are summed in float32 where they belong.

    In its natural order the first worker would have the least to do under a causal mask: workers then exchange halves
    of their chunks of queries first, so that worker w has halves w and 2P-1-w of 2P, and return the results. Memory
    for keys, values, dk and dv is that of the whole sequence.
    """

    kernel: BlockAttention
    axis: Axis
    band: Band
    scale: float
    softcap: float | None = None
    deterministic: bool = False
    dtype: str | None = None

    def forward(self, q: Array, k: Array, v: Array, segments: Segments | None) -> Partial:
        """(out, lse) of this worker's chunk."""
        with scope("forward", 0, "fetch"):
            k, v = map(self._gather, (k, v))
            dealt = self._deal((q,))
        with scope("forward", 0, "compute"):
            keys, own = operand((k, v), self.axis), functools.partial(operand, axis=self.axis)
            masks = self._masks(q.shape[1], segments)
            results = [
                self.kernel.forward(own(x), keys, mask, self.scale, self.softcap, self.dtype or q.dtype)
                for x, mask in zip(dealt, masks, strict=True)
            ]
        with scope("forward", 0, "return"):
            out, lse = self._collect(results, q.shape[1])
            return out, lse

    def backward(
        self, q: Array, k: Array, v: Array, dout: Array, lse: Array, delta: Array, segments: Segments | None
    ) -> Gradients:
        """(dq, dk, dv) of this worker's chunk."""
        with scope("backward", 0, "fetch"):
            keys = operand((self._gather(k), self._gather(v)), self.axis)
            dealt = self._deal((q, dout, lse, delta))
        with scope("backward", 0, "compute"):
            gradients = [
                self.kernel.backward(
                    operand(x, self.axis), keys, mask, self.scale, self.softcap, jnp.float32, self.deterministic
                )
                for x, mask in zip(dealt, self._masks(q.shape[1], segments), strict=True)
            ]
        with scope("backward", 0, "merge"):
            dk, dv = (functools.reduce(jnp.add, parts) for parts in list(zip(*gradients, strict=True))[1:])
        with scope("backward", 0, "return"):
            (dq,) = self._collect([(dq.astype(self.dtype or q.dtype),) for dq, _, _ in gradients], q.shape[1])
            scatter = functools.partial(lax.psum_scatter, axis_name=self.axis, scatter_dimension=1, tiled=True)
            return dq, scatter(dk).astype(self.dtype or k.dtype), scatter(dv).astype(self.dtype or v.dtype)

    def _gather(self, x: Array) -> Array:
        return lax.all_gather(x, self.axis, axis=1, tiled=True)

    @property
    def _is_dealt(self) -> bool:
        return self.band.is_causal and lax.axis_size(self.axis) > 1

    def _deal(self, arrays: Arrays) -> list[Arrays]:
        """The chunks of queries on which this worker works."""
        if not self._is_dealt:
            return [arrays]
        halves = deal(lax.axis_size(self.axis))
        return [
            tuple(lax.ppermute(_half(i, x.shape[1], x.shape[2]).take(x), self.axis, halves[i]) for x in arrays)
            for i in range(2)
        ]

    def _collect(self, results: Sequence[Arrays], num_rows: int) -> Arrays:
        """The results of this worker's own rows."""
        if not self._is_dealt:
            return results[0]
        back = [tuple((d, s) for s, d in half) for half in deal(lax.axis_size(self.axis))]
        halves = [
            tuple(lax.ppermute(x, self.axis, messages) for x in arrays)
            for arrays, messages in zip(results, back, strict=True)
        ]
        return tuple(jnp.concatenate(pair, axis=1)[:, :num_rows] for pair in zip(*halves, strict=True))

    def _masks(self, num_rows: int, segments: Segments | None) -> list[Mask]:
        """The mask of each chunk of queries on which this worker works."""
        worker = lax.axis_index(self.axis)
        starts: list[Int[Array, ""]] = [worker * num_rows]
        if self._is_dealt:
            sources = [{d: s for s, d in half} for half in deal(lax.axis_size(self.axis))]
            starts = [
                jnp.asarray([source[w] * num_rows for w in range(len(source))])[worker] + i * -(-num_rows // 2)
                for i, source in enumerate(sources)
            ]
        size = -(-num_rows // len(starts))

        def ids(start: Int[Array, ""]) -> tuple[Array, Array] | None:
            if segments is None:
                return None
            # Half of an odd chunk has a row of zeros behind it, whose document is of no account.
            padded = jnp.pad(segments.q, ((0, 0), (0, size)))
            return lax.dynamic_slice_in_dim(padded, start, size, axis=1), segments.kv

        return [self.band.mask(start, 0 * worker, ids(start)) for start in starts]


@contextmanager
def scope(direction: str, step: int, part: str) -> Iterator[None]:
    """The names by which overlap.py tells messages and kernels."""
    with jax.named_scope(f"{direction}_step_{step}"), jax.named_scope(part):
        yield


def operand(arrays: Arrays, axis: Axis) -> Operand:
    """Arrays that lie here, for a kernel that takes them whole."""
    _, num_rows, num_heads = arrays[0].shape[:3]
    nowhere: Bool[Array, ""] = lax.axis_index(axis) < 0
    return Operand(arrays, Box(0, num_rows, 0, num_heads), None, nowhere)


def _half(index: int, num_rows: int, num_heads: int) -> Box:
    size = -(-num_rows // 2)
    return Box(index * size, size, 0, num_heads)


def _pad(x: Array, axis: int, size: int) -> Array:
    """Zeros behind the elements of an axis, up to this size."""
    missing = size - x.shape[axis]
    return jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)]) if missing else x
