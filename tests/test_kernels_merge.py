"""Merging partial results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.merge import merge


def partial(seed, offset=0.0):
    keys = jax.random.split(jax.random.key(seed))
    return jax.random.normal(keys[0], (1, 5, 2, 4)), jax.random.normal(keys[1], (1, 5, 2)) + offset


@pytest.mark.parametrize("offset", [0.0, 50.0, 1e4, -1e4, 3e38])
def test_merge_equals_float64_whatever_the_gap(offset):
    (out_a, lse_a), (out_b, lse_b) = a, b = partial(0), partial(1, offset)
    out, lse = merge(a, b)
    A, B, la, lb = (np.asarray(x, np.float64) for x in (out_a, out_b, lse_a, lse_b))
    exact = np.logaddexp(la, lb)
    np.testing.assert_allclose(lse, exact, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(out, A * np.exp(la - exact)[..., None] + B * np.exp(lb - exact)[..., None], atol=1e-6)


def test_minus_infinity_is_the_identity():
    a = partial(0)
    nothing = jnp.full_like(a[0], 7.0), jnp.full_like(a[1], -jnp.inf)
    for merged in (merge(a, nothing), merge(nothing, a)):
        for x, y in zip(merged, a, strict=True):
            np.testing.assert_array_equal(x, y)
    out, lse = merge(nothing, nothing)
    assert jnp.all(out == 0) and jnp.all(lse == -jnp.inf)
