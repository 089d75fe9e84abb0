"""Attention of one query chunk against one key/value chunk on one device; no mesh, no collective, no autodiff.

Letters in shapes and names, everywhere in this project:

    B batch                 T query positions       S key positions         P workers
    N query heads           K key/value heads       G = N / K               H head dim
    D model width           F feed-forward width    V vocabulary            L layers
"""

from typing import NamedTuple

import jax.numpy as jnp

from pallas_kernels import block_sizes, hopper_backward, hopper_forward, xla
from pallas_kernels.block import BlockAttention, Box, Operand
from pallas_kernels.masks import Mask

__all__ = ["IMPLEMENTATIONS", "BlockAttention", "Box", "Choice", "Mask", "Operand", "choose"]

IMPLEMENTATIONS: dict[str, BlockAttention] = {
    "hopper": BlockAttention(hopper_forward.forward, hopper_backward.backward),
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
    obstacle = _hopper_obstacle(platform, compute_capability, dtype, head_dim, scale, cuda_version)
    if implementation == "hopper" and obstacle:
        raise ValueError(f"implementation='hopper': {obstacle}")
    if implementation is not None:
        return Choice(implementation, "asked for")
    if obstacle:
        return Choice("xla", f"for every platform; {obstacle}")
    return Choice("hopper", f"a GPU of compute capability {compute_capability}, {dtype}, head dim {head_dim}")


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
