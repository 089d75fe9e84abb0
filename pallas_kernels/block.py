"""The contract between the distributed executor and a kernel: one query chunk against one key/value chunk."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from pallas_kernels.masks import Mask


class Box(NamedTuple):
    """Rows `row` .. `row + num_rows - 1` of heads `head` .. `head + num_heads - 1` of a chunk [B, T, N, ...]."""

    row: int
    num_rows: int
    head: int
    num_heads: int

    def take(self, chunk: Array) -> Array:
        """The box of a chunk; rows past its end are zeros, which add nothing to any gradient."""
        rows = lax.slice_in_dim(chunk, self.row, min(self.row + self.num_rows, chunk.shape[1]), axis=1)
        heads = lax.slice_in_dim(rows, self.head, self.head + self.num_heads, axis=2)
        padding = [(0, 0)] * chunk.ndim
        padding[1] = (0, self.num_rows - rows.shape[1])
        return jnp.pad(heads, padding)

    def put(self, chunk: Array, update: Array) -> Array:
        """The chunk with its box replaced by `update`; rows of `update` past the chunk's end are dropped."""
        num_rows = min(self.num_rows, chunk.shape[1] - self.row)
        return lax.dynamic_update_slice(chunk, update[:, :num_rows], (0, self.row, self.head) + (0,) * (chunk.ndim - 3))


class Operand(NamedTuple):
    """One side of a task: arrays that lie here, or that a peer sent. A kernel chooses when it runs, without a copy.

    own: chunks of which the task takes `box`. peer: arrays that are already boxes, None where no worker fetches.
    is_peer: which of the two this worker reads.
    """

    own: tuple[Array, ...]
    box: Box
    peer: tuple[Array, ...] | None
    is_peer: Bool[Array, ""]

    def read(self) -> tuple[Array, ...]:
        """The arrays themselves, selected outside of any kernel: for implementations in plain jnp."""
        own = tuple(map(self.box.take, self.own))
        if self.peer is None:
            return own
        return tuple(jnp.where(self.is_peer, theirs, ours) for theirs, ours in zip(self.peer, own, strict=True))

    def aligned(self, multiple: int) -> "Operand":
        """The operand with lengths and first row in multiples of `multiple`; a copy only where they are not.

        Rows that the box gains are foreign rows or zeros: the caller has to mask them or to drop their results.
        """
        own, box = self.own, self.box
        if box.row % multiple:
            own, box = tuple(map(box.take, own)), box._replace(row=0, head=0)
        box = box._replace(num_rows=box.num_rows + -box.num_rows % multiple)

        def pad(x: Array) -> Array:
            num_missing = -x.shape[1] % multiple
            return jnp.pad(x, [(0, 0), (0, num_missing)] + [(0, 0)] * (x.ndim - 2)) if num_missing else x

        peer = None if self.peer is None else tuple(map(pad, self.peer))
        return Operand(tuple(map(pad, own)), box, peer, self.is_peer)

    def with_head_dim(self, head_dim: int) -> "Operand":
        """The operand with zeros behind each head, a copy; lse, delta and scores do not change by them."""

        def pad(x: Array) -> Array:
            return jnp.pad(x, [(0, 0)] * 3 + [(0, head_dim - x.shape[3])]) if x.ndim == 4 else x

        peer = None if self.peer is None else tuple(map(pad, self.peer))
        return self._replace(own=tuple(map(pad, self.own)), peer=peer)


def check_softcap(softcap: float | None) -> None:
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap={softcap}: must be positive or None")


def vary_like(x: Array, like: Array) -> Array:
    """x, typed as varying over the mesh axes that `like` varies over: a kernel's results come out of it untyped."""
    missing = jax.typeof(like).manual_axis_type.varying - jax.typeof(x).manual_axis_type.varying
    return lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x


Partial = tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]
Gradients = tuple[Float[Array, "B T N H"], Float[Array, "B S K H"], Float[Array, "B S K H"]]


class Forward(Protocol):
    def __call__(
        self,
        queries: Operand,
        keys: Operand,
        mask: Mask,
        scale: float,
        softcap: float | None = ...,
        dtype: DTypeLike = ...,
    ) -> Partial: ...


class Backward(Protocol):
    def __call__(
        self,
        queries: Operand,
        keys: Operand,
        mask: Mask,
        scale: float,
        softcap: float | None = ...,
        dtype: DTypeLike = ...,
        deterministic: bool = ...,
    ) -> Gradients: ...


@dataclass(frozen=True)
class BlockAttention:
    """An implementation of attention between one query chunk and one key/value chunk.

    softcap is None, or a bound: scores s become softcap * tanh(s / softcap). dtype is float32 if not given.

    forward(queries, keys, mask, scale, softcap, dtype) -> (out, lse): queries holds (q,), keys (k, v);
    softmax(scale * q k^T) v over the visible keys, in `dtype`, and its log-sum-exp (natural logarithm), float32. A row
    that sees nothing gives 0 and -inf.

    backward(queries, keys, mask, scale, softcap, dtype, deterministic) -> (dq, dk, dv): queries holds
    (q, dout, lse, delta) with the lse and delta of the whole row, not of this block's keys, so that the gradients of
    all blocks add up; summed in float32, returned in `dtype`. dk and dv are summed over the query heads of their group.
    With `deterministic` all bits repeat from call to call, at a cost where sums have no fixed order otherwise.
    """

    forward: Forward
    backward: Backward
