"""Forward of block attention on Hopper (sm90): softmax(scale * q k^T) v and its log-sum-exp, in Pallas Mosaic GPU.

A thread block takes one head and a tile of queries, 64 rows for each compute warpgroup; one more warpgroup only starts
copies. Tensor cores and exponential units are busy together: a warpgroup starts q k^T of one tile and p v of the tile
before, and exponentiates the first while the second runs. Warpgroups interleave by themselves: a ring of barriers by
which they took turns at the tensor cores made the kernel much slower.

Source: FlashAttention-3, arXiv 2407.08608, sections 3.1 and 3.2.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.block import Operand, Partial, vary_like
from pallas_kernels.masks import Mask

COPY_ROWS = 8  # height of the tiles in which the copy engine reads and writes
ROWS = 64  # of one wgmma instruction, which one warpgroup issues
CHUNK = 64  # columns of `out` that are staged in shared memory at a time
LOG2_E = math.log2(math.e)
# K and V of the heads that run together should stay in the L2 cache, 50 MB and more, less what q and out take.
L2_BYTES = 32 << 20


@dataclass(frozen=True)
class Tiles:
    """How a thread block is laid out.

    warpgroups: those that compute, 64 query rows each. keys: of a tile. stages: tiles of K and of V in shared memory.
    compute_registers, copy_registers: a thread's; 64K a thread block, in multiples of 8.
    """

    warpgroups: int = 2
    keys: int = 128
    stages: int = 2
    compute_registers: int = 240
    copy_registers: int = 24


# By head dim: about the sizes of FlashAttention-3, with keys in multiples of a 128-byte swizzle.
TILES = {
    64: Tiles(warpgroups=3, compute_registers=160, copy_registers=32),
    128: Tiles(),
    192: Tiles(keys=64),
    256: Tiles(keys=64),
}


@dataclass(frozen=True)
class Layout:
    """What is static about a call: sizes, boxes, tiles, and in which order the thread blocks run.

    section: heads whose tiles run together. has_peer: whether queries, and keys, may come from a peer.
    """

    B: int
    T: int
    N: int
    S: int
    K: int
    H: int
    starts: tuple[tuple[int, int], tuple[int, int]]  # (row, head) in own queries, and in own keys
    has_peer: tuple[bool, bool]
    is_causal: bool
    scale: float
    tiles: Tiles
    is_interpreted: bool

    @property
    def rows(self) -> int:
        return self.tiles.warpgroups * ROWS

    @property
    def num_row_tiles(self) -> int:
        return pl.cdiv(self.T, self.rows)

    @property
    def section(self) -> int:
        """The most heads that divide all heads and of which K and V fit in the L2 cache; at least one group."""
        G, heads = self.N // self.K, self.B * self.N
        fits = max(1, L2_BYTES // (4 * self.S * self.H)) * G
        return max(d for d in range(1, heads + 1) if heads % d == 0 and d <= fits)

    def place(self, block: Int[Array, ""]) -> tuple[Int[Array, ""], Int[Array, ""], Int[Array, ""]]:
        """(batch, head, first row) of a thread block; in a section, the rows that see most keys come first."""
        section, rest = _divmod(block, self.section * self.num_row_tiles)
        tile, head = _divmod(rest, self.section)
        batch, head = _divmod(section * self.section + head, self.N)
        if self.is_causal:
            tile = self.num_row_tiles - 1 - tile
        return batch, head, tile * self.rows


def forward(
    queries: Operand, keys: Operand, mask: Mask, scale: float, tiles: Tiles | None = None, interpret: Any = None
) -> Partial:
    """(out, lse) of one query chunk against one key/value chunk; see BlockAttention.

    interpret: a plgpu.InterpretGPUParams runs the kernel on the CPU.

    Raises:
        ValueError: a dtype, head dim, head count or scale that the kernel does not take.
    """
    q, (k, _) = queries.own[0], keys.own
    H = q.shape[-1]
    N, K = queries.box.num_heads, keys.box.num_heads
    if q.dtype not in (jnp.bfloat16, jnp.float16) or k.dtype != q.dtype:
        raise ValueError(f"dtypes of q {q.dtype} and k {k.dtype}: must be both bfloat16 or both float16")
    if H not in TILES:
        raise ValueError(f"head dim {H}: must be one of {sorted(TILES)}")
    if N % K:
        raise ValueError(f"{N} query heads: must be a multiple of the {K} key/value heads")
    if scale <= 0:
        raise ValueError(f"scale={scale}: must be positive, the running maximum is taken before scaling")
    num_rows, num_keys = queries.box.num_rows, keys.box.num_rows
    queries, keys = queries.aligned(COPY_ROWS), keys.aligned(COPY_ROWS)
    layout = Layout(
        q.shape[0], queries.box.num_rows, N, num_keys, K, H,
        starts=((queries.box.row, queries.box.head), (keys.box.row, keys.box.head)),
        has_peer=(queries.peer is not None, keys.peer is not None),
        is_causal=mask.is_causal, scale=scale, tiles=tiles or TILES[H], is_interpreted=interpret is not None,
    )  # fmt: skip
    scalars = (mask.q_start, mask.k_start, mask.k_stop, queries.is_peer, keys.is_peer)
    scalars = jnp.stack([jnp.asarray(x).astype(jnp.int32) for x in scalars])
    out, lse = plgpu.kernel(
        partial(_kernel, layout),
        out_type=(
            jax.ShapeDtypeStruct((layout.B, layout.T, N, H), jnp.float32),
            # Whole tiles: the copy of a one-dimensional piece is not clipped at the end of its row.
            jax.ShapeDtypeStruct((layout.B, N, layout.num_row_tiles * layout.rows), jnp.float32),
        ),
        scratch_types=_scratch(layout, q.dtype),
        grid=(layout.B * N * layout.num_row_tiles,),
        grid_names=("block",),
        num_threads=layout.tiles.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="hopper_forward",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )(scalars, *queries.own, *(queries.peer or ()), *keys.own, *(keys.peer or ()))
    return vary_like(out[:, :num_rows], q), vary_like(lse[:, :, :num_rows].transpose(0, 2, 1), q)


def _scratch(layout: Layout, dtype: jnp.dtype) -> dict[str, Any]:
    """Shared memory and barriers of a thread block."""
    tiles, H = layout.tiles, layout.H
    rows16 = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # what wgmma reads: 128 bytes a row
    rows32 = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))
    kv = plgpu.SMEM((tiles.stages, tiles.keys, H), dtype, transforms=rows16)
    scratch = {
        "q_smem": plgpu.SMEM((tiles.warpgroups, ROWS, H), dtype, transforms=rows16),
        "k_smem": kv,
        "v_smem": kv,
        "out_smem": plgpu.SMEM((tiles.warpgroups, ROWS, CHUNK), jnp.float32, transforms=rows32),
        "lse_smem": plgpu.SMEM((tiles.warpgroups, ROWS), jnp.float32),
        "q_full": plgpu.Barrier(num_barriers=tiles.warpgroups),
        "k_full": plgpu.Barrier(num_barriers=tiles.stages),
        "v_full": plgpu.Barrier(num_barriers=tiles.stages),
        "k_empty": plgpu.Barrier(num_arrivals=tiles.warpgroups, num_barriers=tiles.stages),
        "v_empty": plgpu.Barrier(num_arrivals=tiles.warpgroups, num_barriers=tiles.stages),
    }
    if layout.is_interpreted:
        scratch["p_smem"] = plgpu.SMEM((tiles.warpgroups, ROWS, tiles.keys), dtype, transforms=rows16)
    return scratch


def _kernel(layout: Layout, scalars_ref: Any, *refs: Any, **scratch: Any) -> None:
    """One thread block: it decides what it reads, then its warpgroups part."""
    tiles = layout.tiles
    operands, (out_ref, lse_ref) = refs[:-2], refs[-2:]
    num_q = 1 + layout.has_peer[0]
    q_refs = [operands[i : i + 1] for i in range(num_q)]
    kv_refs = [operands[i : i + 2] for i in range(num_q, len(operands), 2)]
    q_start, k_start, k_stop, is_q_peer, is_kv_peer = (scalars_ref[i] for i in range(5))
    mask = Mask(q_start, k_start, k_stop, layout.is_causal)
    batch, head, row = layout.place(lax.axis_index("block"))
    _, stop = mask.key_range(row, layout.rows, layout.S)
    # Where nothing is visible one tile is masked as a whole, which gives 0 and -inf without a case of its own.
    num_tiles = jnp.maximum(_divmod(stop + tiles.keys - 1, tiles.keys)[0], 1)
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == tiles.warpgroups)
    def _() -> None:
        plgpu.set_max_registers(tiles.copy_registers, action="decrease")
        q_source = _Source(q_refs, is_q_peer, layout.starts[0], batch, head)
        kv_source = _Source(kv_refs, is_kv_peer, layout.starts[1], batch, _divmod(head, layout.N // layout.K)[0])
        _copy(layout, q_source, kv_source, row, num_tiles, **scratch)

    @pl.when(warpgroup < tiles.warpgroups)
    def _() -> None:
        plgpu.set_max_registers(tiles.compute_registers, action="increase")
        acc, top, total = _compute(layout, mask, warpgroup, row, num_tiles, **scratch)
        out_smem, lse_smem = (scratch[x].at[warpgroup] for x in ("out_smem", "lse_smem"))
        first = row + warpgroup * ROWS
        lse_smem[...] = jnp.where(total > 0, (top + jnp.log2(total)) * (1 / LOG2_E), -jnp.inf)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(lse_smem, lse_ref.at[batch, head, pl.ds(first, ROWS)])
        out = acc * _columns(1 / jnp.where(total > 0, total, 1.0), acc.shape)
        for column in range(0, layout.H, CHUNK):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            out_smem[...] = out[:, column : column + CHUNK]
            plgpu.commit_smem()
            # The copy engine drops rows past the end of `out`.
            plgpu.copy_smem_to_gmem(out_smem, out_ref.at[batch, pl.ds(first, ROWS), head, pl.ds(column, CHUNK)])
        plgpu.wait_smem_to_gmem(0)


@dataclass(frozen=True)
class _Source:
    """One head of arrays that lie here, as refs[0], or that a peer sent, as refs[1]."""

    refs: Sequence[Sequence[Any]]
    is_peer: Int[Array, ""]
    start: tuple[int, int]
    batch: Int[Array, ""]
    head: Int[Array, ""]

    def copy(self, number: int, row: Int[Array, ""], smem: Any, barrier: Any) -> None:
        """Start the copy of rows of array `number`; those past its end arrive as zeros."""

        def copy_from(ref: Any, row: Int[Array, ""], head: Int[Array, ""]) -> None:
            plgpu.copy_gmem_to_smem(ref.at[self.batch, pl.ds(row, smem.shape[0]), head], smem, barrier)

        own = lambda: copy_from(self.refs[0][number], self.start[0] + row, self.start[1] + self.head)
        if len(self.refs) == 1:
            own()
        else:  # a branch in a warpgroup that has nothing else to do
            pl.when(self.is_peer == 0)(own)
            pl.when(self.is_peer != 0)(lambda: copy_from(self.refs[1][number], row, self.head))


def _copy(
    layout: Layout, q_source: _Source, kv_source: _Source, row: Int[Array, ""], num_tiles: Int[Array, ""],
    *, q_smem: Any, k_smem: Any, v_smem: Any, q_full: Any, k_full: Any, v_full: Any, k_empty: Any, v_empty: Any,
    **_: Any,
) -> None:  # fmt: skip
    """The copy warpgroup: the queries, then K and V tile by tile from the last one, as shared memory becomes free."""
    stages = layout.tiles.stages
    for i in range(layout.tiles.warpgroups):
        q_source.copy(0, row + i * ROWS, q_smem.at[i], q_full.at[i])

    def step(i: Int[Array, ""], _: None) -> None:
        slot = lax.rem(i, stages)
        for number, smem, full, empty in ((0, k_smem, k_full, k_empty), (1, v_smem, v_full, v_empty)):

            @pl.when(i >= stages)
            def _(empty: Any = empty) -> None:
                plgpu.barrier_wait(empty.at[slot])

            @pl.when(i < num_tiles)
            def _(number: int = number, smem: Any = smem, full: Any = full) -> None:
                first = (num_tiles - 1 - i) * layout.tiles.keys
                kv_source.copy(number, first, smem.at[slot], full.at[slot])

    # The last rounds only wait: no barrier is left with a phase that nobody saw.
    lax.fori_loop(0, num_tiles + stages, step, None)


def _compute(
    layout: Layout, mask: Mask, warpgroup: Int[Array, ""], row: Int[Array, ""], num_tiles: Int[Array, ""],
    *, q_smem: Any, k_smem: Any, v_smem: Any, q_full: Any, k_full: Any, v_full: Any, k_empty: Any, v_empty: Any,
    p_smem: Any = None, **_: Any,
) -> tuple[Float[Array, "rows H"], Float[Array, " rows"], Float[Array, " rows"]]:  # fmt: skip
    """(acc, top, total) of a compute warpgroup's rows: sum of p v, maximum of the scores in units of log 2, sum of p.

    Tiles go from the last to the first, so that those which need a mask come first and the loop ends without any.
    """
    tiles = layout.tiles
    shape = (ROWS, tiles.keys)
    factor = layout.scale * LOG2_E  # exp(scale * s) = exp2(factor * s)
    q_tile = q_smem.at[warpgroup]
    p_smem = None if p_smem is None else p_smem.at[warpgroup]
    rows = row + warpgroup * ROWS + plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
    _, limit = mask.key_range(rows, 1, layout.S)
    # Every row of the thread block sees all keys of these tiles, so the warpgroups stay in step.
    num_full = _divmod(mask.key_range(row, 1, layout.S)[1], tiles.keys)[0]

    def softmax(scores: Array, i: Int[Array, ""], top: Array, total: Array, is_masked: bool) -> tuple[Array, ...]:
        """(top, total, p, decay) after another tile of scores."""
        if is_masked:
            columns = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
            scores = jnp.where((num_tiles - 1 - i) * tiles.keys + columns < limit, scores, -jnp.inf)
        new_top = jnp.maximum(top, scores.max(axis=1) * factor)
        shift = new_top
        if is_masked:  # a row that has seen nothing yet: avoids inf - inf
            shift = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        p = jnp.exp2(scores * factor - _columns(shift, shape))
        decay = jnp.exp2(top - shift)
        return new_top, total * decay + p.sum(axis=1), p.astype(q_smem.dtype), decay

    def first_tile(scores_ref: Any) -> Array:
        plgpu.wgmma(scores_ref, q_tile, k_smem.at[0].transpose((1, 0)))
        return scores_ref[...]

    def next_tile(i: Int[Array, ""], state: tuple[Array, ...], is_masked: bool) -> tuple[Array, ...]:
        acc, top, total, p = state
        slot, slot_before = lax.rem(i, tiles.stages), lax.rem(i - 1, tiles.stages)

        def products(acc_ref: Any, p: Any, scores_ref: Any) -> tuple[Array, ...]:
            plgpu.barrier_wait(v_full.at[slot_before])
            plgpu.barrier_wait(k_full.at[slot])
            plgpu.wgmma(scores_ref, q_tile, k_smem.at[slot].transpose((1, 0)))
            plgpu.wgmma(acc_ref, p, v_smem.at[slot_before])
            scores = plgpu.wgmma_accumulator_load(scores_ref, wait_n=1)
            plgpu.barrier_arrive(k_empty.at[slot])
            result = softmax(scores, i, top, total, is_masked)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(v_empty.at[slot_before])
            return result

        scoped = lambda acc_ref, p: pl.run_scoped(partial(products, acc_ref, p), plgpu.ACC(shape, jnp.float32))
        acc, (top, total, p, decay) = _accumulate(scoped, acc, p, p_smem, (top, total, p, top))
        return acc * _columns(decay, acc.shape), top, total, p

    def last_product(acc_ref: Any, p: Any) -> tuple[()]:
        plgpu.wgmma(acc_ref, p, v_smem.at[slot])
        return ()

    plgpu.barrier_wait(q_full.at[warpgroup])
    plgpu.barrier_wait(k_full.at[0])
    scores = pl.run_scoped(first_tile, plgpu.ACC(shape, jnp.float32))
    plgpu.barrier_arrive(k_empty.at[0])
    start = jnp.full((ROWS,), -jnp.inf, jnp.float32), jnp.zeros((ROWS,), jnp.float32)
    top, total, p, _ = softmax(scores, jnp.int32(0), *start, is_masked=True)
    state = (jnp.zeros((ROWS, layout.H), jnp.float32), top, total, p)
    first_full = jnp.maximum(num_tiles - num_full, 1)
    state = lax.fori_loop(1, first_full, partial(next_tile, is_masked=True), state)
    acc, top, total, p = lax.fori_loop(first_full, num_tiles, partial(next_tile, is_masked=False), state)
    slot = lax.rem(num_tiles - 1, tiles.stages)
    plgpu.barrier_wait(v_full.at[slot])
    acc, _ = _accumulate(last_product, acc, p, p_smem, ())
    plgpu.barrier_arrive(v_empty.at[slot])
    return acc, top, total


def _accumulate(
    body: Callable[[Any, Any], tuple[Array, ...]], acc: Array, p: Array, p_smem: Any, like: tuple[Array, ...]
) -> tuple[Array, tuple[Array, ...]]:
    """(acc plus what `body(accumulator, p)` adds to its accumulator, what body returns, of the shapes of `like`).

    The one place that knows of interpretation, which has p_smem: wgmma then reads p there, and accumulators start at 0.
    """
    if p_smem is not None:
        p_smem[...] = p
        plgpu.commit_smem()

        def scoped(acc_ref: Any) -> tuple[Array, tuple[Array, ...]]:
            result = body(acc_ref, p_smem)
            return acc + acc_ref[...], result

        return pl.run_scoped(scoped, plgpu.ACC(acc.shape, jnp.float32))

    def stateful(refs: tuple[Any, ...]) -> None:
        acc_ref, *result_refs = refs
        for ref, value in zip(result_refs, body(acc_ref, p), strict=True):
            ref[...] = value

    acc, *results = pl.run_state(stateful)((plgpu.ACC.init(acc), *like))
    return acc, tuple(results)


def _columns(x: Float[Array, " rows"], shape: tuple[int, int]) -> Float[Array, "rows columns"]:
    return lax.broadcast_in_dim(x, shape, (0,))


def _divmod(x: Int[Array, ""], divisor: int) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """Quotient and remainder of a number that is not negative: without the sign's case, which jnp's division has."""
    return lax.div(x, jnp.int32(divisor)), lax.rem(x, jnp.int32(divisor))
