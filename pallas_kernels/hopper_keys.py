"""A tile of keys in the backward for Hopper: what is known of it when it is compiled, and what a warpgroup computes.

See hopper_backward.py, whose kernel walks over the queries that see the tile.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_kernels.block import Box
from pallas_kernels.block_sizes import BackwardBlocks
from pallas_kernels.hopper_rows import (
    L2_BYTES,
    LOG2_E,
    ROWS,
    divide,
    largest_divisor,
    row_tiles,
    store_rows,
    tanh,
)
from pallas_kernels.masks import Mask, Scalar

COMPUTE_WARPGROUPS = 2
KEYS_PER_WARPGROUP = 64
MEMBER = "member"  # the axis of CTAs in a cluster


class Scratch(NamedTuple):
    """Shared memory and barriers of a CTA; a leading axis counts stages, buffers or warpgroups.

    left: where the interpreter, which has no matmul with its left side in registers, puts that side; None on a GPU.
    Barriers of dout are None where those of q are for both.
    """

    k: jax.Ref
    v: jax.Ref
    q: jax.Ref
    dout: jax.Ref
    stats: jax.Ref
    dscores: jax.Ref
    staging: jax.Ref
    left: jax.Ref | None
    k_ids: jax.Ref | None
    keys_full: jax.Ref
    dscores_full: jax.Ref
    q_full: jax.Ref
    q_empty: jax.Ref
    q_free: jax.Ref
    dout_full: jax.Ref | None
    dout_empty: jax.Ref | None
    dout_free: jax.Ref | None


def divide_group(heads: int, num_ctas: int, enough: int) -> int:
    """Into how many equal parts a group of heads goes: the fewest with which there are enough CTAs, or heads."""
    return next((d for d in range(1, heads) if heads % d == 0 and d * num_ctas >= enough), heads)


@dataclass(frozen=True)
class Plan:
    """What the kernel knows when it is compiled: shapes of the task, boxes of the own operands, sizes."""

    B: int
    T: int
    N: int
    S: int
    K: int
    H: int
    dtype: jnp.dtype
    q_box: Box
    k_box: Box
    has_peer_queries: bool
    has_peer_keys: bool
    is_causal: bool
    window: int | None
    has_segments: bool
    scale: float
    softcap: float | None
    blocks: BackwardBlocks
    has_dq: bool
    is_interpreted: bool

    @property
    def weight(self) -> float:
        """By which P' is multiplied, so that dQ comes out scaled; 1 in float16, where small numbers lose digits."""
        return self.scale if self.dtype == jnp.bfloat16 else 1.0

    @property
    def parts(self) -> int:
        """Of each group of query heads."""
        return divide_group(self.N // self.K, self.B * self.K * self.num_key_tiles, self.blocks.ctas)

    @property
    def num_owners(self) -> int:
        """Parts of groups, each of which makes a dk and a dv; key/value heads where all groups are whole."""
        return self.K * self.parts

    @property
    def is_paired(self) -> bool:
        """Whether a tile of q and its tile of dout come and go together: a barrier each costs 2 to 4 %."""
        return self.blocks.stages == self.blocks.dout_stages

    @property
    def num_query_tiles(self) -> int:
        return pl.cdiv(self.T, self.blocks.rows)

    @property
    def num_key_tiles(self) -> int:
        """A multiple of the cluster: the last one may have no key."""
        return pl.cdiv(self.S, self.keys_per_tile * self.blocks.cluster) * self.blocks.cluster

    @property
    def section(self) -> int:
        """The most parts of groups that divide all and of which q, dout and dq of a query head fit in the L2 cache.

        At least two: all CTAs at one head would add to few tiles of dq at a time.
        """
        return largest_divisor(self.B * self.num_owners, max(2, L2_BYTES // (8 * self.T * self.H)))

    def place(self, cluster: Scalar) -> tuple[Scalar, Scalar, Scalar]:
        """(batch, part of a group, keys) of a cluster, keys in units of what all its CTAs take.

        In a section the first keys, of which causal queries see most, come first.
        """
        section, rest = divide(cluster, self.section * (self.num_key_tiles // self.blocks.cluster))
        keys, head = divide(rest, self.section)
        return *divide(section * self.section + head, self.num_owners), keys

    @property
    def keys_per_tile(self) -> int:
        return KEYS_PER_WARPGROUP * (COMPUTE_WARPGROUPS if self.blocks.splits_keys else 1)

    @property
    def columns(self) -> int:
        """Of dk and dv that a warpgroup sums."""
        return self.H if self.blocks.splits_keys else self.H // 2

    @property
    def dq_shape(self) -> tuple[int, int]:
        """Of the part of a tile of dq that a warpgroup makes."""
        return ROWS, self.H * self.blocks.rows // (COMPUTE_WARPGROUPS * ROWS)

    def part_of_dq(self, warpgroup: Scalar) -> tuple[pl.Slice, pl.Slice]:
        """(rows, columns) of this part in its tile."""
        has_rows = self.blocks.rows > ROWS
        return (
            pl.ds(warpgroup * ROWS if has_rows else 0, ROWS),
            pl.ds(0 if has_rows else warpgroup * self.dq_shape[1], self.dq_shape[1]),
        )

    def scratch(self) -> Scratch:
        rows, stages, dout_stages, H = self.blocks.rows, self.blocks.stages, self.blocks.dout_stages, self.H
        tile = partial(row_tiles, dtype=self.dtype, swizzle=self.blocks.swizzle)
        empty = partial(plgpu.Barrier, num_arrivals=COMPUTE_WARPGROUPS)
        free = partial(plgpu.ClusterBarrier, collective_axes=(MEMBER,))
        return Scratch(
            k=tile((self.keys_per_tile, H)),
            v=tile((self.keys_per_tile, H)),
            q=tile((stages, rows, H)),
            dout=tile((dout_stages, rows, H)),
            stats=plgpu.SMEM((stages, 2 + self.has_segments, rows), jnp.float32),
            dscores=tile((2, self.keys_per_tile, rows)),
            staging=row_tiles((COMPUTE_WARPGROUPS, ROWS, self.blocks.staging), jnp.float32),
            left=tile((COMPUTE_WARPGROUPS, KEYS_PER_WARPGROUP, rows)) if self.is_interpreted else None,
            k_ids=plgpu.SMEM((self.keys_per_tile,), jnp.float32) if self.has_segments else None,
            keys_full=plgpu.Barrier(num_arrivals=2 + self.has_segments),
            dscores_full=plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS),
            q_full=plgpu.Barrier(num_arrivals=2 + self.is_paired, num_barriers=stages),
            q_empty=empty(num_barriers=stages),
            q_free=free(num_barriers=stages),
            dout_full=None if self.is_paired else plgpu.Barrier(num_barriers=dout_stages),
            dout_empty=None if self.is_paired else empty(num_barriers=dout_stages),
            dout_free=None if self.is_paired else free(num_barriers=dout_stages),
        )


@dataclass(frozen=True)
class Worker:
    """A warpgroup that computes: its keys, and the columns of dk and dv that it sums."""

    plan: Plan
    scratch: Scratch
    warpgroup: Scalar
    first_key: Scalar
    columns: pl.Slice
    dk_ref: jax.Ref
    dv_ref: jax.Ref

    @property
    def shape(self) -> tuple[int, int]:
        return KEYS_PER_WARPGROUP, self.plan.blocks.rows

    def across(self, row) -> Array:
        """A number for each query, in every row of a tile."""
        return lax.broadcast_in_dim(plgpu.load(row, layout=plgpu.Layout.WGMMA.reduce(0)), self.shape, [1])

    def multiply(self, acc, left: Array, right) -> None:
        """acc += left @ right with the left side in registers, in the interpreter in shared memory."""
        if self.scratch.left is None:
            plgpu.wgmma(acc, left, right)
        else:
            spare = self.scratch.left.at[self.warpgroup]
            spare[...] = left
            plgpu.wgmma(acc, spare, right)

    def step(self, number, place, dq_at) -> None:
        """One query tile against this warpgroup's keys: added to the sums dk and dv, and its dq to dq_at."""
        plan, scratch, blocks = self.plan, self.scratch, self.plan.blocks
        # 0, which the compiler cannot know: addresses that do not change in the loop it would compute before it, and
        # each would take two registers of every thread throughout.
        zero = lax.shift_right_logical(number, jnp.int32(30))
        keys = pl.ds(self.first_key + zero * KEYS_PER_WARPGROUP, KEYS_PER_WARPGROUP)
        dq_rows, dq_columns = plan.part_of_dq(self.warpgroup + zero)
        slot, dout_slot = (zero if i == 1 else lax.rem(number, i) for i in (blocks.stages, blocks.dout_stages))
        q, dout, stats = scratch.q.at[slot], scratch.dout.at[dout_slot], scratch.stats.at[slot]
        if blocks.splits_keys:
            # Two buffers, so that one barrier is enough: who writes this one again has passed the barrier of the next
            # tile, which the other warpgroup only reaches when it has read this one.
            dscores_tile = scratch.dscores.at[lax.rem(number, 2)]
        else:
            dscores_tile = scratch.dscores.at[self.warpgroup]
        plgpu.barrier_wait(scratch.q_full.at[slot])
        if scratch.dout_full is not None:
            plgpu.barrier_wait(scratch.dout_full.at[dout_slot])

        def gradient(scores_ref, dweights_ref):
            plgpu.wgmma(scores_ref, scratch.k.at[keys], q.transpose((1, 0)))
            plgpu.wgmma(dweights_ref, scratch.v.at[keys], dout.transpose((1, 0)))
            scores = plgpu.wgmma_accumulator_load(scores_ref, wait_n=1)
            weights, slope = self.weights(scores, stats.at[0])  # the exponentials run while dP' is made
            if place is not None:
                weights = jnp.where(self.visible(*place, stats), weights, 0.0)
            dweights = plgpu.wgmma_accumulator_load(dweights_ref, wait_n=0)
            # Only now delta is read and weights are rounded: registers are short, and those of a running product may
            # not change, or the assembler runs all products one after the other.
            weights, dweights = lax.optimization_barrier((weights, dweights))
            dscores = weights * (dweights - self.across(stats.at[1]))
            return weights, dscores if slope is None else dscores * slope

        gradients = pl.run_scoped(gradient, *[plgpu.ACC(self.shape, jnp.float32)] * 2)
        weights, dscores = (x.astype(plan.dtype) for x in gradients)
        own_scores = dscores_tile.at[keys if blocks.splits_keys else pl.ds(0, KEYS_PER_WARPGROUP)]
        has_shared_scores = blocks.is_frugal or plan.is_interpreted
        if plan.has_dq or has_shared_scores:
            own_scores[...] = dscores
            plgpu.commit_smem()
        if plan.has_dq and blocks.splits_keys:
            plgpu.barrier_arrive(scratch.dscores_full)

        def issue_dq(dq_ref) -> None:
            plgpu.wgmma(dq_ref, dscores_tile.at[:, dq_rows].transpose((1, 0)), scratch.k.at[:, dq_columns])
            issue_dk()
            # wait_n=1: it is on its way to memory while dS' Q is made
            dq = plgpu.wgmma_accumulator_load(dq_ref, wait_n=1)
            store_rows(dq, scratch.staging.at[self.warpgroup], dq_at, None if plan.is_interpreted else "add")

        def issue_dk() -> None:
            plgpu.wgmma(self.dk_ref, own_scores if has_shared_scores else dscores, q.at[:, self.columns])

        # Accumulators begin after the waits: a product that follows its zeros starts from nothing, and the compiler
        # writes none.
        self.multiply(self.dv_ref, weights, dout.at[:, self.columns])
        if blocks.is_frugal:
            plgpu.wgmma_wait(0)
            if scratch.dout_empty is not None:
                plgpu.barrier_arrive(scratch.dout_empty.at[dout_slot])
        if plan.has_dq and blocks.splits_keys:
            plgpu.barrier_wait(scratch.dscores_full)
        if plan.has_dq:
            pl.run_scoped(issue_dq, plgpu.ACC(plan.dq_shape, jnp.float32))
        else:
            issue_dk()
        plgpu.wgmma_wait(0)
        if scratch.dout_empty is not None and not blocks.is_frugal:
            plgpu.barrier_arrive(scratch.dout_empty.at[dout_slot])
        plgpu.barrier_arrive(scratch.q_empty.at[slot])

    def weights(self, scores: Array, lse) -> tuple[Array, Array | None]:
        """exp of the scores less lse, and what a softcap multiplies their derivative by."""
        if self.plan.softcap is None:
            return jnp.exp2(scores * (self.plan.scale * LOG2_E) - self.across(lse)), None
        bounded = tanh(scores * (self.plan.scale / self.plan.softcap))
        return jnp.exp2(bounded * (self.plan.softcap * LOG2_E) - self.across(lse)), 1 - bounded * bounded

    def visible(self, mask: Mask, row: Scalar, column: Scalar, stats) -> Array:
        """Mask.visible of a tile, transposed, by comparisons of queries with the limits of each key."""
        plan = self.plan
        k_position = mask.k_start + column
        numbers = plgpu.broadcasted_iota(jnp.int32, (self.shape[0],), 0, layout=plgpu.Layout.WGMMA.reduce(1))
        rows = plgpu.broadcasted_iota(jnp.int32, self.shape, 1, layout=plgpu.Layout.WGMMA) + row
        down = lambda x: lax.broadcast_in_dim(x, self.shape, [0])
        # The first row that sees each key: behind all of them for what is no key.
        own = numbers + (k_position - mask.q_start)
        first = jnp.where(
            numbers < mask.k_stop - k_position, own if plan.is_causal else 0 * own, plan.T + self.shape[1]
        )
        seen = down(first) <= rows
        if plan.window is not None:
            seen &= rows < down(own + plan.window)
        if plan.has_segments:
            k_ids = plgpu.load(
                self.scratch.k_ids.at[pl.ds(self.first_key, KEYS_PER_WARPGROUP)], layout=plgpu.Layout.WGMMA.reduce(1)
            )
            seen &= down(k_ids) == self.across(stats.at[2])
        return seen
