"""Forward of block attention on Hopper (sm90): softmax(scale * q k^T) v and its log-sum-exp, in Pallas Mosaic GPU.

A thread block takes one head and a tile of queries, 64 rows for each compute warpgroup; one more warpgroup only starts
copies. Tensor cores and exponential units are busy together: a warpgroup starts q k^T of one tile and p v of the tile
before, and exponentiates the first while the second runs. Warpgroups interleave by themselves: barriers by which they
take turns at the tensor cores were not faster.

Source: FlashAttention-3, arXiv 2407.08608, sections 3.1 and 3.2.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, scf, vector
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels import block_sizes, hopper_rows
from pallas_kernels.block import Operand, Partial, vary_like
from pallas_kernels.block_sizes import ForwardBlocks
from pallas_kernels.hopper_rows import LOG2_E, ROWS, Layout, Task, across_columns
from pallas_kernels.masks import Mask
from pallas_kernels.merge import merge

LANES = 8  # columns of the narrowest array in registers


def forward(
    queries: Operand,
    keys: Operand,
    mask: Mask,
    scale: float,
    softcap: float | None = None,
    dtype: DTypeLike = jnp.float32,
    *,
    blocks: ForwardBlocks | None = None,
    interpret: Any = None,
) -> Partial:
    """(out, lse) of one query chunk against one key/value chunk; see BlockAttention.

    interpret: a plgpu.InterpretGPUParams runs the kernel on the CPU.

    Raises:
        ValueError: a dtype, head dim, head count or scale that the kernel does not take, blocks that do not fit.
    """
    q = queries.own[0]
    num_rows, head_dim = queries.box.num_rows, q.shape[-1]
    layout, queries, keys, calls = hopper_rows.prepare(
        "forward", queries, keys, mask, scale, softcap, dtype, blocks, interpret
    )
    if len(calls) > 1:
        layout = replace(layout, dtype=jnp.dtype(jnp.float32))
    scratch = hopper_rows.make_scratch(layout, q.dtype, num_q_arrivals=1)
    scratch["lse_smem"] = plgpu.SMEM((layout.blocks.warpgroups, ROWS), jnp.float32)
    if interpret is None:
        block_sizes.check_shared_memory(scratch, layout.blocks)
    run = plgpu.kernel(
        partial(_kernel, layout),
        out_type=(
            jax.ShapeDtypeStruct((layout.B, layout.T, layout.N, layout.H), layout.dtype),
            # Whole tiles: the copy of a one-dimensional piece is not clipped at the end of its row.
            jax.ShapeDtypeStruct((layout.B, layout.N, layout.num_row_tiles * layout.rows), jnp.float32),
        ),
        scratch_types=scratch,
        grid=(layout.B * layout.N * layout.num_row_tiles,),
        grid_names=("block",),
        num_threads=layout.blocks.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="hopper_forward",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )

    def part(numbers: tuple[Array, ...]) -> Partial:
        out, lse = run(*numbers, *queries.own, *(queries.peer or ()), *keys.own, *(keys.peer or ()))
        return out[:, :num_rows, :, :head_dim], lse[:, :, :num_rows].transpose(0, 2, 1)

    out, lse = reduce(merge, map(part, calls))
    return vary_like(out.astype(dtype), q), vary_like(lse, q)


def _kernel(layout: Layout, *refs: Any, **scratch: Any) -> None:
    """One thread block: it decides what it reads, then its warpgroups part."""
    blocks, (out_ref, lse_ref) = layout.blocks, refs[-2:]
    task = Task.read(layout, *refs[:-2])
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == blocks.warpgroups)
    def _() -> None:
        plgpu.set_max_registers(blocks.copy_registers, action="decrease")
        hopper_rows.copy_tiles(layout, task, **scratch)

    @pl.when(warpgroup < blocks.warpgroups)
    def _() -> None:
        plgpu.set_max_registers(blocks.compute_registers, action="increase")
        out, lse = _compute(layout, task, warpgroup, **scratch)
        first = task.tile * layout.rows + warpgroup * ROWS
        # Where the queries were there is room for the whole tile.
        out_smem = scratch.get("out_smem", scratch["q_smem"]).at[warpgroup]
        lse_smem = scratch["lse_smem"].at[warpgroup]
        lse_smem[...] = lse
        target = out_ref.at[task.batch, pl.ds(first, ROWS), task.head]
        hopper_rows.store_rows(out.astype(layout.dtype), out_smem, target)
        plgpu.copy_smem_to_gmem(lse_smem, lse_ref.at[task.batch, task.head, pl.ds(first, ROWS)])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _compute(
    layout: Layout, task: Task, warpgroup: Int[Array, ""],
    *, q_smem: Any, k_smem: Any, v_smem: Any, q_full: Any, k_full: Any, v_full: Any, k_empty: Any, v_empty: Any,
    q_ids_smem: Any = None, k_ids_smem: Any = None, left_smem: Any = None, **_: Any,
) -> tuple[Float[Array, "rows H"], Float[Array, " rows"]]:  # fmt: skip
    """(out, lse) of a compute warpgroup's rows.

    Tiles go from the last to the first, so that under a causal mask those which need it come first. Of each row: peak
    is the maximum of the scores so far, in units of log 2; top is what weights p = exp2(scores - top) are relative to.
    """
    blocks, tiles = layout.blocks, task.tiles
    shape = (ROWS, blocks.keys)
    factor = (layout.softcap or layout.scale) * LOG2_E  # exp(x) = exp2(x * log2(e))
    q_tile = q_smem.at[warpgroup]
    left_smem = None if left_smem is None else left_smem.at[warpgroup]
    q_ids, k_ids = (q_ids_smem.at[warpgroup], k_ids_smem) if layout.has_segments else (None, None)
    visible = partial(hopper_rows.visible_keys, layout, task, warpgroup, q_ids, k_ids)

    def softmax(scores: Array, seen: Array | None, top: Array, peak: Array, total: Array) -> tuple[Array, ...]:
        """(top, peak, total, p, decay) after another tile of scores; each thread keeps a total of its own columns."""
        if layout.softcap is not None:
            scores = hopper_rows.tanh(scores * (layout.scale / layout.softcap))
        if seen is not None:
            scores = jnp.where(seen, scores, -jnp.inf)
        peak = jnp.maximum(peak, scores.max(axis=1) * factor)
        new_top = jnp.where(peak > top + blocks.slack, peak, top) if blocks.slack else peak
        p = jnp.exp2(scores * factor - across_columns(new_top, shape))
        decay = jnp.exp2(top - new_top)
        total *= across_columns(decay, total.shape)
        for column in range(0, blocks.keys, LANES):
            total += p[:, column : column + LANES]
        return new_top, peak, total, p, decay

    def first_tile(scores_ref: Any) -> Array:
        plgpu.wgmma(scores_ref, q_tile, k_smem.at[0].transpose((1, 0)))
        return scores_ref[...]

    def next_tile(i: Int[Array, ""], state: tuple[Array, ...], is_masked: bool) -> tuple[Array, ...]:
        acc, top, peak, total, p = state
        slot, slot_before = lax.rem(i, blocks.stages), lax.rem(i - 1, blocks.stages)

        def products(acc_ref: Any, p: Any, scores_ref: Any) -> tuple[Array, ...]:
            plgpu.wgmma(scores_ref, q_tile, k_smem.at[slot].transpose((1, 0)))
            plgpu.wgmma(acc_ref, p, v_smem.at[slot_before])
            scores = plgpu.wgmma_accumulator_load(scores_ref, wait_n=1)
            seen = visible(i, slot) if is_masked else None
            plgpu.barrier_arrive(k_empty.at[slot])
            *sums, new_p, decay = softmax(scores, seen, top, peak, total)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(v_empty.at[slot_before])
            # p must not be rounded before this wait: the registers of a running product may not change, and the
            # assembler would run all products one after the other.
            return *sums, lax.optimization_barrier(new_p).astype(q_smem.dtype), decay

        # Before the accumulator is there: the compiler leaves out its zeros where a product follows them at once.
        plgpu.barrier_wait(v_full.at[slot_before])
        plgpu.barrier_wait(k_full.at[slot])
        scoped = lambda acc_ref, p: pl.run_scoped(partial(products, acc_ref, p), plgpu.ACC(shape, jnp.float32))
        acc, (*sums, p, decay) = _accumulate(scoped, acc, p, left_smem, (top, peak, total, p, top))
        if blocks.skips_rescaling and not layout.is_interpreted:
            return _multiply_where_needed(acc, decay), *sums, p
        return acc * across_columns(decay, acc.shape), *sums, p

    def last_product(acc_ref: Any, p: Any) -> tuple[()]:
        plgpu.wgmma(acc_ref, p, v_smem.at[slot])
        return ()

    plgpu.barrier_wait(q_full.at[warpgroup])
    plgpu.barrier_wait(k_full.at[0])
    scores = pl.run_scoped(first_tile, plgpu.ACC(shape, jnp.float32))
    seen = visible(jnp.int32(0), jnp.int32(0))
    plgpu.barrier_arrive(k_empty.at[0])
    zeros = lambda columns: plgpu.layout_cast(jnp.zeros((ROWS, columns), jnp.float32), plgpu.Layout.WGMMA)
    # The maximum of no scores is the lowest number, since -inf - -inf is none.
    lowest = jnp.full((ROWS,), jnp.finfo(jnp.float32).min, jnp.float32)
    *sums, p, _ = softmax(scores, seen, lowest, lowest, zeros(LANES))
    state = (zeros(layout.H), *sums, p.astype(q_smem.dtype))
    state = lax.fori_loop(1, tiles.first_full, partial(next_tile, is_masked=True), state)
    state = lax.fori_loop(tiles.first_full, tiles.stop_full, partial(next_tile, is_masked=False), state)
    if layout.window is not None or layout.has_segments:  # keys before those that a row sees may be hidden
        state = lax.fori_loop(tiles.stop_full, tiles.num_tiles, partial(next_tile, is_masked=True), state)
    acc, top, peak, total, p = state
    slot = lax.rem(tiles.num_tiles - 1, blocks.stages)
    plgpu.barrier_wait(v_full.at[slot])
    acc, _ = _accumulate(last_product, acc, p, left_smem, ())
    plgpu.barrier_arrive(v_empty.at[slot])
    total = total.sum(axis=1)
    lse = jnp.where(total > 0, (top + jnp.log2(total)) * (1 / LOG2_E), -jnp.inf)
    # acc has the largest weight rounded; it is 1, which is not, unless top has stayed behind peak.
    largest = jnp.exp2(peak - top)
    divisor = total + (largest.astype(q_smem.dtype).astype(jnp.float32) - largest)
    return acc * across_columns(1 / jnp.where(total > 0, divisor, 1.0), acc.shape), lse


def _multiply_where_needed(acc: Float[Array, "rows H"], factor: Float[Array, " rows"]) -> Float[Array, "rows H"]:
    """acc times a factor for each row; a warp does nothing where all factors of its rows are 1, as they mostly are.

    Pallas has branches of whole warpgroups only, which would have to wait for each other.
    """
    layout = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(
        arg_types=(layout, layout.reduce(1)),
        return_type=plgpu.ShapeDtypeStruct(acc.shape, acc.dtype, layout=layout),
    )
    def multiply(_: Any, acc: Any, factor: Any) -> Any:
        flags = [vector.extract(flag, [], [0]) for flag in (factor != 1.0).registers.flat]
        vote = "vote.sync.any.pred $0, $1, 0xffffffff;"
        is_needed = utils.inline_ptx(vote, reduce(arith.ori, flags), result_types=flags[0].type, convergent=True)
        registers = list(acc.registers.flat)
        branch = scf.IfOp(is_needed, [register.type for register in registers], has_else=True)
        with ir.InsertionPoint(branch.then_block):
            product = acc * factor.broadcast_in_dim(acc.shape, (0,), acc.layout)
            scf.YieldOp(list(product.registers.flat))
        with ir.InsertionPoint(branch.else_block):
            scf.YieldOp(registers)
        results = np.array(branch.results, dtype=object).reshape(acc.registers.shape)
        return mgpu.FragmentedArray(_registers=results, _layout=acc.layout, _is_signed=acc.is_signed)

    return multiply(acc, factor)


def _accumulate(
    body: Callable[[Any, Any], tuple[Array, ...]], acc: Array, p: Array, left_smem: Any, like: tuple[Array, ...]
) -> tuple[Array, tuple[Array, ...]]:
    """(acc plus what `body(accumulator, p)` adds to its accumulator, what body returns, of the shapes of `like`).

    The one place that knows of interpretation, which has left_smem: wgmma then reads p there, and sums start at 0.
    """
    if left_smem is not None:
        left_smem[...] = p
        plgpu.commit_smem()

        def scoped(acc_ref: Any) -> tuple[Array, tuple[Array, ...]]:
            result = body(acc_ref, left_smem)
            return acc + acc_ref[...], result

        return pl.run_scoped(scoped, plgpu.ACC(acc.shape, jnp.float32))

    def stateful(refs: tuple[Any, ...]) -> None:
        acc_ref, *result_refs = refs
        for ref, value in zip(result_refs, body(acc_ref, p), strict=True):
            ref[...] = value

    acc, *results = pl.run_state(stateful)((plgpu.ACC.init(acc), *like))
    return acc, tuple(results)
