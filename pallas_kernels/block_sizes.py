"""Tile sizes of the Hopper kernels: a measured table by (direction, head dim, dtype, kind of mask).

`python -m benchmarks.tune` measures the candidates again on the GPU at hand and writes a file like the table; the
environment variable DISTFLASH_BLOCK_SIZES names such a file, whose entries replace those here.
"""

import itertools
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.masks import Mask

SHARED_MEMORY = 227 * 1024  # bytes that one thread block may have on sm90
ALIGNMENT = 1024  # of each array in shared memory
HEAD_DIMS = (64, 96, 128, 192, 256)  # others are padded to the next
KINDS = ("full", "causal", "window", "segments")
SHORT = "short"  # one more kind of the forward, see forward_kind
SHORT_KEYS = 4096
LONG_GAIN = 1.07  # tiles for long rows over those for short ones, where no multiprocessor is left without work
MULTIPROCESSORS = 132  # of an H100 or H200
ALL_KINDS = (*KINDS, SHORT)
FILE_VARIABLE = "DISTFLASH_BLOCK_SIZES"


@dataclass(frozen=True)
class ForwardBlocks:
    """How a thread block of the forward is laid out.

    warpgroups: those that compute, 64 query rows each. keys: of a tile. stages: tiles of K and of V in shared memory.
    staging: columns of float32 results that leave at a time; what divides the head dim with it, if it does not.
    skips_rescaling: a warp with no new maximum in its rows does not multiply their sums by 1. slack: a maximum is new
    where it is more than 2^slack times as large, in its exponential, as the last one.
    compute_registers, copy_registers: a thread's; 64K a thread block, in multiples of 8.
    """

    warpgroups: int = 2
    keys: int = 128
    stages: int = 2
    staging: int = 64
    skips_rescaling: bool = True
    slack: int = 0
    compute_registers: int = 240
    copy_registers: int = 24


@dataclass(frozen=True)
class BackwardBlocks:
    """How a thread block of the backward is laid out; two warpgroups compute.

    rows: queries of a tile, 64 or 128; a warpgroup makes half of the columns of its dq, or 64 of its rows.
    stages: tiles of q in shared memory. dout_stages: tiles of dout, which is needed for a part of the time only.
    swizzle: bytes of a row of the 16-bit tiles; the columns of a part of dq fill whole rows. staging: columns of dq,
    dk, dv that leave at a time: fewer than half of the head dim wait for one another.
    splits_keys: each warpgroup takes 64 of 128 keys, with all columns of dk and dv; without, both take the same 64 keys
    and half of the columns, the scores twice: where the sums would not fit in registers otherwise.
    cluster: thread blocks, of neighbouring keys, to all of which the copy engine gives the same tiles of q and dout.
    ctas: query heads of a group are dealt to several thread blocks where there would be fewer than these.
    is_frugal: fewer registers, since P' dO ends before dq begins and dS' is read from shared memory.
    """

    rows: int = 64
    stages: int = 2
    dout_stages: int = 2
    swizzle: int = 128
    staging: int = 64
    splits_keys: bool = True
    cluster: int = 1
    ctas: int = 256
    is_frugal: bool = False
    compute_registers: int = 240
    copy_registers: int = 24


Blocks = ForwardBlocks | BackwardBlocks
Key = tuple[str, int, str, str]  # direction (dq: of the deterministic backward), head dim, dtype, kind of mask

_FORWARD = {
    64: ForwardBlocks(warpgroups=3, stages=3, skips_rescaling=False, slack=8, compute_registers=160, copy_registers=32),
    96: ForwardBlocks(warpgroups=3, keys=80, stages=3, slack=8, compute_registers=160, copy_registers=32),
    128: ForwardBlocks(warpgroups=3, keys=80, stages=3, slack=8, compute_registers=160, copy_registers=32),
    192: ForwardBlocks(keys=64),
    256: ForwardBlocks(keys=64, staging=32),
}
_DQ = {
    64: ForwardBlocks(warpgroups=3, keys=64, stages=4, compute_registers=160, copy_registers=32),
    96: ForwardBlocks(keys=64, stages=3),
    128: ForwardBlocks(keys=64, stages=3),
    192: ForwardBlocks(warpgroups=1, keys=64),
    256: ForwardBlocks(warpgroups=1, keys=64),
}
_BACKWARD = {
    64: BackwardBlocks(rows=128),
    96: BackwardBlocks(swizzle=32, staging=48),
    128: BackwardBlocks(),
    192: BackwardBlocks(swizzle=64, staging=96, splits_keys=False),
    256: BackwardBlocks(dout_stages=1, splits_keys=False, is_frugal=True),
}
_OTHERS: Mapping[tuple[str, int, str], Blocks] = {
    ("forward", 64, SHORT): ForwardBlocks(
        warpgroups=4, keys=64, stages=4, skips_rescaling=False, slack=8, compute_registers=112, copy_registers=32
    ),
    ("forward", 64, "segments"): replace(_FORWARD[64], slack=0),
    **{("forward", H, kind): ForwardBlocks(slack=8) for H in (96, 128) for kind in (SHORT, "segments")},
    # Without a mask blocks fall out of step, and share less of the L2 cache, unless clusters hold them together.
    ("backward", 64, "full"): replace(_BACKWARD[64], cluster=2),
    ("backward", 256, "full"): replace(_BACKWARD[256], cluster=2),
}
TABLE: Mapping[Key, Blocks] = {
    (direction, head_dim, dtype, kind): _OTHERS.get((direction, head_dim, kind), blocks[head_dim])
    for (direction, blocks), head_dim, dtype, kind in itertools.product(
        (("forward", _FORWARD), ("backward", _BACKWARD), ("dq", _DQ)), HEAD_DIMS, ("bfloat16", "float16"), ALL_KINDS
    )
    if direction == "forward" or kind != SHORT
}
# What the tune command tries, beside the entry of the table.
CANDIDATES: Mapping[tuple[str, int], tuple[Blocks, ...]] = {
    ("forward", 64): (
        _FORWARD[64],
        ForwardBlocks(),
        ForwardBlocks(stages=4),
        ForwardBlocks(keys=192),
        ForwardBlocks(keys=192, stages=3),
    ),
    ("forward", 96): (ForwardBlocks(slack=8), replace(_FORWARD[96], keys=96)),
    ("forward", 128): (_FORWARD[128], ForwardBlocks(), replace(_FORWARD[128], keys=64, stages=4)),
    ("forward", 192): (ForwardBlocks(keys=64, stages=3),),
    ("forward", 256): (),
    ("backward", 64): (
        replace(_BACKWARD[64], is_frugal=True),
        BackwardBlocks(stages=3, dout_stages=3, swizzle=64, staging=32),
    ),
    ("backward", 96): (replace(_BACKWARD[96], is_frugal=True),),
    ("backward", 128): (BackwardBlocks(is_frugal=True),),
    ("backward", 192): (replace(_BACKWARD[192], is_frugal=True),),
    ("backward", 256): (replace(_BACKWARD[256], dout_stages=2, staging=32),),
}


def padded_head_dim(head_dim: int, sizes: tuple[int, ...] = HEAD_DIMS) -> int:
    """The smallest of the head dims of kernels, here the Hopper ones, that holds this one.

    Raises:
        ValueError: none does.
    """
    for size in sizes:
        if head_dim <= size:
            return size
    raise ValueError(f"head dim {head_dim}: must be at most {sizes[-1]}")


def forward_kind(mask: Mask, head_dim: int, num_heads: int, num_rows: int, num_keys: int) -> str:
    """Of a mask, as the forward's entries of the table have it; num_heads: of queries, in all batches.

    Short is what sees few keys in the mean. Without a mask all thread blocks take equally long, and it counts how long
    the last of them leave multiprocessors without work.
    """
    if mask.kind == "full":

        def rows_in_turn(kind: str) -> int:
            """That a multiprocessor computes, one thread block after the other, until all are done."""
            blocks: Any = TABLE["forward", head_dim, "bfloat16", kind]
            rows = blocks.warpgroups * 64
            return -(-num_heads * -(-num_rows // rows) // MULTIPROCESSORS) * rows

        return SHORT if rows_in_turn(SHORT) * LONG_GAIN < rows_in_turn("full") else "full"
    seen = min(num_keys // (2 if mask.is_causal else 1), mask.window or num_keys)
    return SHORT if seen < SHORT_KEYS and mask.kind != "segments" else mask.kind


def find(direction: str, head_dim: int, dtype: DTypeLike, kind: str) -> Any:
    """The blocks for a call: those of the user's file if it has them, else those of the table."""
    key = (direction, head_dim, jnp.dtype(dtype).name, kind)
    return from_file("hopper", TABLE).get(key, TABLE[key])


def write(path: Path, implementation: str, entries: Mapping[Any, Any]) -> None:
    """Writes a user's file, or into it, with these entries for the kernels of an implementation."""
    content = json.loads(path.read_text()) if path.exists() else {}
    content[implementation] = {name(key): asdict(blocks) for key, blocks in entries.items()}
    path.write_text(json.dumps(content, indent=1))


def from_file[Key, Blocks](implementation: str, table: Mapping[Key, Blocks]) -> dict[Key, Blocks]:
    """What the user's file, if there is one, has in place of entries of the table.

    Raises:
        ValueError: the file has an entry, or a field of one, that the table has not.
    """
    path = os.environ.get(FILE_VARIABLE)
    if path is None:
        return {}
    keys, entries = {name(key): key for key in table}, {}
    for entry, fields in json.loads(Path(path).read_text()).get(implementation, {}).items():
        if entry not in keys:
            raise ValueError(f"{path}: no entry {entry!r} of {implementation}; there are such as {next(iter(keys))!r}")
        blocks: Any = table[keys[entry]]
        try:
            entries[keys[entry]] = type(blocks)(**fields)
        except TypeError as error:
            raise ValueError(
                f"{path}: entry {entry!r} has the fields {sorted(fields)}, must be some of {sorted(asdict(blocks))}"
            ) from error
    return entries


def name(key: Any) -> str:
    """Of an entry, such as "forward 128 bfloat16 causal"."""
    return " ".join(map(str, key))


def check_shared_memory(scratch: Any, blocks: Blocks) -> None:
    """Raises ValueError, which names the sizes, where the arrays of a thread block do not fit in shared memory."""
    sizes = {}
    for path, ref in jax.tree_util.tree_leaves_with_path(scratch):
        if getattr(ref, "memory_space", None) == plgpu.SMEM:
            num_bytes = math.prod(ref.shape) * ref.dtype.itemsize
            sizes[jax.tree_util.keystr(path)] = num_bytes + -num_bytes % ALIGNMENT
    if sum(sizes.values()) + ALIGNMENT > SHARED_MEMORY:
        listed = ", ".join(f"{name} {size // 1024} KiB" for name, size in sizes.items())
        raise ValueError(f"more than the {SHARED_MEMORY // 1024} KiB of shared memory: {listed}, of {blocks}")
