"""Inputs, and what attention and its gradients must be: in float64 and, for the tolerance, in the inputs' dtype."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pallas_kernels import dense


class Case(NamedTuple):
    """Shapes of one comparison: batch, lengths of queries and keys, heads of both, head dim."""

    T: int = 43
    N: int = 4
    K: int = 2
    S: int | None = None
    B: int = 2
    H: int = 16
    dtype: str = "float32"
    is_causal: bool = True


class Results(NamedTuple):
    """out and lse; gradients of q, k, v through out alone; gradients through lse alone."""

    out: Array
    lse: Array
    through_out: tuple[Array, Array, Array]
    through_lse: tuple[Array, Array, Array]

    def named(self) -> dict[str, Array]:
        gradients = {
            f"{name} through {path}": x
            for path, group in (("out", self.through_out), ("lse", self.through_lse))
            for name, x in zip(("dq", "dk", "dv"), group, strict=True)
        }
        return {"out": self.out, "lse": self.lse} | gradients


def inputs(case: Case) -> tuple[Array, Array, Array, Array, Array]:
    """Random q, k, v, dout, dlse with a mean and some outliers, as activations have."""
    keys = jax.random.split(jax.random.key(0), 6)
    S = case.S or case.T
    shapes = [(case.B, case.T, case.N, case.H)] + [(case.B, S, case.K, case.H)] * 2 + [(case.B, case.T, case.N, case.H)]
    q, k, v, dout = (jax.random.normal(key, shape) for key, shape in zip(keys[:4], shapes, strict=True))
    k = jnp.where(jax.random.bernoulli(keys[4], 0.01, k.shape), 8 * k, k) + 0.2
    q, k, v, dout = (x.astype(case.dtype) for x in (q, k, v + 0.5, dout))
    return q, k, v, dout, jax.random.normal(keys[5], q.shape[:3])


def results(attention, q, k, v, dout, dlse) -> Results:
    """Everything that is compared, from one compiled function of an attention(q, k, v) -> (out, lse)."""

    @jax.jit
    def run(q, k, v, dout, dlse):
        (out, lse), pull_back = jax.vjp(attention, q, k, v)
        return out, lse, pull_back((dout.astype(out.dtype), dlse.astype(lse.dtype)))

    out, lse, through_out = run(q, k, v, dout, jnp.zeros_like(dlse))
    return Results(out, lse, through_out, run(q, k, v, jnp.zeros_like(dout), dlse)[2])


@functools.cache
def expected(case: Case) -> tuple[dict[str, Array], dict[str, np.ndarray]]:
    """(plain, exact): the textbook formula on inputs of the case's dtype, and in float64."""
    S = case.S or case.T
    visible = jnp.tril(jnp.ones((case.T, S), bool)) if case.is_causal else jnp.ones((case.T, S), bool)
    arrays = inputs(case)

    def textbook(q, k, v):
        """Scores and weights rounded to the dtype of the inputs, as plain code does."""
        k, v = (jnp.repeat(x, case.N // case.K, axis=2) for x in (k, v))
        scores = jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest", preferred_element_type=jnp.float32)
        scores = jnp.where(visible, scores * case.H**-0.5, -jnp.inf)
        lse = jax.nn.logsumexp(scores, axis=-1)
        weights = jnp.exp(scores - lse[..., None]).astype(q.dtype)
        return jnp.einsum("bnts,bsnh->btnh", weights, v, precision="highest"), lse.transpose(0, 2, 1)

    plain = results(textbook, *arrays).named()
    with jax.enable_x64(True):
        exact_inputs = [jnp.asarray(np.asarray(x.astype(jnp.float32)), jnp.float64) for x in arrays]
        oracle = functools.partial(dense.attention, visible=visible, scale=case.H**-0.5)
        exact = {name: np.asarray(x) for name, x in results(oracle, *exact_inputs).named().items()}
    return plain, exact
