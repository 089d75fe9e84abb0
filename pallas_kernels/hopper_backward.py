"""Backward of block attention for Hopper (sm90): one pass over the scores, five matmuls, in Pallas Mosaic GPU.

One CTA owns a tile of keys of one key/value head and walks over the query tiles that see it, for every query head of
the group: dk and dv stay in registers until the end, each dq tile is added to memory by the copy engine. Two warpgroups
compute, each for half of the keys (or, at large head dims, of the columns); a third one fetches.

    S' = K Q',  dP' = V dO',  P' = exp(scale S' - lse),  dS' = P' (dP' - delta)        (' is a transpose)
    dV += P' dO,  dK += scale dS' Q,  dQ += scale dS K

Source: FlashAttention-2 and -3, arXiv 2307.08691 (algorithm 2) and 2407.08608; the order of the loops is theirs.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels import block_sizes, hopper_dq
from pallas_kernels.block import Box, Gradients, Operand, check_softcap, vary_like
from pallas_kernels.block_sizes import BackwardBlocks
from pallas_kernels.hopper_rows import (
    COPY_ROWS,
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
DTYPES = (jnp.bfloat16, jnp.float16)


class Scratch(NamedTuple):
    """Shared memory and barriers of a CTA; a leading axis counts stages, buffers or warpgroups.

    left: where the interpreter, which has no matmul with its left side in registers, puts that side; None on a GPU.
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
    full: jax.Ref
    empty: jax.Ref
    dscores_full: jax.Ref


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
    def num_query_tiles(self) -> int:
        return pl.cdiv(self.T, ROWS)

    @property
    def num_key_tiles(self) -> int:
        return pl.cdiv(self.S, self.keys_per_tile)

    @property
    def section(self) -> int:
        """The most key/value heads that divide all and of which q, dout and dq of a query head fit in the L2 cache.

        At least two: all CTAs at one head would add to few tiles of dq at a time.
        """
        return largest_divisor(self.B * self.K, max(2, L2_BYTES // (8 * self.T * self.H)))

    def place(self, block: Scalar) -> tuple[Scalar, Scalar, Scalar]:
        """(batch, kv_head, key_tile) of a CTA; in a section the first keys, of which causal queries see most, first."""
        section, rest = divide(block, self.section * self.num_key_tiles)
        key_tile, head = divide(rest, self.section)
        return *divide(section * self.section + head, self.K), key_tile

    @property
    def keys_per_tile(self) -> int:
        return KEYS_PER_WARPGROUP * (COMPUTE_WARPGROUPS if self.blocks.splits_keys else 1)

    @property
    def columns(self) -> int:
        """Of dk and dv that a warpgroup sums."""
        return self.H if self.blocks.splits_keys else self.H // 2

    def scratch(self) -> Scratch:
        rows, stages, H = ROWS, self.blocks.stages, self.H
        tile = partial(row_tiles, dtype=self.dtype, swizzle=self.blocks.swizzle)
        return Scratch(
            k=tile((self.keys_per_tile, H)),
            v=tile((self.keys_per_tile, H)),
            q=tile((stages, rows, H)),
            dout=tile((stages, rows, H)),
            stats=plgpu.SMEM((stages, 2 + self.has_segments, rows), jnp.float32),
            dscores=tile((2, self.keys_per_tile, rows)),
            staging=row_tiles((COMPUTE_WARPGROUPS, ROWS, self.blocks.staging), jnp.float32),
            left=tile((COMPUTE_WARPGROUPS, KEYS_PER_WARPGROUP, rows)) if self.is_interpreted else None,
            k_ids=plgpu.SMEM((self.keys_per_tile,), jnp.float32) if self.has_segments else None,
            keys_full=plgpu.Barrier(num_arrivals=2 + self.has_segments),
            full=plgpu.Barrier(num_arrivals=3, num_barriers=stages),
            empty=plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=stages),
            dscores_full=plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS),
        )


def backward(
    queries: Operand,
    keys: Operand,
    mask: Mask,
    scale: float,
    softcap: float | None = None,
    dtype: DTypeLike = jnp.float32,
    deterministic: bool = False,
    *,
    blocks: BackwardBlocks | None = None,
    interpret: bool = False,
) -> Gradients:
    """(dq, dk, dv) of one query chunk against one key/value chunk, by the global lse and delta; see BlockAttention.

    The additions into dq come in no fixed order: its last bits differ from run to run. With deterministic=True a kernel
    of its own makes dq, by seven matmuls in all instead of five, and all bits repeat.

    Raises:
        ValueError: a dtype or head dim that the kernel does not take, blocks that do not fit.
    """
    q, k = queries.own[0], keys.own[0]
    if q.dtype not in DTYPES or k.dtype != q.dtype:
        raise ValueError(f"q.dtype={q.dtype}, k.dtype={k.dtype}: must be the same and bfloat16 or float16")
    check_softcap(softcap)
    head_dim = q.shape[-1]
    H = block_sizes.padded_head_dim(head_dim)
    if head_dim != H:
        queries, keys = queries.with_head_dim(H), keys.with_head_dim(H)
    # Rows that are added count for nothing: their lse is inf, and they lie behind k_stop.
    rows = queries._replace(own=queries.own[:2], peer=queries.peer and queries.peer[:2]).aligned(COPY_ROWS)
    columns = keys.aligned(COPY_ROWS)
    plan = Plan(
        B=q.shape[0], T=rows.box.num_rows, N=rows.box.num_heads, S=columns.box.num_rows, K=columns.box.num_heads, H=H,
        dtype=q.dtype, q_box=rows.box, k_box=columns.box, has_peer_queries=rows.peer is not None,
        has_peer_keys=columns.peer is not None, is_causal=mask.is_causal, window=mask.window,
        has_segments=mask.segment_ids is not None, scale=scale, softcap=softcap,
        blocks=blocks or block_sizes.find("backward", H, q.dtype, mask.kind), has_dq=not deterministic,
        is_interpreted=interpret,
    )  # fmt: skip
    scratch = plan.scratch()
    if not interpret:
        block_sizes.check_shared_memory(scratch, plan.blocks)
    k_stop = jnp.minimum(mask.k_stop, mask.k_start + keys.box.num_rows)  # behind the box lies no key of this task
    scalars = [mask.q_start, mask.k_start, k_stop, queries.is_peer, keys.is_peer]
    scalars = jnp.stack([jnp.asarray(x, jnp.int32) for x in scalars])
    table = mask.query_tiles(queries.box.num_rows, ROWS, keys.box.num_rows, plan.keys_per_tile)
    q_ids, *k_ids = mask.tile_segments(ROWS, plan.keys_per_tile) if plan.has_segments else (None,)
    stats = _stats(queries._replace(own=queries.own[2:], peer=queries.peer and queries.peer[2:]), q_ids, plan)
    operands = (rows.own, rows.peer or (), columns.own, columns.peer or ())
    # The interpreter cannot add in memory: there every key tile gets a dq of its own.
    dq_shape = (plan.num_key_tiles,) * interpret + (plan.B, plan.T, plan.N, H)
    # Tied to an operand, lse, or XLA makes the zeros of all blocks of a program at its start, and keeps them.
    zero, _ = lax.optimization_barrier((jnp.float32(0), queries.own[2]))
    dq_refs = [jax.new_ref(jnp.full(dq_shape, zero))] if plan.has_dq else []
    is_short = plan.blocks.splits_keys and jnp.dtype(dtype) == q.dtype
    gradient = jax.ShapeDtypeStruct((plan.B, plan.S, plan.K, H), dtype if is_short else jnp.float32)
    dk, dv = plgpu.kernel(
        partial(_kernel, plan=plan),
        out_type=(gradient, gradient),
        scratch_types=(scratch,),
        grid=(plan.B * plan.K * plan.num_key_tiles,),
        grid_names=("block",),
        num_threads=COMPUTE_WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
        kernel_name="hopper_backward",
    )(scalars, table, *k_ids, stats, *jax.tree.leaves(operands), *dq_refs)
    if deterministic:
        dq = scale * hopper_dq.query_gradient(queries, keys, mask, scale, softcap, interpret=interpret)
    else:
        dq = jax.freeze(dq_refs[0])
        dq = (dq.sum(axis=0) if interpret else dq) * (scale / plan.weight)
    results = (dq, queries.box.num_rows), (dk, keys.box.num_rows), (dv, keys.box.num_rows)
    dq, dk, dv = (vary_like(x[:, :length, :, :head_dim].astype(dtype), q) for x, length in results)
    return dq, dk, dv


def _stats(
    rows: Operand, q_ids: Float[Array, "B tiles rows"] | None, plan: Plan
) -> Float[Array, "B N tiles numbers rows"]:
    """(lse in base 2 less the weight's, delta, segment if there are some) of every query tile, contiguous.

    Rows that see nothing and rows behind the end have lse = inf: their weights are exp2(-inf) = 0 whatever lies there.
    """
    lse, delta = rows.read()  # small: reading them outside costs no pass over an operand
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2_E - math.log2(plan.weight))
    size = ROWS
    padding = ((0, 0), (0, plan.num_query_tiles * size - lse.shape[1]), (0, 0))
    stats = jnp.stack([jnp.pad(lse, padding, constant_values=jnp.inf), jnp.pad(delta, padding)])
    stats = stats.reshape(2, plan.B, plan.num_query_tiles, size, plan.N).transpose(1, 4, 2, 0, 3)
    if q_ids is None:
        return stats
    ids = jnp.broadcast_to(q_ids[:, None, :, None], (*stats.shape[:3], 1, size))
    return jnp.concatenate([stats, ids], axis=3)


def _kernel(scalars_ref, table_ref, *refs, plan: Plan) -> None:
    """One CTA: see the top of this file."""
    refs, (dk_ref, dv_ref, scratch) = list(refs[:-3]), refs[-3:]
    dq_ref = refs.pop() if plan.has_dq else None
    k_ids_ref = refs.pop(0) if plan.has_segments else None
    stats_ref = refs.pop(0)
    take = lambda is_there: tuple(refs.pop(0) for _ in range(2)) if is_there else None
    own_queries, peer_queries = take(True), take(plan.has_peer_queries)
    own_keys, peer_keys = take(True), take(plan.has_peer_keys)
    batch, kv_head, key_tile = plan.place(lax.axis_index("block"))
    warpgroup = lax.axis_index("warpgroup")
    column = key_tile * plan.keys_per_tile
    mask = Mask(scalars_ref[0], scalars_ref[1], scalars_ref[2], plan.is_causal, plan.window)
    # + 0: inside shard_map what is read is typed as varying over the mesh, what is computed here is not, and a loop
    # must count in one type.
    tiles = [table_ref[batch if plan.has_segments else 0, key_tile, i] + 0 for i in range(4)]
    start, full_start, full_stop, stop = tiles
    tiles_per_head = stop - start
    group = plan.N // plan.K
    num_tiles = group * tiles_per_head

    @pl.when(warpgroup == COMPUTE_WARPGROUPS)
    def copy():
        plgpu.set_max_registers(plan.blocks.copy_registers, action="decrease")

        def copy_keys(refs, row, head):
            at = (batch, pl.ds(row + column, plan.keys_per_tile), head + kv_head)
            plgpu.copy_gmem_to_smem(refs[0].at[at], scratch.k, scratch.keys_full)
            plgpu.copy_gmem_to_smem(refs[1].at[at], scratch.v, scratch.keys_full)

        _choose(scalars_ref[4], own_keys, peer_keys, plan.k_box, copy_keys)
        if plan.has_segments:
            plgpu.copy_gmem_to_smem(k_ids_ref.at[batch, key_tile], scratch.k_ids, scratch.keys_full)

        @pl.loop(0, num_tiles + plan.blocks.stages)
        def copy_tile(number):
            slot = lax.rem(number, plan.blocks.stages)

            @pl.when(number >= plan.blocks.stages)
            def wait():  # also after the last copy, so that every arrival on a barrier has been seen when it goes away
                plgpu.barrier_wait(scratch.empty.at[slot])

            @pl.when(number < num_tiles)
            def issue():
                tile = start + lax.rem(number, tiles_per_head)
                q_head = kv_head * group + lax.div(number, tiles_per_head)

                def copy_rows(refs, row, head):
                    rows = pl.ds(row + tile * ROWS, ROWS)
                    for ref, tiles in zip(refs, (scratch.q, scratch.dout), strict=True):
                        at = (batch, rows, head + q_head)
                        plgpu.copy_gmem_to_smem(ref.at[at], tiles.at[slot], scratch.full.at[slot])

                _choose(scalars_ref[3], own_queries, peer_queries, plan.q_box, copy_rows)
                stats = stats_ref.at[batch, q_head, tile]
                plgpu.copy_gmem_to_smem(stats, scratch.stats.at[slot], scratch.full.at[slot])

    @pl.when(warpgroup < COMPUTE_WARPGROUPS)
    def compute():
        plgpu.set_max_registers(plan.blocks.compute_registers, action="increase")
        plgpu.barrier_wait(scratch.keys_full)
        first_key = warpgroup * KEYS_PER_WARPGROUP if plan.blocks.splits_keys else 0
        own_columns = pl.ds(0 if plan.blocks.splits_keys else warpgroup * plan.columns, plan.columns)

        def sums(dk_ref, dv_ref):
            worker = _Worker(plan, scratch, warpgroup, first_key, own_columns, dk_ref, dv_ref)

            def head(g, state):
                def step(tile, state, is_masked):
                    number, scores = state  # counted: a number that follows from the table would lie in each thread
                    dq = _dq_tile(dq_ref, key_tile, batch, tile, kv_head * group + g, warpgroup, plan)
                    place = (mask, tile * ROWS, column + first_key) if is_masked else None
                    return number + 1, worker.step(number, number + 1 < num_tiles, scores, place, dq)

                state = lax.fori_loop(start, full_start, partial(step, is_masked=True), state)
                state = lax.fori_loop(full_start, full_stop, partial(step, is_masked=False), state)
                if plan.window is not None or plan.has_segments:  # queries after those that see a key may not see it
                    state = lax.fori_loop(full_stop, stop, partial(step, is_masked=True), state)
                return state

            scores = worker.first_scores(num_tiles > 0) if plan.blocks.has_prefetch else None
            lax.fori_loop(0, group, head, (jnp.int32(0), scores))
            return dk_ref[...], dv_ref[...]

        dk, dv = pl.run_scoped(sums, *[plgpu.ACC((KEYS_PER_WARPGROUP, plan.columns), jnp.float32)] * 2)
        staging = scratch.staging.at[warpgroup]
        if dk_ref.dtype == plan.dtype:  # there is room where V was, which no other warpgroup reads
            staging = scratch.v.at[pl.ds(first_key, KEYS_PER_WARPGROUP)]
        for gradient, ref in ((dk * (plan.scale / plan.weight), dk_ref), (dv * (1 / plan.weight), dv_ref)):
            target = ref.at[batch, pl.ds(column + first_key, KEYS_PER_WARPGROUP), kv_head, own_columns]
            store_rows(gradient.astype(ref.dtype), staging, target)
        plgpu.wait_smem_to_gmem(0)


@dataclass(frozen=True)
class _Worker:
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
        return KEYS_PER_WARPGROUP, ROWS

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

    def issue_scores(self, scores_ref, keys, slot) -> None:
        plgpu.wgmma(scores_ref, self.scratch.k.at[keys], self.scratch.q.at[slot].transpose((1, 0)))

    def first_scores(self, has_tiles) -> Array:
        def scores(scores_ref):
            pl.when(has_tiles)(lambda: plgpu.barrier_wait(self.scratch.full.at[0]))
            self.issue_scores(scores_ref, pl.ds(self.first_key, KEYS_PER_WARPGROUP), 0)
            return scores_ref[...]

        return pl.run_scoped(scores, plgpu.ACC(self.shape, jnp.float32))

    def step(self, number, has_next, scores: Array | None, place, dq_at) -> Array | None:
        """One query tile against this warpgroup's keys: added to the sums dk and dv, and its dq to dq_at.

        scores: of this tile where they were prefetched; then those of the next tile are returned.
        """
        plan, scratch, blocks = self.plan, self.scratch, self.plan.blocks
        # 0, which the compiler cannot know: addresses that do not change in the loop it would compute before it, and
        # each would take two registers of every thread throughout.
        zero = lax.shift_right_logical(number, jnp.int32(30))
        keys = pl.ds(self.first_key + zero * KEYS_PER_WARPGROUP, KEYS_PER_WARPGROUP)
        dq_columns = pl.ds((self.warpgroup + zero) * (plan.H // 2), plan.H // 2)
        slot, next_slot = lax.rem(number, blocks.stages), lax.rem(number + 1, blocks.stages)
        q, dout, stats = scratch.q.at[slot], scratch.dout.at[slot], scratch.stats.at[slot]
        if blocks.splits_keys:
            # Two buffers, so that one barrier is enough: who writes this one again has passed the barrier of the next
            # tile, which the other warpgroup only reaches when it has read this one.
            dscores_tile = scratch.dscores.at[lax.rem(number, 2)]
        else:
            dscores_tile = scratch.dscores.at[self.warpgroup]
        if not blocks.has_prefetch:
            plgpu.barrier_wait(scratch.full.at[slot])

        def gradient(dweights_ref, scores_ref=None):
            tile = scores
            if scores_ref is not None:
                self.issue_scores(scores_ref, keys, slot)
            plgpu.wgmma(dweights_ref, scratch.v.at[keys], dout.transpose((1, 0)))
            if scores_ref is not None:  # the exponentials run while dP' is made
                tile = plgpu.wgmma_accumulator_load(scores_ref, wait_n=1)
            weights, slope = self.weights(tile, stats.at[0])
            if place is not None:
                weights = jnp.where(self.visible(*place, stats), weights, 0.0)
            dweights = plgpu.wgmma_accumulator_load(dweights_ref, wait_n=0)
            # Only now delta is read and weights are rounded: registers are short, and those of a running product may
            # not change, or the assembler runs all products one after the other.
            weights, dweights = lax.optimization_barrier((weights, dweights))
            dscores = weights * (dweights - self.across(stats.at[1]))
            return weights, dscores if slope is None else dscores * slope

        accumulators = [plgpu.ACC(self.shape, jnp.float32)] * (1 if blocks.has_prefetch else 2)
        weights, dscores = (x.astype(plan.dtype) for x in pl.run_scoped(gradient, *accumulators))
        own_scores = dscores_tile.at[keys if blocks.splits_keys else pl.ds(0, KEYS_PER_WARPGROUP)]
        has_shared_scores = blocks.is_frugal or plan.is_interpreted
        if plan.has_dq or has_shared_scores:
            own_scores[...] = dscores
            plgpu.commit_smem()
        if plan.has_dq and blocks.splits_keys:
            plgpu.barrier_arrive(scratch.dscores_full)

        def products(dq_ref, next_ref=None):
            self.multiply(self.dv_ref, weights, dout.at[:, self.columns])
            if blocks.is_frugal:
                plgpu.wgmma_wait(0)
            if next_ref is not None:
                pl.when(has_next)(lambda: plgpu.barrier_wait(scratch.full.at[next_slot]))
                self.issue_scores(next_ref, keys, next_slot)
            if plan.has_dq and blocks.splits_keys:
                plgpu.barrier_wait(scratch.dscores_full)
            if plan.has_dq:
                plgpu.wgmma(dq_ref, dscores_tile.transpose((1, 0)), scratch.k.at[:, dq_columns])
            plgpu.wgmma(self.dk_ref, own_scores if has_shared_scores else dscores, q.at[:, self.columns])
            if plan.has_dq:  # wait_n=1: it is on its way to memory while dS' Q is made
                dq = plgpu.wgmma_accumulator_load(dq_ref, wait_n=1)
                store_rows(dq, scratch.staging.at[self.warpgroup], dq_at, None if plan.is_interpreted else "add")
            plgpu.wgmma_wait(0)
            next_scores = None if next_ref is None else plgpu.wgmma_accumulator_load(next_ref, wait_n=0)
            plgpu.barrier_arrive(scratch.empty.at[slot])
            return next_scores

        accumulators = [plgpu.ACC((ROWS, plan.H // 2), jnp.float32)]
        if blocks.has_prefetch:
            accumulators.append(plgpu.ACC(self.shape, jnp.float32))
        return pl.run_scoped(products, *accumulators)

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
        rows = plgpu.broadcasted_iota(jnp.int32, self.shape, 1, layout=plgpu.Layout.WGMMA)
        down = lambda x: lax.broadcast_in_dim(x, self.shape, [0])
        # The first row that sees each key: behind the tile for what is no key.
        own = numbers + (k_position - mask.q_start - row)
        first = jnp.where(numbers < mask.k_stop - k_position, own if plan.is_causal else 0 * own, ROWS)
        seen = down(first) <= rows
        if plan.window is not None:
            seen &= rows < down(own + plan.window)
        if plan.has_segments:
            k_ids = plgpu.load(
                self.scratch.k_ids.at[pl.ds(self.first_key, KEYS_PER_WARPGROUP)], layout=plgpu.Layout.WGMMA.reduce(1)
            )
            seen &= down(k_ids) == self.across(stats.at[2])
        return seen


def _dq_tile(dq_ref, key_tile, batch, tile, q_head, warpgroup, plan: Plan):
    """This warpgroup's half of the columns of a tile of dq; None where another kernel makes it."""
    rows = pl.ds(tile * ROWS, ROWS)
    if dq_ref is None:
        return None
    tiles = dq_ref.at[key_tile] if plan.is_interpreted else dq_ref
    return tiles.at[batch, rows, q_head, pl.ds(warpgroup * (plan.H // 2), plan.H // 2)]


def _choose(is_peer, own, peer, box: Box, use: Callable[[tuple, Scalar, Scalar], None]) -> None:
    """use(refs, first row, first head) with the refs that hold the operand at run time."""
    if peer is None:
        use(own, box.row, box.head)
        return
    pl.when(is_peer == 1)(lambda: use(peer, 0, 0))
    pl.when(is_peer == 0)(lambda: use(own, box.row, box.head))
