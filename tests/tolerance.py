"""The one tolerance of the suite: within twice the error of a plain computation in the same dtype, tensor by tensor."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

FLOOR = {
    "float32": 2e-6,
    "bfloat16": 2e-3,
    "float16": 3e-4,
}  # relative to the largest element of the exact tensor


def max_error(x: Array, exact: np.ndarray) -> float:
    """Largest absolute error; rows where both are -inf count as exact."""
    x, exact = np.asarray(x.astype(jnp.float32), np.float64), np.asarray(exact, np.float64)
    assert x.shape == exact.shape, (x.shape, exact.shape)
    assert np.array_equal(np.isneginf(x), np.isneginf(exact)), "rows that see nothing differ"
    return float(np.max(np.abs(np.where(np.isneginf(exact), 0, x) - np.where(np.isneginf(exact), 0, exact))))


def assert_close(name: str, ours: Array, plain: Array, exact: np.ndarray, dtype: str) -> None:
    """|ours - exact| <= 2 |plain - exact| + floor, where plain is the textbook formula with inputs of `dtype`."""
    scale = float(np.max(np.abs(np.where(np.isneginf(exact), 0, exact))))
    error, allowed = max_error(ours, exact), 2 * max_error(plain, exact) + FLOOR[dtype] * scale
    assert error <= allowed, f"{name}: error {error:.2e} exceeds {allowed:.2e}"
