"""Tile sizes of the Triton kernels, by (direction, padded head dim, bits of the dtype, kind of GPU).

Chosen by what the assembler says: they fit in shared memory and spill two registers at most (`python -m
benchmarks.assemble_triton`). At head dims 64 and 128 on sm90 also by time, on an H200: docs/kernel_variants.csv.
`python -m benchmarks.tune --implementation triton` measures them on the GPU at hand; see block_sizes. float32 is not
rounded to tf32 unless JAX is told so, which leaves the matrix units out.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.block_sizes import from_file, padded_head_dim

HEAD_DIMS = (32, 64, 128, 256)  # others are padded to the next, inside of the kernels
DIRECTIONS = ("forward", "keys_backward", "rows_backward")
# Kinds of GPU by bytes of shared memory that a thread block may have: A100 and the like; L40S, RTX; Hopper and later.
SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024}
KINDS_OF_GPU = {"8.0": 80, "8.7": 80, "9.0": 90, "10.0": 90, "10.3": 90}  # all others, sm86, sm89 and sm120, have least


@dataclass(frozen=True)
class Blocks:
    """rows: queries of a tile. keys: of a tile. stages: tiles in flight in the loop. warps: of a program."""

    rows: int
    keys: int
    warps: int
    stages: int


Key = tuple[str, int, int, int]
_FLOAT32 = {32: Blocks(32, 32, 4, 2), 64: Blocks(16, 32, 4, 2), 128: Blocks(16, 32, 4, 2), 256: Blocks(16, 16, 8, 1)}
TABLE: Mapping[Key, Blocks] = {
    (direction, head_dim, bits, kind): blocks
    for direction, head_dim, bits, kinds, blocks in (
        ("forward", 32, 16, (80, 86, 90), Blocks(128, 64, 4, 3)),
        ("forward", 64, 16, (80,), Blocks(128, 64, 4, 3)),
        ("forward", 64, 16, (86,), Blocks(128, 64, 4, 2)),
        ("forward", 64, 16, (90,), Blocks(128, 64, 4, 3)),
        ("forward", 128, 16, (80, 86), Blocks(128, 64, 8, 3)),
        ("forward", 128, 16, (90,), Blocks(64, 64, 4, 3)),
        ("forward", 256, 16, (80,), Blocks(64, 64, 8, 2)),
        ("forward", 256, 16, (86,), Blocks(64, 32, 8, 2)),
        ("forward", 256, 16, (90,), Blocks(128, 64, 8, 2)),
        ("keys_backward", 32, 16, (80,), Blocks(32, 128, 8, 3)),
        ("keys_backward", 32, 16, (86, 90), Blocks(64, 128, 8, 3)),
        ("keys_backward", 64, 16, (80, 86), Blocks(64, 128, 8, 3)),
        ("keys_backward", 64, 16, (90,), Blocks(64, 64, 4, 3)),
        ("keys_backward", 128, 16, (80, 86), Blocks(64, 64, 8, 2)),
        ("keys_backward", 128, 16, (90,), Blocks(64, 128, 8, 2)),
        ("keys_backward", 256, 16, (80, 90), Blocks(32, 64, 8, 2)),
        ("keys_backward", 256, 16, (86,), Blocks(16, 64, 8, 2)),
        ("rows_backward", 32, 16, (80, 86, 90), Blocks(128, 64, 8, 2)),
        ("rows_backward", 64, 16, (80, 86), Blocks(128, 64, 8, 3)),
        ("rows_backward", 64, 16, (90,), Blocks(64, 64, 4, 3)),
        ("rows_backward", 128, 16, (80, 86), Blocks(128, 64, 8, 2)),
        ("rows_backward", 128, 16, (90,), Blocks(128, 64, 8, 3)),
        ("rows_backward", 256, 16, (80, 90), Blocks(64, 64, 8, 2)),
        ("rows_backward", 256, 16, (86,), Blocks(64, 16, 8, 2)),
        *((direction, H, 32, (80, 86, 90), blocks) for direction in DIRECTIONS for H, blocks in _FLOAT32.items()),
        # In their place, where registers would be spilled.
        ("forward", 128, 32, (90,), Blocks(16, 32, 8, 2)),
        ("keys_backward", 256, 32, (80,), Blocks(16, 16, 8, 2)),
        ("rows_backward", 128, 32, (90,), Blocks(16, 32, 8, 2)),
    )
    for kind in kinds
}


# What the tune command tries beside the entry of the table.
CANDIDATES: Mapping[tuple[str, int], tuple[Blocks, ...]] = {
    ("forward", 64): (Blocks(128, 64, 4, 2), Blocks(128, 64, 4, 4), Blocks(64, 64, 4, 3), Blocks(128, 64, 8, 3)),
    ("forward", 128): (Blocks(128, 64, 8, 3), Blocks(64, 64, 4, 4), Blocks(64, 128, 4, 2)),
    ("forward", 256): (Blocks(128, 32, 8, 3),),
    ("keys_backward", 64): (Blocks(64, 128, 8, 2), Blocks(64, 64, 4, 4), Blocks(128, 64, 8, 2)),
    ("keys_backward", 128): (Blocks(64, 64, 4, 2), Blocks(32, 128, 8, 4)),
    ("keys_backward", 256): (Blocks(64, 64, 8, 1), Blocks(64, 32, 8, 2)),
    ("rows_backward", 64): (Blocks(128, 64, 8, 3), Blocks(64, 64, 4, 4), Blocks(64, 128, 4, 2)),
    ("rows_backward", 128): (Blocks(64, 64, 4, 3), Blocks(128, 32, 8, 4), Blocks(64, 32, 4, 4)),
    ("rows_backward", 256): (Blocks(64, 32, 8, 3), Blocks(64, 32, 4, 2)),
}


def find(direction: str, head_dim: int, dtype: DTypeLike, compute_capability: str) -> Blocks:
    """The blocks for a call: those of the user's file if it has them, else those of the table."""
    bits = 8 * jnp.dtype(dtype).itemsize
    key = (direction, padded_head_dim(head_dim, HEAD_DIMS), bits, kind_of(compute_capability))
    return from_file("triton", TABLE).get(key, TABLE[key])


def kind_of(compute_capability: str) -> int:
    return KINDS_OF_GPU.get(compute_capability, 86)
