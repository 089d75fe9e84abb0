"""Attention of one query chunk against one key/value chunk on one device; no mesh, no collective, no autodiff.

Letters in shapes and names, everywhere in this project:

    B batch                 T query positions       S key positions         P workers
    N query heads           K key/value heads       G = N / K               H head dim
    D model width           F feed-forward width    V vocabulary            L layers
"""

import re
from typing import NamedTuple

import jax.numpy as jnp

from pallas_kernels import block_sizes, hopper_backward, hopper_forward, triton_attention, triton_blocks, xla
from pallas_kernels.block import BlockAttention, Box, Operand
from pallas_kernels.masks import Mask

__all__ = ["IMPLEMENTATIONS", "BlockAttention", "Box", "Choice", "Mask", "Operand", "choose"]

IMPLEMENTATIONS: dict[str, BlockAttention] = {
    "hopper": BlockAttention(hopper_forward.forward, hopper_backward.backward),
    "triton": triton_attention.ATTENTION,
    "xla": xla.ATTENTION,
}
BROKEN_CUDA = range(12080, 12091)  # their assembler miscompiles kernels with a causal mask: 12.8.0 to 12.9.0


class Choice(NamedTuple):
    """Which implementation runs, and why."""

    name: str
    reason: str


def choose(
    implementation: str | None,
    *,
    platform: str,
    compute_capability: str | None,
    dtype: jnp.dtype,
    head_dim: int,
    scale: float,
    cuda_version: int | None = None,
) -> Choice:
    """The implementation that runs: the one asked for, or the fastest that takes these arguments on the device.

    platform: as jax.Device has it ("cpu", "gpu", ...). compute_capability: of a GPU, such as "9.0".
    cuda_version: of its toolchain, such as 13000 for 13.0; None where unknown.

    Raises:
        ValueError: `implementation` names none, or one that cannot run there.
    """
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"implementation={implementation!r}: must be None or one of {sorted(IMPLEMENTATIONS)}")
    obstacles = {
        "hopper": _hopper_obstacle(platform, compute_capability, dtype, head_dim, scale, cuda_version),
        "triton": _triton_obstacle(platform, compute_capability, dtype, head_dim, scale),
        "xla": None,
    }
    if implementation is not None:
        if obstacles[implementation]:
            raise ValueError(f"implementation={implementation!r}: {obstacles[implementation]}")
        return Choice(implementation, "asked for")
    name = next(name for name, obstacle in obstacles.items() if obstacle is None)
    device = f"a GPU of compute capability {compute_capability}, {dtype}, head dim {head_dim}"
    reasons = ["for every platform" if name == "xla" else device, *filter(None, obstacles.values())]
    return Choice(name, "; ".join(reasons[: list(obstacles).index(name) + 1]))


def _hopper_obstacle(
    platform: str,
    compute_capability: str | None,
    dtype: jnp.dtype,
    head_dim: int,
    scale: float,
    cuda_version: int | None,
) -> str | None:
    """Why the Hopper kernels cannot run; None where they can."""
    if platform != "gpu":
        return f"hopper needs a GPU, got {platform}"
    if compute_capability != "9.0":
        return f"hopper needs a GPU of compute capability 9.0, got {compute_capability}"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"hopper needs bfloat16 or float16, got {dtype}"
    if head_dim > block_sizes.HEAD_DIMS[-1]:
        return f"hopper needs a head dim of at most {block_sizes.HEAD_DIMS[-1]}, got {head_dim}"
    if scale <= 0:
        return f"hopper needs a positive scale, got {scale}"
    if cuda_version is not None and cuda_version in BROKEN_CUDA:
        version = f"{cuda_version // 1000}.{cuda_version % 1000 // 10}.{cuda_version % 10}"
        return f"hopper needs CUDA before 12.8.0 or from 12.9.1 on, which do not miscompile causal masks, got {version}"
    return None


def _triton_obstacle(
    platform: str, compute_capability: str | None, dtype: jnp.dtype, head_dim: int, scale: float
) -> str | None:
    """Why the Triton kernels cannot run; None where they can."""
    if platform != "gpu":
        return f"triton needs a GPU, got {platform}"
    if not re.fullmatch(r"\d+\.\d", compute_capability or "") or float(compute_capability or 0) < 8:
        return f"triton needs an NVIDIA GPU of compute capability 8.0 or later, got {compute_capability}"
    if dtype not in triton_attention.DTYPES:
        return f"triton needs bfloat16, float16 or float32, got {dtype}"
    if head_dim > triton_blocks.HEAD_DIMS[-1]:
        return f"triton needs a head dim of at most {triton_blocks.HEAD_DIMS[-1]}, got {head_dim}"
    if scale <= 0:
        return f"triton needs a positive scale, got {scale}"
    if not triton_attention.is_installed():
        return "triton needs jax-triton: pip install 'distflash_jax[triton]'"
    return None
