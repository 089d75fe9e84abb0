"""What is visible: the one description of a mask that all implementations read, and the tiles that it leaves."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

Scalar = Int[Array, ""] | int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mask:
    """The query at position q sees the key at position k where k < k_stop and, if causal, k <= q.

    q_start, k_start: positions of the first query and the first key at hand. k_stop: first position that holds no key.
    These are run-time scalars: one compiled kernel serves the diagonal, a far pair, a padded tail and, with k_stop = 0,
    a worker without a task.
    """

    q_start: Scalar
    k_start: Scalar
    k_stop: Scalar
    is_causal: bool = field(metadata={"static": True})

    def visible(self, rows: Int[Array, " T"], columns: Int[Array, " S"]) -> Bool[Array, "T S"]:
        """Whether query number rows[i] of those at hand sees key number columns[j]."""
        k_position = self.k_start + columns[None, :]
        seen = jnp.broadcast_to(k_position < self.k_stop, (rows.size, columns.size))
        return seen & (k_position <= self.q_start + rows[:, None]) if self.is_causal else seen

    def key_range(self, row: Scalar, num_rows: int, num_keys: int) -> tuple[Scalar, Scalar]:
        """(start, stop) of the keys that any of the queries row .. row + num_rows - 1 can see."""
        stop = self.k_stop
        if self.is_causal:
            stop = jnp.minimum(stop, self.q_start + row + num_rows)
        return 0, jnp.clip(stop - self.k_start, 0, num_keys)

    def query_range(self, column: Scalar, num_rows: int) -> tuple[Scalar, Scalar]:
        """(start, stop) of the queries that can see key number `column` or one after it."""
        k_position = self.k_start + column
        start = jnp.clip(k_position - self.q_start, 0, num_rows) if self.is_causal else 0
        return jnp.where(k_position < self.k_stop, start, num_rows), num_rows
