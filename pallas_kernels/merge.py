"""Combine two partial results of the same queries over disjoint keys, in float32 and in a form that cannot overflow."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels.block import Partial

Arrays = tuple[Array, ...]
# The matrix units cut off what does not fit in a sum: at most so many keys are added up by them, in whole tiles.
MAX_KEYS = 128 * 1024


def parts(num_keys: int, tile: int) -> list[tuple[int, int]]:
    """(first, behind) of the tiles, of so many keys each, that a call of a kernel adds up."""
    num_tiles, span = -(-num_keys // tile), -(-MAX_KEYS // tile)
    return [(first, min(first + span, num_tiles)) for first in range(0, num_tiles, span)]


def merge(a: Partial, b: Partial) -> Partial:
    """(out, lse) over the union of the keys of a and b: lse = log(e^lse_a + e^lse_b), out weighted by e^(lse_x - lse).

    lse = -inf stands for "saw no key" and is the identity; where both are -inf, out is 0.
    """
    (out_a, lse_a), (out_b, lse_b) = a, b
    top = jnp.maximum(lse_a, lse_b)
    top = jnp.where(top == -jnp.inf, 0.0, top)
    weight_a, weight_b = jnp.exp(lse_a - top), jnp.exp(lse_b - top)
    total = weight_a + weight_b  # in [1, 2], or 0 where neither saw a key
    share: Float[Array, "B T N"] = 1 / jnp.where(total == 0, 1.0, total)
    out = out_a * (weight_a * share)[..., None] + out_b * (weight_b * share)[..., None]
    return out, top + jnp.log(total)


def merge_valid(total: Arrays | None, partial: Arrays, is_valid: Bool[Array, ""] | None) -> Arrays:
    """(out, lse) of `total` with a partial result of the same rows merged in, if valid; None: always."""
    out, lse = partial
    # A worker that receives nothing gets zeros, and 0 is a legal lse: only -inf says that no key was seen.
    partial = out, lse if is_valid is None else jnp.where(is_valid, lse, -jnp.inf)
    return partial if total is None else merge((total[0], total[1]), partial)


def add_valid(total: Arrays | None, partial: Arrays, is_valid: Bool[Array, ""] | None) -> Arrays:
    """`total` with partial sums added, if valid; None: always."""
    partial = partial if is_valid is None else tuple(jnp.where(is_valid, x, 0.0) for x in partial)
    return partial if total is None else tuple(x + y for x, y in zip(total, partial, strict=True))
