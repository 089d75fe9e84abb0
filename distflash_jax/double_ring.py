"""A table over the nodes around tables over the workers of each: a chunk crosses the network once for a whole node.

Each worker has a piece of its node's chunk. Between nodes every worker sends its own piece, and a task of two chunks is
a table of its pieces, within the node, in place of a kernel: all of it hides what travels between nodes meanwhile.

Source: the topology-aware ring of BurstAttention, arXiv 2403.09347, and BurstEngine, arXiv 2509.19836.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax.typing import DTypeLike

from distflash_jax import executor
from pallas_kernels.block import Gradients, Operand, Partial
from pallas_kernels.masks import Mask


@dataclass(frozen=True)
class WithinNode:
    """A kernel, as BlockAttention, for chunks of which the workers of an axis have pieces; hashable.

    causal: the table of a chunk of queries and the keys at the same positions; full: of one and keys before it.
    """

    causal: executor.Plan
    full: executor.Plan

    def forward(
        self, queries: Operand, keys: Operand, mask: Mask, scale: float, softcap: float | None = None,
        dtype: DTypeLike = jnp.float32,
    ) -> Partial:  # fmt: skip
        """(out, lse) of this worker's piece of the queries."""
        (q,), (k, v) = queries.read(), keys.read()
        return executor.forward(self._plan(mask), q, k, v, place=mask, dtype=dtype)

    def backward(
        self, queries: Operand, keys: Operand, mask: Mask, scale: float, softcap: float | None = None,
        dtype: DTypeLike = jnp.float32, deterministic: bool = False,
    ) -> Gradients:  # fmt: skip
        """(dq, dk, dv) of this worker's pieces."""
        (q, dout, lse, delta), (k, v) = queries.read(), keys.read()
        return executor.backward(self._plan(mask), q, k, v, dout, lse, delta, place=mask, dtype=dtype)

    def _plan(self, mask: Mask) -> executor.Plan:
        return self.causal if mask.is_causal else self.full
