"""dq of block attention on Hopper, without additions in memory, so that every bit repeats: Pallas Mosaic GPU.

A thread block takes one head and a tile of queries, 64 rows for each compute warpgroup, and walks over the keys as the
forward does, with which it shares all but the arithmetic:

    S = Q K',  dP = dO V',  P = exp(scale S - lse),  dS = P (dP - delta),  dQ += dS K        (' is a transpose)

Source: FlashAttention-2, arXiv 2307.08691, algorithm 2.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import block_sizes, hopper_rows
from pallas_kernels.block import Operand
from pallas_kernels.block_sizes import ForwardBlocks
from pallas_kernels.hopper_rows import LOG2_E, ROWS, Layout, Task, across_columns
from pallas_kernels.masks import Mask


def query_gradient(
    queries: Operand,
    keys: Operand,
    mask: Mask,
    scale: float,
    softcap: float | None,
    *,
    blocks: ForwardBlocks | None = None,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """dq / scale, float32; the rows and columns that padding added are still there. See BlockAttention.backward."""
    lse, delta = queries._replace(own=queries.own[2:], peer=queries.peer and queries.peer[2:]).read()
    rows = queries._replace(own=queries.own[:2], peer=queries.peer and queries.peer[:2])
    gpu = plgpu.InterpretGPUParams(detect_races=True) if interpret else None
    layout, rows, keys, calls = hopper_rows.prepare("dq", rows, keys, mask, scale, softcap, jnp.float32, blocks, gpu)
    # lse = inf where a row sees nothing, and behind the end: its weights are exp2(-inf) = 0 whatever lies there.
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2_E)
    padding = ((0, 0), (0, layout.num_row_tiles * layout.rows - lse.shape[1]), (0, 0))
    stats = jnp.stack([jnp.pad(lse, padding, constant_values=jnp.inf), jnp.pad(delta, padding)], axis=2)
    scratch = hopper_rows.make_scratch(layout, queries.own[0].dtype, num_q_arrivals=4)
    scratch["dout_smem"] = scratch["q_smem"]
    scratch["stats_smem"] = plgpu.SMEM((layout.blocks.warpgroups, 2, ROWS), jnp.float32)
    if not interpret:
        block_sizes.check_shared_memory(scratch, layout.blocks)
    run = plgpu.kernel(
        partial(_kernel, layout),
        out_type=jax.ShapeDtypeStruct((layout.B, layout.T, layout.N, layout.H), jnp.float32),
        scratch_types=scratch,
        grid=(layout.B * layout.N * layout.num_row_tiles,),
        grid_names=("block",),
        num_threads=layout.blocks.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="hopper_dq",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=gpu,
    )
    arrays = (*rows.own, *(rows.peer or ()), *keys.own, *(keys.peer or ()))
    return sum(run(stats.transpose(0, 3, 2, 1), *numbers, *arrays) for numbers in calls)


def _kernel(layout: Layout, stats_ref: Any, *refs: Any, **scratch: Any) -> None:
    """One thread block."""
    blocks, dq_ref = layout.blocks, refs[-1]
    task = Task.read(layout, *refs[:-1])
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == blocks.warpgroups)
    def _() -> None:
        plgpu.set_max_registers(blocks.copy_registers, action="decrease")
        for i in range(blocks.warpgroups):
            for number in range(2):
                row = pl.ds(task.tile * layout.rows + i * ROWS, ROWS)
                stats = stats_ref.at[task.batch, task.head, number, row]
                plgpu.copy_gmem_to_smem(stats, scratch["stats_smem"].at[i, number], scratch["q_full"].at[i])
        hopper_rows.copy_tiles(layout, task, **scratch)

    @pl.when(warpgroup < blocks.warpgroups)
    def _() -> None:
        plgpu.set_max_registers(blocks.compute_registers, action="increase")
        compute = partial(_compute, layout, task, warpgroup, **scratch)
        dq = pl.run_scoped(compute, plgpu.ACC((ROWS, layout.H), jnp.float32))
        first = pl.ds(task.tile * layout.rows + warpgroup * ROWS, ROWS)
        hopper_rows.store_rows(dq, scratch["out_smem"].at[warpgroup], dq_ref.at[task.batch, first, task.head])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _compute(
    layout: Layout, task: Task, warpgroup: Int[Array, ""], dq_ref: Any,
    *, q_smem: Any, dout_smem: Any, k_smem: Any, v_smem: Any, stats_smem: Any, q_full: Any,
    k_full: Any, v_full: Any, k_empty: Any, v_empty: Any,
    q_ids_smem: Any = None, k_ids_smem: Any = None, left_smem: Any = None, **_: Any,
) -> Float[Array, "rows H"]:  # fmt: skip
    """dq / scale of a compute warpgroup's rows."""
    blocks, tiles, shape = layout.blocks, task.tiles, (ROWS, layout.blocks.keys)
    factor = (layout.softcap or layout.scale) * LOG2_E
    q_ids = q_ids_smem.at[warpgroup] if layout.has_segments else None

    def step(i: Int[Array, ""], _: None, is_masked: bool) -> None:
        slot = lax.rem(i, blocks.stages)
        k_tile, v_tile = k_smem.at[slot], v_smem.at[slot]
        # + 0, which the compiler cannot know: as in hopper_keys, addresses should not be computed before the loop.
        q_tile, dout_tile = (x.at[warpgroup + lax.shift_right_logical(i, jnp.int32(30))] for x in (q_smem, dout_smem))
        plgpu.barrier_wait(k_full.at[slot])
        plgpu.barrier_wait(v_full.at[slot])

        def gradient(scores_ref: Any, dweights_ref: Any) -> Array:
            plgpu.wgmma(scores_ref, q_tile, k_tile.transpose((1, 0)))
            plgpu.wgmma(dweights_ref, dout_tile, v_tile.transpose((1, 0)))
            scores = plgpu.wgmma_accumulator_load(scores_ref, wait_n=1)
            if layout.softcap is not None:
                scores = hopper_rows.tanh(scores * (layout.scale / layout.softcap))
            weights = jnp.exp2(scores * factor - across_columns(lse, shape))
            if is_masked:
                seen = hopper_rows.visible_keys(layout, task, warpgroup, q_ids, k_ids_smem, i, slot)
                weights = jnp.where(seen, weights, 0.0)
            dweights = plgpu.wgmma_accumulator_load(dweights_ref, wait_n=0)
            dscores = weights * (dweights - across_columns(delta, shape))
            return dscores if layout.softcap is None else dscores * (1 - scores * scores)

        dscores = pl.run_scoped(gradient, *[plgpu.ACC(shape, jnp.float32)] * 2).astype(q_smem.dtype)
        plgpu.barrier_arrive(v_empty.at[slot])
        if layout.is_interpreted:
            left_smem.at[warpgroup][...] = dscores
            plgpu.commit_smem()
        plgpu.wgmma(dq_ref, left_smem.at[warpgroup] if layout.is_interpreted else dscores, k_tile)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(k_empty.at[slot])

    plgpu.barrier_wait(q_full.at[warpgroup])
    lse, delta = (plgpu.load(stats_smem.at[warpgroup, i], layout=plgpu.Layout.WGMMA.reduce(1)) for i in range(2))
    lax.fori_loop(0, tiles.first_full, partial(step, is_masked=True), None)
    lax.fori_loop(tiles.first_full, tiles.stop_full, partial(step, is_masked=False), None)
    if layout.window is not None or layout.has_segments:
        lax.fori_loop(tiles.stop_full, tiles.num_tiles, partial(step, is_masked=True), None)
    return dq_ref[...]
