"""Attention of one query chunk against one key/value chunk on one device; no mesh, no collective, no autodiff.

Letters in shapes and names, everywhere in this project:

    B batch                 T query positions       S key positions         P workers
    N query heads           K key/value heads       G = N / K               H head dim
    D model width           F feed-forward width    V vocabulary            L layers
"""

from typing import NamedTuple

from pallas_kernels import xla
from pallas_kernels.block import BlockAttention, Box, Operand
from pallas_kernels.masks import Mask

__all__ = ["IMPLEMENTATIONS", "BlockAttention", "Box", "Choice", "Mask", "Operand", "choose"]

IMPLEMENTATIONS: dict[str, BlockAttention] = {"xla": xla.ATTENTION}


class Choice(NamedTuple):
    """Which implementation runs, and why."""

    name: str
    reason: str


def choose(implementation: str | None, platform: str) -> Choice:
    """The implementation that runs on a platform ("cpu", "gpu", ...): the one asked for, or the best one there.

    Raises:
        ValueError: `implementation` names none.
    """
    if implementation is None:
        return Choice("xla", f"the only implementation for platform {platform!r} in this version")
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={implementation!r}: must be None or one of {sorted(IMPLEMENTATIONS)}")
    return Choice(implementation, "asked for")
