"""Backward of block attention for Hopper (sm90): one pass over the scores, five matmuls, in Pallas Mosaic GPU.

One CTA owns a tile of keys of one key/value head and walks over the query tiles that see it, for every query head of
the group: dk and dv stay in registers until the end, each dq tile is added to memory by the copy engine. Two warpgroups
compute, each for half of the keys; a third one fetches.

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
from jaxtyping import Array, Float

from pallas_kernels.block import Box, Gradients, Operand, vary_like
from pallas_kernels.masks import Mask, Scalar

LOG2_E = math.log2(math.e)
COMPUTE_WARPGROUPS = 2
KEYS_PER_WARPGROUP = 64  # rows of one wgmma
KEYS_PER_TILE = COMPUTE_WARPGROUPS * KEYS_PER_WARPGROUP
COPY_ROWS = 8  # height of the tiles in which the copy engine reads and writes
DTYPES = (jnp.bfloat16, jnp.float16)


@dataclass(frozen=True)
class Blocks:
    """Sizes that only speed depends on.

    swizzle: bytes of a row of the 16-bit tiles. Each warpgroup makes one half of the columns of dq, so that half of the
    head dim must fill whole rows: 128 bytes at head dim 128, 64 bytes at 64.
    has_auto_barriers: a warpgroup barrier around every store to shared memory. No thread here reads what it stored, and
    each reader waits for a barrier of its own, so that it should be right without.
    """

    rows_per_tile: int = 64
    num_stages: int = 2
    swizzle: int = 128
    compute_registers: int = 240
    copy_registers: int = 24
    has_auto_barriers: bool = True


BLOCKS = {64: Blocks(swizzle=64, num_stages=3), 128: Blocks()}


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
    scale: float
    blocks: Blocks
    is_interpreted: bool

    @property
    def num_query_tiles(self) -> int:
        return pl.cdiv(self.T, self.blocks.rows_per_tile)

    def scratch(self) -> Scratch:
        rows, stages, H = self.blocks.rows_per_tile, self.blocks.num_stages, self.H
        tile = partial(_tile, dtype=self.dtype, swizzle=self.blocks.swizzle)
        return Scratch(
            k=tile((KEYS_PER_TILE, H)),
            v=tile((KEYS_PER_TILE, H)),
            q=tile((stages, rows, H)),
            dout=tile((stages, rows, H)),
            stats=plgpu.SMEM((stages, 2, rows), jnp.float32),
            dscores=tile((2, KEYS_PER_TILE, rows)),
            staging=_tile((COMPUTE_WARPGROUPS, rows, H // 2), jnp.float32, 128),
            left=tile((KEYS_PER_TILE, rows)) if self.is_interpreted else None,
            keys_full=plgpu.Barrier(num_arrivals=2),
            full=plgpu.Barrier(num_arrivals=3, num_barriers=stages),
            empty=plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=stages),
            dscores_full=plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS),
        )


def backward(
    queries: Operand, keys: Operand, mask: Mask, scale: float, blocks: Blocks | None = None, *, interpret: bool = False
) -> Gradients:
    """(dq, dk, dv) of one query chunk against one key/value chunk, by the global lse and delta; see BlockAttention.

    The additions into dq come in no fixed order: its last bits differ from run to run.

    Raises:
        ValueError: a dtype or head dim that the kernel does not have.
    """
    q, k = queries.own[0], keys.own[0]
    H = q.shape[-1]
    if q.dtype not in DTYPES or k.dtype != q.dtype:
        raise ValueError(f"q.dtype={q.dtype}, k.dtype={k.dtype}: must be the same and bfloat16 or float16")
    if H not in BLOCKS:
        raise ValueError(f"head dim {H}: must be one of {sorted(BLOCKS)}")
    # Rows that are added count for nothing: their lse is inf, and they lie behind k_stop.
    rows = queries._replace(own=queries.own[:2], peer=queries.peer and queries.peer[:2]).aligned(COPY_ROWS)
    columns = keys.aligned(COPY_ROWS)
    plan = Plan(
        B=q.shape[0], T=rows.box.num_rows, N=rows.box.num_heads, S=columns.box.num_rows, K=columns.box.num_heads, H=H,
        dtype=q.dtype, q_box=rows.box, k_box=columns.box, has_peer_queries=rows.peer is not None,
        has_peer_keys=columns.peer is not None, is_causal=mask.is_causal, scale=scale, blocks=blocks or BLOCKS[H],
        is_interpreted=interpret,
    )  # fmt: skip
    k_stop = jnp.minimum(mask.k_stop, mask.k_start + keys.box.num_rows)  # behind the box lies no key of this task
    scalars = [mask.q_start, mask.k_start, k_stop, queries.is_peer, keys.is_peer]
    scalars = jnp.stack([jnp.asarray(x, jnp.int32) for x in scalars])
    stats = _stats(queries._replace(own=queries.own[2:], peer=queries.peer and queries.peer[2:]), plan)
    operands = (rows.own, rows.peer or (), columns.own, columns.peer or ())
    # The interpreter cannot add in memory: there every key tile gets a dq of its own.
    num_key_tiles = pl.cdiv(plan.S, KEYS_PER_TILE)
    dq_ref = jax.new_ref(jnp.zeros((num_key_tiles,) * interpret + (plan.B, plan.T, plan.N, H), jnp.float32))
    gradient = jax.ShapeDtypeStruct((plan.B, plan.S, plan.K, H), jnp.float32)
    dk, dv = plgpu.kernel(
        partial(_kernel, plan=plan),
        out_type=(gradient, gradient),
        scratch_types=(plan.scratch(),),
        # The last axis runs fastest. Under a causal mask the first keys have the most queries: longest CTAs first.
        grid=(num_key_tiles, plan.B, plan.K),
        grid_names=("key_tile", "batch", "kv_head"),
        num_threads=COMPUTE_WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=not plan.blocks.has_auto_barriers,
            reduction_scratch_bytes=0,
        ),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
        kernel_name="hopper_backward",
    )(scalars, stats, *jax.tree.leaves(operands), dq_ref)
    dq = jax.freeze(dq_ref)
    dq = dq.sum(axis=0) if interpret else dq
    rows, columns = queries.box.num_rows, keys.box.num_rows
    return vary_like(dq[:, :rows], q), vary_like(dk[:, :columns], q), vary_like(dv[:, :columns], q)


def _stats(rows: Operand, plan: Plan) -> Float[Array, "B N tiles 2 rows"]:
    """(lse in base 2, delta) of every query tile, contiguous.

    Rows that see nothing and rows behind the end have lse = inf: their weights are exp2(-inf) = 0 whatever lies there.
    """
    lse, delta = rows.read()  # small: reading them outside costs no pass over an operand
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2_E)
    size = plan.blocks.rows_per_tile
    padding = ((0, 0), (0, plan.num_query_tiles * size - lse.shape[1]), (0, 0))
    stats = jnp.stack([jnp.pad(lse, padding, constant_values=jnp.inf), jnp.pad(delta, padding)])
    return stats.reshape(2, plan.B, plan.num_query_tiles, size, plan.N).transpose(1, 4, 2, 0, 3)


def _kernel(scalars_ref, stats_ref, *refs, plan: Plan) -> None:
    """One CTA: see the top of this file."""
    refs, (dq_ref, dk_ref, dv_ref, scratch) = list(refs[:-4]), refs[-4:]
    take = lambda is_there: tuple(refs.pop(0) for _ in range(2)) if is_there else None
    own_queries, peer_queries = take(True), take(plan.has_peer_queries)
    own_keys, peer_keys = take(True), take(plan.has_peer_keys)
    key_tile, batch, kv_head = (lax.axis_index(name) for name in ("key_tile", "batch", "kv_head"))
    warpgroup = lax.axis_index("warpgroup")
    column = key_tile * KEYS_PER_TILE
    mask = Mask(scalars_ref[0], scalars_ref[1], scalars_ref[2], plan.is_causal)
    start, full_start = _query_tiles(mask, column, plan)
    tiles_per_head = plan.num_query_tiles - start
    group = plan.N // plan.K
    num_tiles = group * tiles_per_head

    @pl.when(warpgroup == COMPUTE_WARPGROUPS)
    def copy():
        plgpu.set_max_registers(plan.blocks.copy_registers, action="decrease")

        def copy_keys(refs, row, head):
            at = (batch, pl.ds(row + column, KEYS_PER_TILE), head + kv_head)
            plgpu.copy_gmem_to_smem(refs[0].at[at], scratch.k, scratch.keys_full)
            plgpu.copy_gmem_to_smem(refs[1].at[at], scratch.v, scratch.keys_full)

        _choose(scalars_ref[4], own_keys, peer_keys, plan.k_box, copy_keys)

        @pl.loop(0, num_tiles + plan.blocks.num_stages)
        def copy_tile(number):
            slot = lax.rem(number, plan.blocks.num_stages)

            @pl.when(number >= plan.blocks.num_stages)
            def wait():  # also after the last copy, so that every arrival on a barrier has been seen when it goes away
                plgpu.barrier_wait(scratch.empty.at[slot])

            @pl.when(number < num_tiles)
            def issue():
                tile = start + lax.rem(number, tiles_per_head)
                q_head = kv_head * group + lax.div(number, tiles_per_head)

                def copy_rows(refs, row, head):
                    rows = pl.ds(row + tile * plan.blocks.rows_per_tile, plan.blocks.rows_per_tile)
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
        own_column = column + warpgroup * KEYS_PER_WARPGROUP

        def sums(dk_ref, dv_ref):
            @pl.loop(0, group)
            def head(g):
                def step(tile, is_masked):
                    number = g * tiles_per_head + tile - start
                    dq = _dq_tile(dq_ref, key_tile, batch, tile, kv_head * group + g, warpgroup, plan)
                    row = tile * plan.blocks.rows_per_tile
                    visible = partial(_visible, mask, row, own_column, plan) if is_masked else None
                    _step(number, dq, dk_ref, dv_ref, scratch, warpgroup, visible, plan)

                pl.loop(start, full_start)(partial(step, is_masked=True))
                pl.loop(full_start, plan.num_query_tiles)(partial(step, is_masked=False))

            return dk_ref[...], dv_ref[...]

        dk, dv = pl.run_scoped(sums, *[plgpu.ACC((KEYS_PER_WARPGROUP, plan.H), jnp.float32)] * 2)
        for gradient, ref in ((dk * plan.scale, dk_ref), (dv, dv_ref)):
            for half in range(2):
                columns = slice(half * plan.H // 2, (half + 1) * plan.H // 2)
                at = (batch, pl.ds(own_column, KEYS_PER_WARPGROUP), kv_head, columns)
                _store(gradient[:, columns], scratch.staging.at[warpgroup, pl.ds(0, KEYS_PER_WARPGROUP)], ref.at[at])
        plgpu.wait_smem_to_gmem(0)


def _step(number, dq_at, dk_ref, dv_ref, scratch: Scratch, warpgroup, visible, plan: Plan) -> None:
    """One query tile against this warpgroup's keys: added to the sums dk and dv, and its dq to dq_at."""
    shape = (KEYS_PER_WARPGROUP, plan.blocks.rows_per_tile)
    own_keys = pl.ds(warpgroup * KEYS_PER_WARPGROUP, KEYS_PER_WARPGROUP)
    own_columns = pl.ds(warpgroup * (plan.H // 2), plan.H // 2)
    slot, buffer = lax.rem(number, plan.blocks.num_stages), lax.rem(number, 2)
    q, dout, stats = scratch.q.at[slot], scratch.dout.at[slot], scratch.stats.at[slot]
    dscores_tile = scratch.dscores.at[buffer]
    plgpu.barrier_wait(scratch.full.at[slot])
    across = lambda row: lax.broadcast_in_dim(plgpu.load(row, layout=plgpu.Layout.WGMMA.reduce(0)), shape, [1])

    def scores(scores_ref, dweights_ref):
        plgpu.wgmma(scores_ref, scratch.k.at[own_keys], q.transpose((1, 0)))
        plgpu.wgmma(dweights_ref, scratch.v.at[own_keys], dout.transpose((1, 0)))
        lse = across(stats.at[0])
        # wait_n=1: the exponentials run while dP' is made, and dS' while P' dO is.
        weights = jnp.exp2(plgpu.wgmma_accumulator_load(scores_ref, wait_n=1) * (plan.scale * LOG2_E) - lse)
        if visible is not None:
            weights = jnp.where(visible(), weights, 0.0)
        _wgmma(dv_ref, weights.astype(plan.dtype), dout, scratch.left and scratch.left.at[own_keys])
        return weights * (plgpu.wgmma_accumulator_load(dweights_ref, wait_n=1) - across(stats.at[1]))

    dscores = pl.run_scoped(scores, *[plgpu.ACC(shape, jnp.float32)] * 2).astype(plan.dtype)
    # Two buffers, so that one barrier is enough: who writes this one again has passed the barrier of the next tile,
    # which the other warpgroup only reaches when it has read this one.
    dscores_tile.at[own_keys][...] = dscores
    plgpu.commit_smem()
    plgpu.barrier_arrive(scratch.dscores_full)
    plgpu.barrier_wait(scratch.dscores_full)

    def dq(dq_acc):
        plgpu.wgmma(dq_acc, dscores_tile.transpose((1, 0)), scratch.k.at[:, own_columns])
        _wgmma(dk_ref, dscores, q, scratch.left and dscores_tile.at[own_keys])
        # wait_n=1: dq is on its way to memory while dS' Q is made.
        return plgpu.wgmma_accumulator_load(dq_acc, wait_n=1)

    dq = pl.run_scoped(dq, plgpu.ACC((plan.blocks.rows_per_tile, plan.H // 2), jnp.float32))
    _store(dq * plan.scale, scratch.staging.at[warpgroup], dq_at, None if plan.is_interpreted else "add")
    plgpu.wgmma_wait(0)
    plgpu.barrier_arrive(scratch.empty.at[slot])


def _query_tiles(mask: Mask, column: Scalar, plan: Plan) -> tuple[Scalar, Scalar]:
    """(first query tile that sees a key of the tile at `column`, first one whose every row sees all of its keys)."""
    size = plan.blocks.rows_per_tile
    first_row, _ = mask.query_range(column, plan.T)
    first_full_row, _ = mask.query_range(column + KEYS_PER_TILE - 1, plan.T)
    start = jnp.where(first_row < plan.T, lax.div(first_row, jnp.int32(size)), plan.num_query_tiles)
    return start, jnp.maximum(start, lax.div(first_full_row + (size - 1), jnp.int32(size)))


def _visible(mask: Mask, row: Scalar, column: Scalar, plan: Plan) -> Array:
    """Mask.visible of a tile, transposed, with one comparison of registers for each condition."""
    shape = (KEYS_PER_WARPGROUP, plan.blocks.rows_per_tile)
    iota = lambda axis: plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)
    k_position = mask.k_start + column
    seen = iota(0) < mask.k_stop - k_position
    if mask.is_causal:
        seen &= iota(0) - iota(1) <= mask.q_start + row - k_position
    return seen


def _dq_tile(dq_ref, key_tile, batch, tile, q_head, warpgroup, plan: Plan):
    """This warpgroup's half of the columns of a tile of dq."""
    rows = pl.ds(tile * plan.blocks.rows_per_tile, plan.blocks.rows_per_tile)
    columns = pl.ds(warpgroup * (plan.H // 2), plan.H // 2)
    tiles = dq_ref.at[key_tile] if plan.is_interpreted else dq_ref
    return tiles.at[batch, rows, q_head, columns]


def _choose(is_peer, own, peer, box: Box, use: Callable[[tuple, Scalar, Scalar], None]) -> None:
    """use(refs, first row, first head) with the refs that hold the operand at run time."""
    if peer is None:
        use(own, box.row, box.head)
        return
    pl.when(is_peer == 1)(lambda: use(peer, 0, 0))
    pl.when(is_peer == 0)(lambda: use(own, box.row, box.head))


def _store(values, staging, target, reduction: str | None = None) -> None:
    """Registers to memory through shared memory; rows behind the end of the target are dropped by the copy engine."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    staging[...] = values
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(staging, target, reduction_op=reduction)


def _tile(shape: tuple[int, ...], dtype: jnp.dtype, swizzle: int):
    """Shared memory in the layout of the matrix units: tiles of 8 rows of `swizzle` bytes."""
    tiling = plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))


def _wgmma(acc, left: Array, right, spare) -> None:
    """acc += left @ right with the left side in registers, in the interpreter in shared memory: `spare`."""
    if spare is None:
        plgpu.wgmma(acc, left, right)
    else:
        spare[...] = left
        plgpu.wgmma(acc, spare, right)
