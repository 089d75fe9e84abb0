"""Backward of block attention for Hopper (sm90): one pass over the scores, five matmuls, in Pallas Mosaic GPU.

One CTA owns a tile of keys of one key/value head and walks over the query tiles that see it, for every query head of
the group, or of a part of it where there would be few CTAs: dk and dv stay in registers until the end, each dq tile is
added to memory by the copy engine. Two warpgroups compute, each for half of the keys (or, at large head dims, of the
columns); a third one fetches.

    S' = K Q',  dP' = V dO',  P' = exp(scale S' - lse),  dS' = P' (dP' - delta)        (' is a transpose)
    dV += P' dO,  dK += scale dS' Q,  dQ += scale dS K

Source: FlashAttention-2 and -3, arXiv 2307.08691 (algorithm 2) and 2407.08608; the order of the loops is theirs.
"""

import math
from collections.abc import Callable
from functools import partial

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
from pallas_kernels.hopper_keys import COMPUTE_WARPGROUPS, KEYS_PER_WARPGROUP, MEMBER, Plan, Worker
from pallas_kernels.hopper_rows import COPY_ROWS, LOG2_E, divide, store_rows
from pallas_kernels.masks import Mask, Scalar

DTYPES = (jnp.bfloat16, jnp.float16)


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
    num_rows, num_keys = plan.blocks.rows, plan.keys_per_tile * plan.blocks.cluster
    table = mask.query_tiles(queries.box.num_rows, num_rows, keys.box.num_rows, num_keys)
    q_ids, *k_ids = mask.tile_segments(num_rows, num_keys) if plan.has_segments else (None,)
    k_ids = [ids.reshape(plan.B, plan.num_key_tiles, plan.keys_per_tile) for ids in k_ids]
    stats = _stats(queries._replace(own=queries.own[2:], peer=queries.peer and queries.peer[2:]), q_ids, plan)
    operands = (rows.own, rows.peer or (), columns.own, columns.peer or ())
    # The interpreter cannot add in memory: there every key tile gets a dq of its own.
    dq_shape = (plan.num_key_tiles,) * interpret + (plan.B, plan.T, plan.N, H)
    # Tied to an operand, lse, or XLA makes the zeros of all blocks of a program at its start, and keeps them.
    zero, _ = lax.optimization_barrier((jnp.float32(0), queries.own[2]))
    dq_refs = [jax.new_ref(jnp.full(dq_shape, zero))] if plan.has_dq else []
    is_short = plan.blocks.splits_keys and plan.parts == 1 and jnp.dtype(dtype) == q.dtype
    gradient = jax.ShapeDtypeStruct((plan.B, plan.S, plan.num_owners, H), dtype if is_short else jnp.float32)
    dk, dv = plgpu.kernel(
        partial(_kernel, plan=plan),
        out_type=(gradient, gradient),
        scratch_types=(scratch,),
        grid=(plan.B * plan.num_owners * plan.num_key_tiles // plan.blocks.cluster,),
        grid_names=("cluster",),
        cluster=(plan.blocks.cluster,),
        cluster_names=(MEMBER,),
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
    if plan.parts > 1:
        dk, dv = (x.reshape(plan.B, plan.S, plan.K, plan.parts, H).sum(axis=3) for x in (dk, dv))
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
    size = plan.blocks.rows
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
    batch, owner, keys = plan.place(lax.axis_index("cluster"))
    key_tile = keys * plan.blocks.cluster + lax.axis_index(MEMBER)
    warpgroup = lax.axis_index("warpgroup")
    column, num_rows = key_tile * plan.keys_per_tile, plan.blocks.rows
    mask = Mask(scalars_ref[0], scalars_ref[1], scalars_ref[2], plan.is_causal, plan.window)
    # + 0: inside shard_map what is read is typed as varying over the mesh, what is computed here is not, and a loop
    # must count in one type.
    tiles = [table_ref[batch if plan.has_segments else 0, keys, i] + 0 for i in range(4)]
    start, full_start, full_stop, stop = tiles
    tiles_per_head = stop - start
    group = plan.N // plan.num_owners
    num_tiles = group * tiles_per_head

    @pl.when(warpgroup == COMPUTE_WARPGROUPS)
    def copy():
        plgpu.set_max_registers(plan.blocks.copy_registers, action="decrease")

        def copy_keys(refs, row, head):
            at = (batch, pl.ds(row + column, plan.keys_per_tile), head + divide(owner, plan.parts)[0])
            plgpu.copy_gmem_to_smem(refs[0].at[at], scratch.k, scratch.keys_full)
            plgpu.copy_gmem_to_smem(refs[1].at[at], scratch.v, scratch.keys_full)

        _choose(scalars_ref[4], own_keys, peer_keys, plan.k_box, copy_keys)
        if plan.has_segments:
            plgpu.copy_gmem_to_smem(k_ids_ref.at[batch, key_tile], scratch.k_ids, scratch.keys_full)

        def refill(number, arrays, full, empty, free):
            """Tile `number` of these arrays of the queries: 0 is q, with which its stats come, 1 is dout."""
            tiles = scratch.q, scratch.dout
            stages = tiles[arrays[0]].shape[0]
            slot = lax.rem(number, stages)

            # Also after the last copy, so that every arrival on a barrier has been seen when it goes away.
            @pl.when((number >= stages) & (number < num_tiles + stages))
            def wait():
                plgpu.barrier_wait(empty.at[slot])
                # A copy goes to all CTAs of the cluster: there has to be room in each.
                plgpu.barrier_arrive(free.at[slot])
                plgpu.barrier_wait(free.at[slot])

            @pl.when(number < num_tiles)
            def issue():
                tile = start + lax.rem(number, tiles_per_head)
                q_head = owner * group + lax.div(number, tiles_per_head)

                def copy_rows(refs, row, head):
                    for i in arrays:
                        source = refs[i].at[batch, pl.ds(row + tile * num_rows, num_rows), head + q_head]
                        plgpu.copy_gmem_to_smem(source, tiles[i].at[slot], full.at[slot], collective_axes=MEMBER)

                _choose(scalars_ref[3], own_queries, peer_queries, plan.q_box, copy_rows)
                if 0 in arrays:
                    stats = stats_ref.at[batch, q_head, tile]
                    plgpu.copy_gmem_to_smem(stats, scratch.stats.at[slot], full.at[slot])

        @pl.loop(0, num_tiles + max(plan.blocks.stages, plan.blocks.dout_stages))
        def copy_tile(number):
            refill(number, (0, 1) if plan.is_paired else (0,), scratch.q_full, scratch.q_empty, scratch.q_free)
            if not plan.is_paired:
                refill(number, (1,), scratch.dout_full, scratch.dout_empty, scratch.dout_free)

    @pl.when(warpgroup < COMPUTE_WARPGROUPS)
    def compute():
        plgpu.set_max_registers(plan.blocks.compute_registers, action="increase")
        plgpu.barrier_wait(scratch.keys_full)
        first_key = warpgroup * KEYS_PER_WARPGROUP if plan.blocks.splits_keys else 0
        own_columns = pl.ds(0 if plan.blocks.splits_keys else warpgroup * plan.columns, plan.columns)

        def sums(dk_ref, dv_ref):
            worker = Worker(plan, scratch, warpgroup, first_key, own_columns, dk_ref, dv_ref)

            def head(g, number):
                def step(tile, number, is_masked):  # number: a count; what follows from the table lay in each thread
                    dq = _dq_tile(dq_ref, key_tile, batch, tile, owner * group + g, warpgroup, plan)
                    place = (mask, tile * num_rows, column + first_key) if is_masked else None
                    worker.step(number, place, dq)
                    return number + 1

                number = lax.fori_loop(start, full_start, partial(step, is_masked=True), number)
                number = lax.fori_loop(full_start, full_stop, partial(step, is_masked=False), number)
                if plan.window is not None or plan.has_segments:  # queries after those that see a key may not see it
                    number = lax.fori_loop(full_stop, stop, partial(step, is_masked=True), number)
                return number

            lax.fori_loop(0, group, head, jnp.int32(0))
            return dk_ref[...], dv_ref[...]

        dk, dv = pl.run_scoped(sums, *[plgpu.ACC((KEYS_PER_WARPGROUP, plan.columns), jnp.float32)] * 2)
        staging = scratch.staging.at[warpgroup]
        if dk_ref.dtype == plan.dtype:  # there is room where V was, which no other warpgroup reads
            staging = scratch.v.at[pl.ds(first_key, KEYS_PER_WARPGROUP)]
        for gradient, ref in ((dk * (plan.scale / plan.weight), dk_ref), (dv * (1 / plan.weight), dv_ref)):
            target = ref.at[batch, pl.ds(column + first_key, KEYS_PER_WARPGROUP), owner, own_columns]
            store_rows(gradient.astype(ref.dtype), staging, target)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _dq_tile(dq_ref, key_tile, batch, tile, q_head, warpgroup, plan: Plan):
    """This warpgroup's part of a tile of dq; None where another kernel makes it."""
    if dq_ref is None:
        return None
    tiles = dq_ref.at[key_tile] if plan.is_interpreted else dq_ref
    rows, columns = plan.part_of_dq(warpgroup)
    return tiles.at[batch, pl.ds(tile * plan.blocks.rows + rows.start, rows.size), q_head, columns]


def _choose(is_peer, own, peer, box: Box, use: Callable[[tuple, Scalar, Scalar], None]) -> None:
    """use(refs, first row, first head) with the refs that hold the operand at run time."""
    if peer is None:
        use(own, box.row, box.head)
        return
    pl.when(is_peer == 1)(lambda: use(peer, 0, 0))
    pl.when(is_peer == 0)(lambda: use(own, box.row, box.head))
