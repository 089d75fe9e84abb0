"""Combine two partial results of the same queries over disjoint keys, in float32 and in a form that cannot overflow."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.block import Partial


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
