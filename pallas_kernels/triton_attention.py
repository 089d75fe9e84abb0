"""Block attention in Triton, through jax-triton, for NVIDIA GPUs of compute capability 8.0 and later.

Here kernels are prepared and called; triton_forward and triton_backward hold them. They import Triton, which only the
extra distflash_jax[triton] brings, and are themselves imported when they are first called.
"""

import functools
import importlib
import importlib.util
import inspect
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jax.typing import DTypeLike
from jaxtyping import Array

from pallas_kernels import merge, triton_blocks
from pallas_kernels.block import BlockAttention, Gradients, Operand, Partial, check_softcap, vary_like
from pallas_kernels.block_sizes import padded_head_dim
from pallas_kernels.masks import Mask
from pallas_kernels.triton_blocks import Blocks

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
TF32 = ("tensorfloat32", "TF32_TF32_F32")  # by which jax.default_matmul_precision allows products of rounded float32
LOG2_E = math.log2(math.e)
# One instruction for a product and a sum, which Triton 3.10 has to be asked for.
BACKEND_OPTIONS = {"enable_fp_fusion": True}


class Launch(NamedTuple):
    """A kernel's call: `programs` run kernel(*arrays, *results, **constants)."""

    module: str
    kernel: str
    arrays: tuple[Array, ...]
    results: tuple[jax.ShapeDtypeStruct, ...]
    programs: int
    constants: dict[str, Any]
    blocks: Blocks
    compute_capability: str


Run = Callable[[Launch], tuple[Array, ...]]


def is_installed() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("triton", "jax_triton"))


def local_compute_capability() -> str:
    """Of the first GPU here, such as "8.0"."""
    return jax.local_devices(backend="gpu")[0].compute_capability


def run(launch: Launch) -> tuple[Array, ...]:
    """The results of a kernel, compiled for the GPU."""
    triton_call = importlib.import_module("jax_triton").triton_call
    kernel = getattr(importlib.import_module(launch.module), launch.kernel)
    parameters = inspect.signature(triton_call).parameters
    # jax-triton 0.4 has another name for what comes out, and leaves to Triton what 0.3 asks for.
    options: dict[str, Any] = {"out_type" if "out_type" in parameters else "out_shape": launch.results}
    if "backend_options" in parameters:
        options["backend_options"] = BACKEND_OPTIONS

    @sequential_vmap  # jax-triton has no rule for vmap
    def call(*arrays: Array) -> tuple[Array, ...]:
        return triton_call(
            *arrays,
            kernel=kernel,
            name=f"triton_{launch.kernel}",
            grid=(launch.programs,),
            num_warps=launch.blocks.warps,
            num_stages=launch.blocks.stages,
            compute_capability=int(launch.compute_capability.replace(".", "")),
            **options,
            **launch.constants,
        )

    return call(*launch.arrays)


def forward(
    queries: Operand,
    keys: Operand,
    mask: Mask,
    scale: float,
    softcap: float | None = None,
    dtype: DTypeLike = jnp.float32,
    *,
    blocks: Blocks | None = None,
    compute_capability: str | None = None,
    run: Run = run,
) -> Partial:
    """(out, lse) of one query chunk against one key/value chunk; see BlockAttention.

    compute_capability: of the GPU that it is compiled for, such as "8.0"; of the first one here if not given.
    run: how a kernel is run.

    Raises:
        ValueError: a dtype, head dim, head count or scale that the kernel does not take.
    """
    q = queries.own[0]
    B, T, N, H = q.shape[0], queries.box.num_rows, queries.box.num_heads, q.shape[3]
    prepare = functools.partial(_prepare, queries, keys, mask, scale, softcap, blocks, compute_capability)
    results = jax.ShapeDtypeStruct((B, T, N, H), dtype), jax.ShapeDtypeStruct((B, T, N), jnp.float32)
    parts = ((out, lse) for out, lse in map(run, prepare("forward", (), results)))
    out, lse = functools.reduce(merge.merge, parts)
    return vary_like(out.astype(dtype), q), vary_like(lse, q)


def backward(
    queries: Operand,
    keys: Operand,
    mask: Mask,
    scale: float,
    softcap: float | None = None,
    dtype: DTypeLike = jnp.float32,
    deterministic: bool = False,
    *,
    blocks: dict[str, Blocks] | None = None,
    compute_capability: str | None = None,
    run: Run = run,
) -> Gradients:
    """(dq, dk, dv) of one query chunk against one key/value chunk, by the global lse and delta; see BlockAttention.

    compute_capability, run: as of forward. blocks: those that differ from the table, by direction there.

    Raises:
        ValueError: a dtype, head dim, head count or scale that the kernels do not take.
    """
    del deterministic  # it always is
    q = queries.own[0]
    B, H, T, S = q.shape[0], q.shape[3], queries.box.num_rows, keys.box.num_rows
    # Small: reading them outside costs no pass over an operand.
    lse, delta = queries._replace(own=queries.own[2:], peer=queries.peer and queries.peer[2:]).read()
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2_E)
    stats = lse.transpose(0, 2, 1), delta.transpose(0, 2, 1)
    rows = queries._replace(own=queries.own[:2], peer=queries.peer and queries.peer[:2])

    def prepare(direction: str, *results: jax.ShapeDtypeStruct) -> list[Launch]:
        own = (blocks or {}).get(direction)
        return _prepare(rows, keys, mask, scale, softcap, own, compute_capability, direction, stats, results)

    row_gradient = jax.ShapeDtypeStruct((B, T, queries.box.num_heads, H), dtype)
    key_gradient = jax.ShapeDtypeStruct((B, S, keys.box.num_heads, H), dtype)
    ((dk, dv),) = map(run, prepare("keys_backward", key_gradient, key_gradient))
    dq = functools.reduce(operator.add, (dq for (dq,) in map(run, prepare("rows_backward", row_gradient))))
    return vary_like(dq.astype(dtype), q), vary_like(dk, q), vary_like(dv, q)


ATTENTION = BlockAttention(forward, backward)


def _prepare(
    queries: Operand, keys: Operand, mask: Mask, scale: float, softcap: float | None, blocks: Blocks | None,
    compute_capability: str | None, kernel: str, stats: tuple[Array, ...], results: tuple[jax.ShapeDtypeStruct, ...],
) -> list[Launch]:  # fmt: skip
    """The calls of a kernel: (numbers, tiles, segments, own and peer's arrays of each side, stats).

    One, or one for each part of the keys that are added up; then the results are float32.
    """
    q, k = queries.own[0], keys.own[0]
    B, H, q_box, k_box = q.shape[0], q.shape[3], queries.box, keys.box
    if q.dtype not in DTYPES or k.dtype != q.dtype:
        raise ValueError(f"dtypes of q {q.dtype} and k {k.dtype}: must be the same and bfloat16, float16 or float32")
    if q_box.num_heads % k_box.num_heads:
        raise ValueError(f"{q_box.num_heads} query heads: must be a multiple of the {k_box.num_heads} key/value heads")
    if scale <= 0:
        raise ValueError(f"scale={scale}: must be positive, the running maximum is taken before scaling")
    check_softcap(softcap)
    compute_capability = compute_capability or local_compute_capability()
    blocks = blocks or triton_blocks.find(kernel, H, q.dtype, compute_capability)
    sizes = q_box.num_rows, blocks.rows, k_box.num_rows, blocks.keys
    table = mask.query_tiles(*sizes) if kernel == "keys_backward" else mask.key_tiles(*sizes)
    numbers = [mask.q_start, mask.k_start, mask.k_stop]
    for side in (queries, keys):
        box, (_, num_rows, num_heads, _) = side.box, side.own[0].shape
        numbers += [side.is_peer, box.num_rows, box.num_heads, num_rows, num_heads, box.row, box.head]
    numbers = jnp.stack([jnp.asarray(x).astype(jnp.int32) for x in numbers])
    has_segments = mask.segment_ids is not None
    # Where there is no array the kernel does not look at what is in its place.
    segments = mask.tile_segments(blocks.rows, blocks.keys) if has_segments else (numbers, numbers)
    chunks = [
        x
        for side in (queries, keys)
        for pair in zip(side.own, side.own if side.peer is None else side.peer, strict=True)
        for x in pair
    ]
    constants = {
        "G": q_box.num_heads // k_box.num_heads, "H": H, "IS_SHORT": k_box.row + k_box.num_rows > k.shape[1],
        "IS_CAUSAL": mask.is_causal, "WINDOW": mask.window or 0, "HAS_SEGMENTS": has_segments,
        "SCALE": float(scale), "SOFTCAP": float(softcap or 0),
        "BLOCK_ROWS": blocks.rows, "BLOCK_KEYS": blocks.keys, "BLOCK_H": padded_head_dim(H, triton_blocks.HEAD_DIMS),
        "PRECISION": "tf32" if jax.config.jax_default_matmul_precision in TF32 else "ieee",
    }  # fmt: skip
    programs = B * (
        k_box.num_heads * -(-k_box.num_rows // blocks.keys)
        if kernel == "keys_backward"
        else q_box.num_heads * -(-q_box.num_rows // blocks.rows)
    )
    module = "pallas_kernels.triton_forward" if kernel == "forward" else "pallas_kernels.triton_backward"
    tables = [table]
    parts = merge.parts(k_box.num_rows, blocks.keys)
    if kernel != "keys_backward" and len(parts) > 1:
        tables = [jnp.clip(table, first, behind) for first, behind in parts]
        results = tuple(jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in results)
    others = (*segments, *chunks, *stats)
    return [
        Launch(module, kernel, (numbers, table, *others), results, programs, constants, blocks, compute_capability)
        for table in tables
    ]
