"""What is visible: the one description of a mask that all implementations read, and the tiles that it leaves."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Scalar = Int[Array, ""] | int
PADDING_QUERY, PADDING_KEY = float(2**30), float(2**31)  # segments above all others, unlike each other


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mask:
    """The query at position q sees the key at position k where all of these hold:

    - k < k_stop;
    - k <= q, if causal;
    - k > q - window, if there is a window: with causal the query itself and the window - 1 keys before it;
    - segment_ids of both are equal and not 0, if there are segments.

    q_start, k_start: positions of the first query and the first key at hand. k_stop: first position that holds no key.
    These are run-time scalars: one compiled kernel serves the diagonal, a far pair, a padded tail and, with k_stop = 0,
    a worker without a task. segment_ids: of the queries [B, T] and of the keys [B, S] at hand, from 0 to 2**24; tiles
    are skipped where they grow along the sequence, as the numbers of packed documents do.
    """

    q_start: Scalar
    k_start: Scalar
    k_stop: Scalar
    is_causal: bool = field(metadata={"static": True})
    window: int | None = field(default=None, metadata={"static": True})
    segment_ids: tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None

    def __post_init__(self):
        if self.window is not None and self.window < 1:
            raise ValueError(f"window={self.window}: must be at least 1, the query itself, or None")

    @property
    def kind(self) -> str:
        """The costliest thing in it, by which tile sizes are chosen: full, causal, window or segments."""
        if self.segment_ids is not None:
            return "segments"
        if self.window is not None:
            return "window"
        return "causal" if self.is_causal else "full"

    def visible(self, rows: Int[Array, " T"], columns: Int[Array, " S"]) -> Bool[Array, "B T S"]:
        """Whether query number rows[i] of those at hand sees key number columns[j]; B = 1 without segments."""
        q, k = self.q_start + rows[:, None], self.k_start + columns[None, :]
        seen = jnp.broadcast_to(k < self.k_stop, (rows.size, columns.size))
        if self.is_causal:
            seen &= k <= q
        if self.window is not None:
            seen &= k > q - self.window
        if self.segment_ids is None:
            return seen[None]
        q_ids, k_ids = (ids[:, x, None] for ids, x in zip(self.segment_ids, (rows, columns), strict=True))
        return seen & (q_ids == k_ids.mT) & (q_ids != 0)

    def key_tiles(self, T: int, rows_per_tile: int, S: int, keys_per_tile: int) -> Int[Array, "B tiles 4"]:
        """(start, full_start, full_stop, stop) for each tile of queries; B = 1 without segments.

        Tiles of keys outside start .. stop - 1 are hidden from all of its queries, those in full_start .. full_stop - 1
        are visible to all.
        """
        first = jnp.arange(-(-T // rows_per_tile)) * rows_per_tile + self.q_start
        last = jnp.minimum(first + rows_per_tile, self.q_start + T) - 1
        start, full_start, full_stop, stop = (jnp.full(first.shape, x) for x in (0, 0, S, S))
        if self.is_causal:
            full_stop, stop = first + 1 - self.k_start, last + 1 - self.k_start
        if self.window is not None:
            start, full_start = (x - self.window + 1 - self.k_start for x in (first, last))
        num_keys = jnp.clip(self.k_stop - self.k_start, 0, S)
        edges = [jnp.clip(x, 0, num_keys) for x in (start, full_start, full_stop, stop)]
        return _tiles(edges, keys_per_tile, self._overlaps(rows_per_tile, keys_per_tile))

    def query_tiles(self, T: int, rows_per_tile: int, S: int, keys_per_tile: int) -> Int[Array, "B tiles 4"]:
        """(start, full_start, full_stop, stop) for each tile of keys; B = 1 without segments.

        Tiles of queries outside start .. stop - 1 see none of its keys, those in full_start .. full_stop - 1 see all.
        """
        first = jnp.arange(-(-S // keys_per_tile)) * keys_per_tile + self.k_start
        last = first + keys_per_tile - 1
        end = jnp.minimum(self.k_stop, self.k_start + S)  # of the keys at hand
        start, full_start, full_stop, stop = (jnp.full(first.shape, x) for x in (0, 0, T, T))
        if self.is_causal:
            start, full_start = first - self.q_start, last - self.q_start
        if self.window is not None:
            full_stop, stop = (x + self.window - self.q_start for x in (first, jnp.minimum(last, end - 1)))
        full_start = jnp.where(last < end, full_start, T)
        stop = jnp.where(first < end, stop, 0)
        edges = [jnp.clip(x, 0, T) for x in (start, full_start, full_stop, stop)]
        overlaps = self._overlaps(rows_per_tile, keys_per_tile)
        if overlaps is not None:
            overlaps = overlaps[0].mT, overlaps[1].mT
        # Rows behind the last one count for nothing: a tile that is cut there is a whole one.
        edges[2] = jnp.where(edges[2] == T, T + -T % rows_per_tile, edges[2])
        return _tiles(edges, rows_per_tile, overlaps)

    def tile_segments(
        self, rows_per_tile: int, keys_per_tile: int
    ) -> tuple[Float[Array, "B tiles rows"], Float[Array, "B tiles keys"]]:
        """Segments of the queries and of the keys in whole tiles; those that see and are seen by nothing are unlike."""
        assert self.segment_ids is not None

        def tiles(ids: Int[Array, "B T"], size: int, padding: float) -> Float[Array, "B tiles size"]:
            ids = jnp.pad(ids, ((0, 0), (0, -ids.shape[1] % size)))
            return jnp.where(ids == 0, padding, ids.astype(jnp.float32)).reshape(ids.shape[0], -1, size)

        q_ids, k_ids = self.segment_ids
        return tiles(q_ids, rows_per_tile, PADDING_QUERY), tiles(k_ids, keys_per_tile, PADDING_KEY)

    def _overlaps(
        self, rows_per_tile: int, keys_per_tile: int
    ) -> tuple[Bool[Array, "B q_tiles k_tiles"], Bool[Array, "B q_tiles k_tiles"]] | None:
        """(whether the segments of two tiles may meet, whether both lie in one and the same); None without segments."""
        if self.segment_ids is None:
            return None
        q_tiles, k_tiles = self.tile_segments(rows_per_tile, keys_per_tile)
        (q_min, q_max), (k_min, k_max) = ((x.min(axis=2), x.max(axis=2)) for x in (q_tiles, k_tiles))
        q_min, q_max, k_min, k_max = q_min[:, :, None], q_max[:, :, None], k_min[:, None], k_max[:, None]
        return (q_min <= k_max) & (k_min <= q_max), (q_min == q_max) & (k_min == k_max) & (q_min == k_min)


def _tiles(
    edges: list[Int[Array, " tiles"]],
    size: int,
    overlaps: tuple[Bool[Array, "B tiles others"], Bool[Array, "B tiles others"]] | None,
) -> Int[Array, "B tiles 4"]:
    """The edges, in elements, as numbers of tiles of `size`, narrowed to the tiles that overlap."""
    start, full_start, full_stop, stop = (x[None] for x in edges)
    start, full_start, full_stop, stop = start // size, -(-full_start // size), full_stop // size, -(-stop // size)
    if overlaps is not None:
        (meet_start, meet_stop, _), (same_start, same_stop, is_whole) = map(_span, overlaps)
        start, stop = jnp.maximum(start, meet_start), jnp.minimum(stop, meet_stop)
        full_start = jnp.maximum(full_start, same_start)
        full_stop = jnp.where(is_whole, jnp.minimum(full_stop, same_stop), 0)
    stop = jnp.maximum(stop, start)
    full_start = jnp.clip(full_start, start, stop)
    return jnp.stack([start, full_start, jnp.clip(full_stop, full_start, stop), stop], axis=-1).astype(jnp.int32)


def _span(flags: Bool[Array, "B tiles others"]) -> tuple[Int[Array, "B tiles"], ...]:
    """(first, behind the last, whether all between are) of the true ones in each row; an empty span is 0 .. 0."""
    number = jnp.arange(flags.shape[-1])
    stop = jnp.where(flags, number + 1, 0).max(axis=-1)
    start = jnp.where(flags, number, flags.shape[-1]).min(axis=-1)
    return jnp.minimum(start, stop), stop, flags.sum(axis=-1) == stop - start
