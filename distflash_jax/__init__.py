"""Exact attention over sequences sharded across devices: balanced, overlapped, never computed twice.

Source: DISTFLASHATTN, arXiv 2310.03294.
"""

from distflash_jax import masks, remat, schedule
from distflash_jax.attention import distflash_attention, which_implementation
from distflash_jax.flax_adapter import flax_attention
from distflash_jax.packing import order_documents
from distflash_jax.strategies import explain_strategy
from distflash_jax.zigzag_plan import unzigzag, zigzag

__all__ = [
    "distflash_attention",
    "explain_strategy",
    "flax_attention",
    "masks",
    "order_documents",
    "remat",
    "schedule",
    "unzigzag",
    "which_implementation",
    "zigzag",
]
