"""Exact attention over sequences sharded across devices: balanced, overlapped, never computed twice.

Source: DISTFLASHATTN, arXiv 2310.03294.
"""

from distflash_jax import remat, schedule
from distflash_jax.attention import distflash_attention, which_implementation
from distflash_jax.flax_adapter import flax_attention

__all__ = ["distflash_attention", "flax_attention", "remat", "schedule", "which_implementation"]
