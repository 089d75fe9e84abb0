"""The Llama module by itself: shapes, RoPE, grouped heads, depth, remat, and what a config refuses."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_distflash_attention import make_mesh

from distflash_jax import distflash_attention
from models.config import PRESETS, LlamaConfig
from models.llama import Llama, apply_rope, rope_frequencies, rotation
from models.rope import Llama3RopeScaling

SMALL = LlamaConfig(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)
# Printed by the authors of the models, or by hand from the shapes in the paper.
PARAMETERS = {
    "tiny": 461_440,
    "llama-7b": 6_738_415_616,
    "llama-gqa": 6_738_415_616 - 32 * 2 * 4096 * 24 * 128,
    "llama-33h": 32 * (4 * 4224**2 + 3 * 4224 * 11_008 + 2 * 4224) + 4224 + 2 * 32_000 * 4224,
    "llama-16h": 64 * (4 * 2048**2 + 3 * 2048 * 11_008 + 2 * 2048) + 2048 + 2 * 32_000 * 2048,
    "llama-8h": 128 * (4 * 1024**2 + 3 * 1024 * 11_008 + 2 * 1024) + 1024 + 2 * 32_000 * 1024,
    "llama-4h": 256 * (4 * 512**2 + 3 * 512 * 11_008 + 2 * 512) + 512 + 2 * 32_000 * 512,
    "llama-2h": 512 * (4 * 256**2 + 3 * 256 * 11_008 + 2 * 256) + 256 + 2 * 32_000 * 256,
    "llama-3-8b": 8_030_261_248,
    "qwen3-8b": 8_190_735_360,
    "llama-100m": 12 * (4 * 768**2 + 3 * 768 * 2048 + 2 * 768) + 768 + 32_000 * 768,
}


def causal_attention(q, k, v):
    with jax.numpy_dtype_promotion("standard"):  # for 16-bit inputs
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def keep_everything(layer):
    return layer


def create(config, *, attention=causal_attention, remat=keep_everything, dtype=jnp.float32, seed=0):
    gather = lambda name, weight: weight
    return Llama(config, attention=attention, remat=remat, gather=gather, dtype=dtype, rngs=nnx.Rngs(seed))


def some_tokens(shape, vocab_size=50, seed=0):
    return jax.random.randint(jax.random.key(seed), shape, 0, vocab_size)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_the_published_number_of_parameters(name):
    state = nnx.state(nnx.eval_shape(functools.partial(create, PRESETS[name])))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state)) == PARAMETERS[name]
    assert PRESETS[name].num_parameters == PARAMETERS[name]
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state))


def test_a_tied_head_is_the_embedding_transposed():
    config = dataclasses.replace(SMALL, tie_word_embeddings=True)
    model = create(config)
    np.testing.assert_array_equal(model.head, model.embed_tokens[...].T)
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model))) == config.num_parameters


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_attention_heads": 5}, "num_attention_heads=5 must be a multiple of num_key_value_heads=2"),
        ({"head_dim": 7}, "head_dim=7 must be even"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 must be at least 1"),
        ({"vocab_size": -3}, "vocab_size=-3 must be at least 1"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps=0.0 must be positive"),
        ({"rope_theta": -1.0}, "rope_theta=-1.0 must be positive"),
    ],
)
def test_a_config_names_the_field_that_is_wrong(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"factor": 0.5}, "factor=0.5 must be at least 1"),
        ({"low_freq_factor": 4.0}, "low_freq_factor=4.0 must be positive and less than high_freq_factor=4.0"),
        ({"original_max_position_embeddings": 0}, "original_max_position_embeddings=0 must be at least 1"),
    ],
)
def test_rope_scaling_names_the_field_that_is_wrong(change, message):
    with pytest.raises(ValueError, match=message):
        Llama3RopeScaling(**change)


def llama3_frequency(i, config):
    """One frequency as Hugging Face writes the Llama-3 rule: by wavelength, in three cases."""
    frequency = 1.0 / config.rope_theta ** (2 * i / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return frequency
    wavelength = 2 * math.pi / frequency
    old = scaling.original_max_position_embeddings
    if wavelength < old / scaling.high_freq_factor:
        return frequency
    if wavelength > old / scaling.low_freq_factor:
        return frequency / scaling.factor
    smooth = (old / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


@pytest.mark.parametrize("scaling", [None, Llama3RopeScaling()], ids=["plain", "llama3"])
def test_rope_frequencies_follow_the_published_rule(scaling):
    config = dataclasses.replace(PRESETS["llama-3-8b"], rope_scaling=scaling)
    expected = [llama3_frequency(i, config) for i in range(config.head_dim // 2)]
    np.testing.assert_allclose(rope_frequencies(config), expected, rtol=1e-7)


@pytest.mark.parametrize("scaling", [None, Llama3RopeScaling()], ids=["plain", "llama3"])
def test_rope_turns_half_split_pairs_even_at_far_positions(scaling):
    config = dataclasses.replace(PRESETS["llama-3-8b"], rope_scaling=scaling)
    num_positions, far = 131_072, np.array([0, 1, 500, 4000, 8191, 70_001, 131_071])
    x = jax.random.normal(jax.random.key(0), (1, len(far), 2, config.head_dim))
    cos, sin = jax.jit(rotation, static_argnums=0)(config, jnp.arange(num_positions))
    turned = apply_rope(x, (cos[far], sin[far]))

    frequencies = np.array([llama3_frequency(i, config) for i in range(64)], np.float32)
    angles = (far.astype(np.float32)[:, None] * frequencies).astype(np.float64)
    pairs = np.asarray(x[..., :64]) + 1j * np.asarray(x[..., 64:])
    expected = pairs * np.exp(1j * angles)[None, :, None, :]
    # At 1e5 radians one rounding of the angle is 4e-3: both sides must round where float32 RoPE does.
    np.testing.assert_allclose(turned[..., :64], expected.real, atol=2e-5)
    np.testing.assert_allclose(turned[..., 64:], expected.imag, atol=2e-5)


def test_rope_is_computed_in_float32_for_16_bit_inputs():
    cos_sin = rotation(SMALL, jnp.arange(4096))
    x = jax.random.normal(jax.random.key(0), (1, 4096, 1, SMALL.head_dim)).astype(jnp.bfloat16)
    exact = apply_rope(x.astype(jnp.float32), cos_sin)
    np.testing.assert_array_equal(apply_rope(x, cos_sin), exact.astype(jnp.bfloat16))


def test_packed_documents_are_read_as_each_by_itself():
    attention = functools.partial(distflash_attention, mesh=make_mesh(seq=2))
    model = create(dataclasses.replace(SMALL, sliding_window=6), attention=attention)
    tokens = some_tokens((1, 20))
    ids = jnp.repeat(jnp.array([[1, 2, 3, 0]]), jnp.array([5, 11, 2, 2]), axis=1, total_repeat_length=20)
    together = nnx.jit(lambda model, *batch: model(*batch))(model, tokens, ids)
    for start, stop in ((0, 5), (5, 16), (16, 18)):
        alone = model(jnp.pad(tokens[:, start:stop], ((0, 0), (0, (stop - start) % 2))))
        np.testing.assert_allclose(together[:, start:stop], alone[:, : stop - start], atol=1e-5)


def reference(model, config, tokens):
    """The same network in numpy float64, one loop over layers, keys repeated for each group."""
    state = jax.tree.map(lambda x: np.asarray(x, np.float64), nnx.to_pure_dict(nnx.state(model)))

    def norm(x, scale):
        return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + config.rms_norm_eps) * scale

    def rope(x):
        half = config.head_dim // 2
        frequencies = [llama3_frequency(i, config) for i in range(half)]
        angles = np.arange(x.shape[1])[:, None, None] * np.array(frequencies)
        turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
        return np.concatenate([turned.real, turned.imag], -1)

    x = state["embed_tokens"][np.asarray(tokens)]
    group = config.num_attention_heads // config.num_key_value_heads
    visible = np.tril(np.ones((tokens.shape[1],) * 2, bool))
    for i in range(config.num_hidden_layers):
        layer = {name: value[i] for name, value in state["layers"].items()}
        y = norm(x, layer["input_layernorm"])
        q = rope(np.einsum("btd,dnh->btnh", y, layer["q_proj"]))
        k = np.repeat(rope(np.einsum("btd,dkh->btkh", y, layer["k_proj"])), group, 2)
        v = np.repeat(np.einsum("btd,dkh->btkh", y, layer["v_proj"]), group, 2)
        scores = np.einsum("btnh,bsnh->bnts", q, k) / math.sqrt(config.head_dim)
        weights = np.exp(np.where(visible, scores, -np.inf))
        out = np.einsum("bnts,bsnh->btnh", weights / weights.sum(-1, keepdims=True), v)
        x = x + np.einsum("btnh,nhd->btd", out, layer["o_proj"])
        y = norm(x, layer["post_attention_layernorm"])
        gate = y @ layer["gate_proj"]
        x = x + (gate / (1 + np.exp(-gate)) * (y @ layer["up_proj"])) @ layer["down_proj"]
    return norm(x, state["norm"])


@pytest.mark.parametrize("num_key_value_heads", [1, 2, 4])
def test_hidden_states_equal_a_numpy_llama(num_key_value_heads):
    config = dataclasses.replace(SMALL, num_key_value_heads=num_key_value_heads)
    model, tokens = create(config), some_tokens((2, 11))
    np.testing.assert_allclose(model(tokens), reference(model, config, tokens), atol=2e-5)


def test_keys_and_values_reach_the_attention_without_being_repeated():
    shapes = []

    def recording_attention(q, k, v):
        shapes.append((q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype))
        return q

    model = create(SMALL, attention=recording_attention, dtype=jnp.bfloat16)
    assert model(some_tokens((2, 6))).dtype == jnp.bfloat16
    assert set(shapes) == {((2, 6, 4, 8), (2, 6, 2, 8), (2, 6, 2, 8), *(jnp.bfloat16.dtype,) * 3)}


def test_layers_start_different_from_each_other():
    kernel = create(SMALL).layers.q_proj[...]
    assert not np.array_equal(kernel[0], kernel[1])


def test_the_program_is_as_long_for_many_layers_as_for_few():
    def num_lines(depth):
        config = dataclasses.replace(SMALL, num_hidden_layers=depth)
        graphdef, state = nnx.split(nnx.eval_shape(lambda: create(config)))
        lowered = jax.jit(lambda state, tokens: nnx.merge(graphdef, state)(tokens)).lower(state, some_tokens((1, 6)))
        return lowered.as_text().count("\n")

    assert num_lines(2) == num_lines(7)


def test_remat_changes_no_gradient():
    def gradients(remat):
        graphdef, state = nnx.split(create(SMALL, remat=remat))
        return jax.jit(jax.grad(lambda state: jnp.sum(nnx.merge(graphdef, state)(some_tokens((1, 6))) ** 3)))(state)

    plain, rematerialised = gradients(keep_everything), gradients(jax.checkpoint)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), plain, rematerialised)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_decoding_from_a_cache_gives_the_hidden_states_of_the_whole_row(dtype):
    model, tokens, length = create(SMALL, dtype=dtype), some_tokens((2, 9)), 4
    whole = model(tokens)
    # What lies behind the prompt is overwritten before it is seen.
    hidden, cache = model.prefill(tokens.at[:, length:].set(7))
    rows = [hidden[:, :length]]
    for position in range(length, 9):
        hidden, cache = model.decode(tokens[:, position : position + 1], jnp.int32(position), cache)
        rows.append(hidden)
    assert jax.tree.map(jnp.shape, cache) == ((3, 2, 9, 2, 8),) * 2
    # bfloat16 rounds in another order, float32 hardly.
    np.testing.assert_allclose(jnp.concatenate(rows, axis=1), whole, atol=2e-5 if dtype == jnp.float32 else 0.1)
