"""What the Hopper kernels share that give a thread block a tile of rows and walk over the keys: tasks and copies.

64 rows for each warpgroup that computes; one more warpgroup starts the copies of the queries and, as shared memory
becomes free, of the tiles of keys and values.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import block_sizes, merge
from pallas_kernels.block import Operand, check_softcap
from pallas_kernels.block_sizes import ForwardBlocks
from pallas_kernels.masks import Mask

COPY_ROWS = 8  # height of the tiles in which the copy engine reads and writes
COPY_COLUMNS = 32  # float32 numbers of a row of such a tile
ROWS = 64  # of one wgmma instruction, which one warpgroup issues
LOG2_E = math.log2(math.e)
# K and V of the heads that run together should stay in the L2 cache, 50 MB and more, less what q and out take.
L2_BYTES = 32 << 20


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
    window: int | None
    has_segments: bool
    scale: float
    softcap: float | None
    dtype: jnp.dtype  # of out
    blocks: ForwardBlocks
    is_interpreted: bool

    @property
    def rows(self) -> int:
        return self.blocks.warpgroups * ROWS

    @property
    def num_row_tiles(self) -> int:
        return pl.cdiv(self.T, self.rows)

    @property
    def section(self) -> int:
        """The most heads that divide all heads and of which K and V fit in the L2 cache; at least one group."""
        G, heads = self.N // self.K, self.B * self.N
        fits = max(1, L2_BYTES // (4 * self.S * self.H)) * G
        return largest_divisor(heads, fits)

    def place(self, block: Int[Array, ""]) -> tuple[Int[Array, ""], Int[Array, ""], Int[Array, ""]]:
        """(batch, head, tile of rows) of a thread block; in a section, the rows that see most keys come first."""
        section, rest = divide(block, self.section * self.num_row_tiles)
        tile, head = divide(rest, self.section)
        batch, head = divide(section * self.section + head, self.N)
        if self.is_causal:
            tile = self.num_row_tiles - 1 - tile
        return batch, head, tile


def prepare(
    direction: str, queries: Operand, keys: Operand, mask: Mask, scale: float, softcap: float | None,
    dtype: DTypeLike, blocks: ForwardBlocks | None, interpret: Any,
) -> tuple[Layout, Operand, Operand, list[tuple[Array, ...]]]:  # fmt: skip
    """(layout, operands as the kernel takes them, for each call the arrays of numbers that Task.read reads).

    There is a call for each of `merge.parts`; their results have to be merged.
    """
    q, k = queries.own[0], keys.own[0]
    N, K = queries.box.num_heads, keys.box.num_heads
    if q.dtype not in (jnp.bfloat16, jnp.float16) or k.dtype != q.dtype:
        raise ValueError(f"dtypes of q {q.dtype} and k {k.dtype}: must be both bfloat16 or both float16")
    if N % K:
        raise ValueError(f"{N} query heads: must be a multiple of the {K} key/value heads")
    if scale <= 0:
        raise ValueError(f"scale={scale}: must be positive, the running maximum is taken before scaling")
    check_softcap(softcap)
    num_rows, num_keys = queries.box.num_rows, keys.box.num_rows
    H = block_sizes.padded_head_dim(q.shape[-1])
    kind = mask.kind
    if direction == "forward":
        kind = block_sizes.forward_kind(mask, H, q.shape[0] * N, num_rows, num_keys)
    queries, keys = queries.aligned(COPY_ROWS), keys.aligned(COPY_ROWS)
    if q.shape[-1] != H:
        queries, keys = queries.with_head_dim(H), keys.with_head_dim(H)
    layout = Layout(
        q.shape[0], queries.box.num_rows, N, num_keys, K, H,
        starts=((queries.box.row, queries.box.head), (keys.box.row, keys.box.head)),
        has_peer=(queries.peer is not None, keys.peer is not None),
        is_causal=mask.is_causal, window=mask.window, has_segments=mask.segment_ids is not None, scale=scale,
        softcap=softcap, dtype=jnp.dtype(dtype),
        blocks=blocks or block_sizes.find(direction, H, q.dtype, kind), is_interpreted=interpret is not None,
    )  # fmt: skip
    scalars = (mask.q_start, mask.k_start, mask.k_stop, queries.is_peer, keys.is_peer)
    scalars = jnp.stack([jnp.asarray(x).astype(jnp.int32) for x in scalars])
    table = mask.key_tiles(num_rows, layout.rows, num_keys, layout.blocks.keys)
    segments = mask.tile_segments(layout.rows, layout.blocks.keys) if layout.has_segments else ()
    walks = (_walk(table, first, behind) for first, behind in merge.parts(num_keys, layout.blocks.keys))
    return layout, queries, keys, [(scalars, walk, *segments) for walk in walks]


def _walk(table: Int[Array, "B tiles 4"], first: int, behind: int) -> Int[Array, "B tiles 4"]:
    """The numbers of Tiles, for the tiles of Mask.key_tiles that lie in first .. behind - 1."""
    start, full_start, full_stop, stop = jnp.moveaxis(jnp.clip(table, first, behind), -1, 0)
    hidden = jnp.where(table[..., 3] <= first, first, behind - 1)
    last = jnp.where(start == stop, hidden, stop - 1)
    num_tiles = jnp.maximum(stop - start, 1)
    first_full = jnp.clip(last + 1 - full_stop, 1, num_tiles)  # the first step is always masked
    return jnp.stack([last, num_tiles, first_full, jnp.clip(last + 1 - full_start, first_full, num_tiles)], axis=-1)


def make_scratch(layout: Layout, dtype: jnp.dtype, num_q_arrivals: int) -> dict[str, Any]:
    """Shared memory and barriers of a thread block; num_q_arrivals: copies for each warpgroup before the keys."""
    blocks, H = layout.blocks, layout.H
    # The product with V takes as many keys at a time as a row of its swizzled tiles has columns.
    swizzle = widest_swizzle(dtype, H, blocks.keys)
    scratch = {
        "q_smem": row_tiles((blocks.warpgroups, ROWS, H), dtype),
        "k_smem": row_tiles((blocks.stages, blocks.keys, H), dtype),
        "v_smem": row_tiles((blocks.stages, blocks.keys, H), dtype, swizzle),
        "q_full": plgpu.Barrier(num_arrivals=num_q_arrivals + layout.has_segments, num_barriers=blocks.warpgroups),
        "k_full": plgpu.Barrier(num_arrivals=1 + layout.has_segments, num_barriers=blocks.stages),
        "v_full": plgpu.Barrier(num_barriers=blocks.stages),
        "k_empty": plgpu.Barrier(num_arrivals=blocks.warpgroups, num_barriers=blocks.stages),
        "v_empty": plgpu.Barrier(num_arrivals=blocks.warpgroups, num_barriers=blocks.stages),
    }
    if layout.dtype != dtype:  # others fit where the queries were
        scratch["out_smem"] = row_tiles((blocks.warpgroups, ROWS, math.gcd(blocks.staging, H)), layout.dtype)
    if layout.has_segments:
        scratch["q_ids_smem"] = plgpu.SMEM((blocks.warpgroups, ROWS), jnp.float32)
        width = blocks.keys + -blocks.keys % COPY_COLUMNS  # the copy engine writes to multiples of 128 bytes
        scratch["k_ids_smem"] = plgpu.SMEM((blocks.stages, width), jnp.float32)
    if layout.is_interpreted:
        # The interpreter has no matmul with its left side in registers.
        scratch["left_smem"] = row_tiles((blocks.warpgroups, ROWS, blocks.keys), dtype, swizzle)
    return scratch


def widest_swizzle(dtype: DTypeLike, *columns: int) -> int:
    """The most bytes that a row of a tile can have of which each of these numbers of columns is whole rows."""
    return next(x for x in (128, 64, 32) if all(n * jnp.dtype(dtype).itemsize % x == 0 for n in columns))


def row_tiles(shape: tuple[int, ...], dtype: jnp.dtype, swizzle: int | None = None) -> Any:
    """Shared memory in the layout of the matrix units: tiles of 8 rows of `swizzle` bytes, by default the widest."""
    swizzle = swizzle or widest_swizzle(dtype, shape[-1])
    tiling = plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))


class Tiles(NamedTuple):
    """The tiles of keys that a thread block visits, from the last one to the first.

    num_tiles: at least one; where nothing is visible it is one in which nothing is, which gives 0 and -inf without a
    case of its own. first_full, stop_full: steps of the loop between which every key is visible to every row.
    """

    last: Int[Array, ""]
    num_tiles: Int[Array, ""]
    first_full: Int[Array, ""]
    stop_full: Int[Array, ""]


@dataclass(frozen=True)
class Source:
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


@dataclass(frozen=True)
class Task:
    """What a thread block works on, read from the operands of the kernel."""

    mask: Mask
    batch: Int[Array, ""]
    head: Int[Array, ""]
    tile: Int[Array, ""]  # of rows
    tiles: Tiles
    q_source: Source
    kv_source: Source
    segments: Sequence[Any]

    @classmethod
    def read(cls, layout: Layout, scalars_ref: Any, table_ref: Any, *refs: Any) -> "Task":
        """refs: segments of both sides, if there are some; the arrays of both sides, first own ones, then a peer's."""
        num_segments, num_kv = 2 * layout.has_segments, 2 * (1 + layout.has_peer[1])
        segments, arrays, kv_arrays = refs[:num_segments], refs[num_segments:-num_kv], refs[-num_kv:]
        num_q = len(arrays) // (1 + layout.has_peer[0])
        q_refs = [arrays[i : i + num_q] for i in range(0, len(arrays), num_q)]
        kv_refs = [kv_arrays[i : i + 2] for i in range(0, num_kv, 2)]
        q_start, k_start, k_stop, is_q_peer, is_kv_peer = (scalars_ref[i] for i in range(5))
        batch, head, tile = layout.place(lax.axis_index("block"))
        kv_head = divide(head, layout.N // layout.K)[0]
        # + 0: inside shard_map what is read is typed as varying over the mesh, what is computed here is not, and a loop
        # must count in one type.
        return cls(
            Mask(q_start, k_start, k_stop, layout.is_causal, layout.window), batch, head, tile,
            Tiles(*(table_ref[batch if layout.has_segments else 0, tile, i] + 0 for i in range(4))),
            Source(q_refs, is_q_peer, layout.starts[0], batch, head),
            Source(kv_refs, is_kv_peer, layout.starts[1], batch, kv_head), segments,
        )  # fmt: skip


def copy_tiles(
    layout: Layout, task: Task,
    *, q_smem: Any, k_smem: Any, v_smem: Any, q_full: Any, k_full: Any, v_full: Any, k_empty: Any, v_empty: Any,
    dout_smem: Any = None, q_ids_smem: Any = None, k_ids_smem: Any = None, **_: Any,
) -> None:  # fmt: skip
    """The copy warpgroup: queries, then K and V tile by tile from the last one, as shared memory becomes free."""
    blocks, tiles, segments = layout.blocks, task.tiles, task.segments
    for i in range(blocks.warpgroups):
        for number, smem in enumerate((q_smem,) if dout_smem is None else (q_smem, dout_smem)):
            task.q_source.copy(number, task.tile * layout.rows + i * ROWS, smem.at[i], q_full.at[i])
        if segments:
            ids = segments[0].at[task.batch, task.tile, pl.ds(i * ROWS, ROWS)]
            plgpu.copy_gmem_to_smem(ids, q_ids_smem.at[i], q_full.at[i])

    def step(i: Int[Array, ""], _: None) -> None:
        slot = lax.rem(i, blocks.stages)
        for number, smem, full, empty in ((0, k_smem, k_full, k_empty), (1, v_smem, v_full, v_empty)):

            @pl.when(i >= blocks.stages)
            def _(empty: Any = empty) -> None:
                plgpu.barrier_wait(empty.at[slot])

            @pl.when(i < tiles.num_tiles)
            def _(number: int = number, smem: Any = smem, full: Any = full) -> None:
                task.kv_source.copy(number, (tiles.last - i) * blocks.keys, smem.at[slot], full.at[slot])
                if segments and number == 0:
                    ids = segments[1].at[task.batch, tiles.last - i]
                    plgpu.copy_gmem_to_smem(ids, k_ids_smem.at[slot, pl.ds(0, blocks.keys)], full.at[slot])

    # The last rounds only wait: no barrier is left with a phase that nobody saw.
    lax.fori_loop(0, tiles.num_tiles + blocks.stages, step, None)


def visible_keys(
    layout: Layout, task: Task, warpgroup: Int[Array, ""], q_ids_smem: Any, k_ids_smem: Any,
    i: Int[Array, ""], slot: Int[Array, ""],
) -> Bool[Array, "rows keys"]:  # fmt: skip
    """Mask.visible of a warpgroup's rows in step i, by comparisons of keys with the limits of each row."""
    mask, shape = task.mask, (ROWS, layout.blocks.keys)
    row = task.tile * layout.rows + warpgroup * ROWS
    first_key = (task.tiles.last - i) * layout.blocks.keys
    keys = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA) + first_key
    if mask.is_causal or mask.window is not None:  # what is not used would have no layout
        numbers = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=plgpu.Layout.WGMMA.reduce(1))
        own = numbers + (mask.q_start + row - mask.k_start)  # the key at each row's position
    stop = jnp.minimum(mask.k_stop - mask.k_start, layout.S)
    seen = keys < (across_columns(jnp.minimum(own + 1, stop), shape) if mask.is_causal else stop)
    if mask.window is not None:
        seen &= keys > across_columns(own - mask.window, shape)
    if layout.has_segments:
        q_ids = plgpu.load(q_ids_smem, layout=plgpu.Layout.WGMMA.reduce(1))
        k_ids = plgpu.load(k_ids_smem.at[slot, pl.ds(0, layout.blocks.keys)], layout=plgpu.Layout.WGMMA.reduce(0))
        plgpu.commit_smem()  # orders this read before the copy that fills the slot again
        seen &= lax.broadcast_in_dim(k_ids, shape, (1,)) == across_columns(q_ids, shape)
    return seen


def store_rows(values: Array, staging: Any, target: Any, reduction: str | None = None) -> None:
    """Registers to memory through shared memory; the copy engine drops rows past the end of the target."""
    width = staging.shape[1]
    for column in range(0, values.shape[1], width):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        staging[...] = values[:, column : column + width]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staging, target.at[:, pl.ds(column, width)], reduction_op=reduction)


def across_columns(x: Float[Array, " rows"], shape: tuple[int, int]) -> Float[Array, "rows columns"]:
    return lax.broadcast_in_dim(x, shape, (0,))


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of a number that is not above the limit."""
    return max(d for d in range(1, number + 1) if number % d == 0 and d <= limit)


def divide(x: Int[Array, ""], divisor: int) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """Quotient and remainder of a number that is not negative: without the sign's case, which jnp's division has."""
    return lax.div(x, jnp.int32(divisor)), lax.rem(x, jnp.int32(divisor))


def tanh(x: Array) -> Array:
    """Of exponentials alone: the GPU's own tanh is good to three digits."""
    return 1 - 2 * lax.rsqrt(1 + jnp.exp2(x * (2 * LOG2_E))) ** 2
