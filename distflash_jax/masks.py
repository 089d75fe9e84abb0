"""What attention may see: the one description that checks, strategies and the dense oracle read, and masks composed.

    (CausalMask() | PrefixMask(lengths)) & SegmentMask(ids)
    CausalMask() & (WindowMask(4096) | GlobalMask(16)) & SegmentMask(ids)

Block kernels know causal bands, windows and documents. What is more than that is a union of passes of such masks that
have no pair of a query and a key in common: their results are merged, and their gradients add up.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from distflash_jax import schedule
from pallas_kernels.masks import Mask, Scalar

Window = int | tuple[int | None, int | None]
INTEGERS = (int, np.integer)


class Segments(NamedTuple):
    """Of each token of the whole sequence, padding included, the number of its document; 0 sees and is seen by nothing.

    Every worker has all of them: they are small, and so nobody has to send them.
    """

    q: Int[Array, "B PT"]
    kv: Int[Array, "B PS"]


@dataclass(frozen=True)
class Band:
    """The query at position q sees the keys k < stop with k > q + shift - window and, if causal, k <= q + shift."""

    stop: int
    is_causal: bool
    window: int | None = None
    shift: int = 0

    def pairs(self, num_workers: int, rows: int, keys: int) -> frozenset[tuple[int, int]]:
        """The pairs of a chunk of so many queries and one of so many keys in which something is visible."""
        first = None if self.window is None else self.shift - self.window + 1
        last = self.shift if self.is_causal else None
        return schedule.visible_pairs(num_workers, rows, keys, first=first, last=last, stop=self.stop)

    def mask(
        self, q_start: Scalar, k_start: Scalar, ids: tuple[Array, Array] | None, *, is_active: Array | bool = True
    ) -> Mask:
        """That of a block kernel, for queries and keys from these positions on; nothing is visible unless is_active."""
        stop = jnp.where(is_active, self.stop, 0) + 0 * k_start  # varies over the workers as k_start does
        return Mask(q_start + self.shift, k_start, stop, self.is_causal, self.window, ids)


class Pass(NamedTuple):
    """A part of a mask that kernels can compute. of: "all", or the first keys or queries alone, so many."""

    band: Band
    segments: Segments | None
    of: Literal["all", "keys", "queries"] = "all"
    count: int = 0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionMask:
    """visible = (causal | prefix) & (window | global) & segments, each of which is everything where it is not given.

    Made by CausalMask, WindowMask, GlobalMask, PrefixMask and SegmentMask, with & and |; the keyword arguments of
    distflash_attention make the same. Fields are those arguments, but for window: (left, right), None without.
    """

    is_causal: bool = field(default=False, metadata={"static": True})
    window: tuple[int | None, int | None] | None = field(default=None, metadata={"static": True})
    global_tokens: int | None = field(default=None, metadata={"static": True})
    q_offset: int | None = field(default=None, metadata={"static": True})
    prefix_lengths: Int[Array, " B"] | None = None
    segment_ids: Int[Array, "B T"] | None = None
    kv_segment_ids: Int[Array, "B S"] | None = None

    @property
    def given(self) -> tuple[str, ...]:
        """The names of what it consists of."""
        return tuple(name for name, value in vars(self).items() if value is not None and value is not False)

    @property
    def segments(self) -> Segments | None:
        if self.segment_ids is None:
            return None
        return Segments(self.segment_ids, self.segment_ids if self.kv_segment_ids is None else self.kv_segment_ids)

    def map_ids(self, function: Callable[[Array], Array]) -> "AttentionMask":
        """The mask with what a function makes of its segment ids."""
        ids = {name: getattr(self, name) for name in ("segment_ids", "kv_segment_ids")}
        return replace(self, **{name: function(x) for name, x in ids.items() if x is not None})

    def __and__(self, other: "AttentionMask") -> "AttentionMask":
        """Both masks at once."""
        for mask in (self, other):
            for name, widened in WIDENED.items():
                if name in mask.given and widened not in mask.given:
                    raise ValueError(f"{NAMES[name]}: must widen a mask first, {NAMES[widened]} | {NAMES[name]}")
        return self._with(other)

    def __or__(self, other: "AttentionMask") -> "AttentionMask":
        """Either mask: WindowMask | GlobalMask, or CausalMask | PrefixMask."""
        pair = {name for name in self.given + other.given if name != "q_offset"}
        if pair not in [{name, widened} for name, widened in WIDENED.items()]:
            allowed = ", ".join(f"{NAMES[widened]} | {NAMES[name]}" for name, widened in WIDENED.items())
            raise ValueError(f"|: must be one of {allowed}, got {', '.join(sorted(pair))}")
        return self._with(other)

    def _with(self, other: "AttentionMask") -> "AttentionMask":
        for name in set(self.given) & set(other.given):
            if name != "q_offset" or self.q_offset != other.q_offset:
                raise ValueError(f"{NAMES[name]}: must not be given twice")
        return replace(self, **{name: getattr(other, name) for name in other.given})

    def visible(self, T: int, S: int) -> Bool[Array, "B T S"]:
        """The mask as an array, for small sequences; B = 1 where it is the same for all rows."""
        q, k = jnp.arange(T)[:, None] + (self.q_offset or 0), jnp.arange(S)
        seen = jnp.ones((1, T, S), bool)
        if self.is_causal:
            seen &= k <= q
            if self.prefix_lengths is not None:
                seen |= k < self.prefix_lengths[:, None, None]
        if self.window is not None:
            left, right = self.window
            is_near = (left is None or k >= q - left) & (right is None or k <= q + right)
            seen &= is_near if self.global_tokens is None else is_near | (jnp.minimum(q, k) < self.global_tokens)
        if self.segments is not None:
            q_ids, k_ids = self.segments.q[:, :, None], self.segments.kv[:, None]
            seen &= (q_ids == k_ids) & (q_ids != 0)
        return seen

    def passes(self, num_keys: int, num_positions: int) -> list[Pass]:
        """What the kernels compute one after the other; positions: those of a sequence with its padding."""
        left, right = self.window or (None, None)
        right, offset = 0 if self.is_causal else right, self.q_offset or 0
        window = None if left is None else left + (right or 0) + 1
        passes = [Pass(Band(num_keys, right is not None, window, offset + (right or 0)), self.segments)]
        if self.prefix_lengths is not None:
            # The keys behind each query that lie in the prefix, whose queries alone have some.
            passes.append(Pass(Band(num_keys, False, 1, 1), self._of_prefix(self.prefix_lengths, num_positions)))
        count = min(self.global_tokens or 0, num_keys)
        if count and left is not None:
            passes.append(Pass(Band(count, True, None, -left - 1), self.segments, "keys", count))
        if count and right is not None and not self.is_causal:
            passes.append(Pass(Band(num_keys, False, 1, right + 1), self.segments, "queries", count))
        return passes

    def _of_prefix(self, lengths: Int[Array, " B"], num_positions: int) -> Segments:
        """The documents, one without segments, of which only the prefix is left."""
        is_inside = jnp.arange(num_positions) < lengths[:, None]
        ids = self.segments or (jnp.int32(1), jnp.int32(1))
        return Segments(*(jnp.where(is_inside, x, 0) for x in ids))


# What an alternative widens, and how each part of a mask is made.
WIDENED = {"global_tokens": "window", "prefix_lengths": "is_causal"}
NAMES = {
    "is_causal": "CausalMask",
    "window": "WindowMask",
    "global_tokens": "GlobalMask",
    "prefix_lengths": "PrefixMask",
    "segment_ids": "SegmentMask",
    "kv_segment_ids": "SegmentMask",
    "q_offset": "q_offset",
}


def CausalMask(*, q_offset: int | None = None) -> AttentionMask:
    """Each token sees itself and those before it. q_offset: see distflash_attention."""
    return AttentionMask(is_causal=True, q_offset=q_offset)


def WindowMask(window: Window, *, q_offset: int | None = None) -> AttentionMask:
    """Each token sees itself and the window - 1 before it; or, (left, right), so many before and behind it."""
    return AttentionMask(window=sides_of(window), q_offset=q_offset)


def GlobalMask(count: int) -> AttentionMask:
    """The first so many tokens see all and are seen by all: widens a WindowMask, by |."""
    return AttentionMask(global_tokens=count)


def PrefixMask(lengths: Int[Array, " B"]) -> AttentionMask:
    """The first so many tokens of a row are seen by all: widens a CausalMask, by |."""
    return AttentionMask(prefix_lengths=lengths)


def SegmentMask(ids: Int[Array, "B T"], kv_ids: Int[Array, "B S"] | None = None) -> AttentionMask:
    """Tokens see those of their own document; see segment_ids of distflash_attention."""
    return AttentionMask(segment_ids=ids, kv_segment_ids=kv_ids)


def sides_of(window: Window) -> tuple[int | None, int | None]:
    """A window as (left, right).

    Raises:
        ValueError: it is none.
    """
    is_side = lambda x: x is None or (isinstance(x, INTEGERS) and x >= 0)
    sides = window if isinstance(window, tuple) else (window - 1 if isinstance(window, INTEGERS) else -1, 0)
    if len(sides) != 2 or not all(map(is_side, sides)):
        allowed = "a number of tokens, at least 1 for the token itself, or (left, right), each at least 0 or None"
        raise ValueError(f"window={window!r}: must be {allowed}")
    return sides
