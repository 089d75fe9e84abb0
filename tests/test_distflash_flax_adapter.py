"""Flax's own multi-head attention modules run on distflash_attention."""

import functools

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_distflash_attention import make_mesh

from distflash_jax import flax_attention
from distflash_jax.masks import WindowMask

x = jax.random.normal(jax.random.key(0), (2, 24, 16))


@flax.nnx.jit(static_argnames="is_causal")
def call(module, x, mask=None, is_causal=False):
    return module(x, mask=mask, is_causal=is_causal)


def nnx_module(**options):
    return flax.nnx.MultiHeadAttention(4, 16, decode=False, rngs=flax.nnx.Rngs(0), **options)


@pytest.mark.parametrize("causal, window", [(True, None), (False, None), (True, 7)])
def test_nnx_module_equals_its_own_attention(causal, window):
    mask = flax.linen.make_causal_mask(x[..., 0]) if causal else None
    if window:
        mask = jnp.triu(mask, 1 - window)
    attention_fn = flax_attention(mesh=make_mesh(seq=4), causal=causal, window=window)
    ours, theirs = call(nnx_module(attention_fn=attention_fn), x), call(nnx_module(), x, mask)
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_nnx_module_may_ask_for_a_causal_mask_itself():
    attention_fn = flax_attention(mesh=make_mesh(seq=2), causal=False)
    ours, theirs = (call(module, x, is_causal=True) for module in (nnx_module(attention_fn=attention_fn), nnx_module()))
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_a_composed_mask_becomes_causal_where_the_module_asks_for_it():
    attention_fn = flax_attention(mesh=make_mesh(seq=2), mask=WindowMask((6, 0)))
    mask = jnp.triu(flax.linen.make_causal_mask(x[..., 0]), -6)
    ours, theirs = call(nnx_module(attention_fn=attention_fn), x, is_causal=True), call(nnx_module(), x, mask)
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_linen_module_equals_its_own_attention():
    attention_fn = flax_attention(mesh=make_mesh(seq=4))
    module = functools.partial(flax.linen.MultiHeadDotProductAttention, num_heads=4)
    variables = module().init(jax.random.key(1), x)
    ours = jax.jit(module(attention_fn=attention_fn).apply)(variables, x)
    theirs = jax.jit(module().apply)(variables, x, mask=flax.linen.make_causal_mask(x[..., 0]))
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize(
    "options, call, name",
    [
        ({}, {"mask": jnp.ones((2, 1, 24, 24), bool)}, "mask"),
        ({"dropout_rate": 0.1}, {"deterministic": False, "rngs": flax.nnx.Rngs(0)}, "dropout_rate"),
        ({"precision": jax.lax.Precision.HIGHEST}, {}, "precision"),
        ({}, {"sow_weights": True}, "module \\(sow_weights\\)"),
    ],
)
def test_what_cannot_be_carried_is_refused_by_name(options, call, name):
    module = nnx_module(attention_fn=flax_attention(mesh=make_mesh(seq=2)), **options)
    with pytest.raises(ValueError, match=f"{name}: distflash_attention cannot carry it"):
        module(x, **call)


def test_a_bias_is_refused_by_name():
    q = jnp.ones((1, 8, 2, 4))
    with pytest.raises(ValueError, match="bias: distflash_attention cannot carry it"):
        flax_attention(mesh=make_mesh(seq=2))(q, q, q, jnp.zeros((1, 2, 8, 8)))


def test_dropout_is_allowed_where_it_is_off():
    module = nnx_module(attention_fn=flax_attention(mesh=make_mesh(seq=2)), dropout_rate=0.1)
    out = flax.nnx.eval_shape(lambda module: module(x, deterministic=True), module)
    assert out.shape == x.shape
