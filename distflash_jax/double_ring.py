"""A table over the nodes around tables over the workers of each: a chunk crosses the network once for a whole node.

Each worker has a piece of its node's chunk. Between nodes every worker sends its own piece, and a task of two chunks is
a table of its pieces, within the node, in place of a kernel: each of its steps hides a part of what travels between
nodes meanwhile.

Source: the topology-aware ring of BurstAttention, arXiv 2403.09347, and BurstEngine, arXiv 2509.19836.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp
from jax.typing import DTypeLike

from distflash_jax import executor
from distflash_jax.masks import Segments
from pallas_kernels.block import Gradients, Operand, Partial
from pallas_kernels.masks import Mask


@dataclass(frozen=True)
class WithinNode:
    """A kernel, as BlockAttention, for chunks of which the workers of an axis have pieces; hashable.

    own: the table of the queries and the keys of one node; others: of the queries and the keys of two. A mask has the
    positions of this worker's pieces, and segment ids of the whole chunks.
    """

    own: executor.Plan
    others: executor.Plan

    def forward(
        self, queries: Operand, keys: Operand, mask: Mask, scale: float, softcap: float | None = None,
        dtype: DTypeLike = jnp.float32, alongside: Sequence[executor.Passing] = (),
    ) -> Partial:  # fmt: skip
        """(out, lse) of this worker's piece of the queries."""
        (q,), (k, v) = queries.read(), keys.read()
        return self._plan(queries, keys, dtype).forward(q, k, v, _segments(mask), mask, alongside)

    def backward(
        self, queries: Operand, keys: Operand, mask: Mask, scale: float, softcap: float | None = None,
        dtype: DTypeLike = jnp.float32, deterministic: bool = False, alongside: Sequence[executor.Passing] = (),
    ) -> Gradients:  # fmt: skip
        """(dq, dk, dv) of this worker's pieces."""
        (q, dout, lse, delta), (k, v) = queries.read(), keys.read()
        plan = self._plan(queries, keys, dtype)
        return plan.backward(q, k, v, dout, lse, delta, _segments(mask), mask, alongside)

    def _plan(self, queries: Operand, keys: Operand, dtype: DTypeLike) -> executor.Plan:
        """That of a step between nodes, in which either all nodes have their own chunks or some fetch one."""
        is_own = queries.peer is None and keys.peer is None
        return replace(self.own if is_own else self.others, dtype=jnp.dtype(dtype).name)


def _segments(mask: Mask) -> Segments | None:
    return mask.segment_ids and Segments(*mask.segment_ids)
