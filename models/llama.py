"""Llama as a Flax NNX module that is given its attention function; layers are stacked and scanned.

`prefill` and `decode` run the same layers with a cache of keys and values, token after token.

Parameters are float32 and carry Hugging Face's names, with kernels as [in, out] and heads as a dimension of
their own. Arrays are global: how they lie on a mesh is decided by whoever calls.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int

from models.config import LlamaConfig

Attention = Callable[..., Float[Array, "B T N H"]]
Remat = Callable[[Callable], Callable]
Cache = tuple[Float[Array, "L B T K H"], Float[Array, "L B T K H"]]
Gather = Callable[[str, Array], Array]
# Of what attention reads, and of the input of the MLP: a remat policy may keep them.
PROJECTION_NAME = "projection"
Rotation = tuple[Float32[Array, "... T half"], Float32[Array, "... T half"]]


def project_in(x: Float[Array, "B T D"], weights: Sequence[Float[Array, "D ..."]]) -> tuple[Array, ...]:
    """x @ weight of each, whose outputs may have several dimensions, [B T ...]."""
    return tuple(jnp.einsum("btd,d...->bt...", x, weight.astype(x.dtype)) for weight in weights)


def project_out(x: Float[Array, "B T ..."], weight: Float[Array, "... D"]) -> Float[Array, "B T D"]:
    """x @ weight over all dimensions of a token."""
    return jnp.tensordot(x, weight.astype(x.dtype), axes=weight.ndim - 1)


class Projections(NamedTuple):
    """How a block, attention or MLP, begins and ends: where a mesh has activations lie differently inside."""

    into: Callable[[Array, Sequence[Array]], tuple[Array, ...]] = project_in
    out_of: Callable[[Array, Array], Array] = project_out


PLAIN = Projections()


def rms_norm(x: Float[Array, "... D"], scale: Float32[Array, " D"], *, eps: float) -> Float[Array, "... D"]:
    """x / sqrt(mean(x^2) + eps) * scale over the last dim, in float32, rounded once to the dtype of x."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (normed * scale).astype(x.dtype)


def rope_frequencies(config: LlamaConfig) -> np.ndarray:
    """Radians per position, float32 [head_dim / 2]: theta^(-2i / head_dim), slowed down by `rope_scaling`."""
    frequencies = config.rope_theta ** (-np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim)
    if config.rope_scaling is not None:
        frequencies = config.rope_scaling.slowed(frequencies, theta=config.rope_theta)
    return frequencies.astype(np.float32)


def rotation(config: LlamaConfig, positions: Int[Array, "... T"]) -> Rotation:
    """Cosine and sine of the angles of these positions, times the magnitude of `rope_scaling`."""
    angles = positions.astype(jnp.float32)[..., None] * rope_frequencies(config)
    magnitude = 1.0 if config.rope_scaling is None else config.rope_scaling.magnitude
    return magnitude * jnp.cos(angles), magnitude * jnp.sin(angles)


def positions_in(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """The position of each token in its document; documents lie one after the other."""
    number = jnp.broadcast_to(jnp.arange(segment_ids.shape[1], dtype=jnp.int32), segment_ids.shape)
    before = jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    return number - jax.lax.cummax(jnp.where(segment_ids == before, 0, number), axis=1)


def apply_rope(x: Float[Array, "B T heads H"], cos_sin: Rotation) -> Float[Array, "B T heads H"]:
    """Turns the pairs (x[i], x[i + H/2]) by their position's angles, in float32; Hugging Face pairs alike."""
    cos, sin = (table[..., None, :] for table in cos_sin)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def _weight(rngs: nnx.Rngs, shape: tuple[int, ...], std: float) -> nnx.Param:
    return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32))


class Layer(nnx.Module):
    """One decoder layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        width, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        head_dim, mlp_width = config.head_dim, config.intermediate_size
        # Both branches end in a projection whose scale keeps the residual stream's variance flat in depth.
        depth = math.sqrt(2 * config.num_hidden_layers)
        self.config = config
        self.input_layernorm = nnx.Param(jnp.ones(width))
        self.q_proj = _weight(rngs, (width, heads, head_dim), width**-0.5)
        self.k_proj = _weight(rngs, (width, kv_heads, head_dim), width**-0.5)
        self.v_proj = _weight(rngs, (width, kv_heads, head_dim), width**-0.5)
        self.o_proj = _weight(rngs, (heads, head_dim, width), (heads * head_dim) ** -0.5 / depth)
        if config.qkv_bias:
            self.q_bias = nnx.Param(jnp.zeros((heads, head_dim)))
            self.k_bias = nnx.Param(jnp.zeros((kv_heads, head_dim)))
            self.v_bias = nnx.Param(jnp.zeros((kv_heads, head_dim)))
        if config.qk_norm:
            self.q_norm = nnx.Param(jnp.ones(head_dim))
            self.k_norm = nnx.Param(jnp.ones(head_dim))
        self.post_attention_layernorm = nnx.Param(jnp.ones(width))
        self.gate_proj = _weight(rngs, (width, mlp_width), width**-0.5)
        self.up_proj = _weight(rngs, (width, mlp_width), width**-0.5)
        self.down_proj = _weight(rngs, (mlp_width, width), mlp_width**-0.5 / depth)

    def __call__[Kept](
        self,
        x: Float[Array, "B T D"],
        cos_sin: Rotation,
        attend: Callable[[Array, Array, Array], tuple[Array, Kept]],
        projections: Projections = PLAIN,
    ) -> tuple[Float[Array, "B T D"], Kept]:
        """(output, kept), where attend(q, k, v), with the rotated q and k, returns the attention and what is kept."""
        eps = self.config.rms_norm_eps
        with jax.named_scope("qkv"):
            normed = rms_norm(x, self.input_layernorm[...], eps=eps)
            q, k, v = projections.into(normed, (self.q_proj[...], self.k_proj[...], self.v_proj[...]))
            if self.config.qkv_bias:
                q = q + self.q_bias[...].astype(q.dtype)
                k = k + self.k_bias[...].astype(k.dtype)
                v = v + self.v_bias[...].astype(v.dtype)
            if self.config.qk_norm:
                q = rms_norm(q, self.q_norm[...], eps=eps)
                k = rms_norm(k, self.k_norm[...], eps=eps)
        with jax.named_scope("rope"):
            q, k = apply_rope(q, cos_sin), apply_rope(k, cos_sin)
            q, k, v = (checkpoint_name(x, PROJECTION_NAME) for x in (q, k, v))
        with jax.named_scope("attention"):
            out, kept = attend(q, k, v)
        with jax.named_scope("attention_out"):
            x = checkpoint_name(x + projections.out_of(out, self.o_proj[...]), PROJECTION_NAME)
        with jax.named_scope("mlp"):
            normed = rms_norm(x, self.post_attention_layernorm[...], eps=eps)
            gate, up = projections.into(normed, (self.gate_proj[...], self.up_proj[...]))
            return x + projections.out_of(jax.nn.silu(gate) * up, self.down_proj[...]), kept


class Llama(nnx.Module):
    """Tokens to final hidden states; the head is left to the loss, which never holds all logits at once.

    Args:
        attention: (q [B T N H], k [B T K H], v [B T K H]) -> out [B T N H], causal; with window= and segment_ids=
            [B T] where the model and its input have them, as distflash_attention takes them.
        remat: transforms the function of one layer, such as `functools.partial(jax.checkpoint, policy=...)`;
            `lambda layer: layer` keeps everything.
        gather: (name, weight of one layer, or of none) -> the weight as it is used, where and when it is used;
            `lambda name, weight: weight` where each device has all of them.
        projections: those of every layer while whole rows are read.
        dtype: of activations and matrix products; parameters stay float32.
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        attention: Attention,
        remat: Remat,
        gather: Gather,
        projections: Projections = PLAIN,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        @nnx.split_rngs(splits=config.num_hidden_layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stack(layer_rngs: nnx.Rngs) -> Layer:
            return Layer(config, rngs=layer_rngs)

        self.config = config
        self.attention = attention
        self.remat = remat
        self.gather = gather
        self.projections = projections
        self.dtype = dtype
        self.embed_tokens = _weight(rngs, (config.vocab_size, config.hidden_size), 0.02)
        self.layers = stack(rngs)
        self.norm = nnx.Param(jnp.ones(config.hidden_size))
        if not config.tie_word_embeddings:
            self.lm_head = _weight(rngs, (config.hidden_size, config.vocab_size), 0.02)

    @property
    def head(self) -> Float32[Array, "D V"]:
        """The matrix that turns hidden states into logits: the embedding transposed where they are tied."""
        return self.embed_tokens[...].T if self.config.tie_word_embeddings else self.lm_head[...]

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "... T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Hidden states after the final norm.

        segment_ids: the number of each token's document, growing from 1, and 0 for padding; tokens then see their own
        document alone, in which positions begin anew.
        positions: of the tokens, where these do not lie in their order.
        """
        options: dict[str, Any] = self._window
        if segment_ids is not None:
            options = options | {"segment_ids": segment_ids}
        if positions is None:
            whole = jnp.arange(tokens.shape[1], dtype=jnp.int32)
            positions = whole if segment_ids is None else positions_in(segment_ids)
        return self._read(tokens, positions, lambda q, k, v: (self.attention(q, k, v, **options), None))[0]

    def prefill(self, tokens: Int[Array, "B T"]) -> tuple[Float[Array, "B T D"], Cache]:
        """(hidden states, keys and values of every layer), with which `decode` goes on at any position below T."""
        positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        return self._read(tokens, positions, lambda q, k, v: (self.attention(q, k, v, **self._window), (k, v)))

    @property
    def _window(self) -> dict[str, Any]:
        window = self.config.sliding_window
        return {} if window is None else {"window": window}

    def decode(
        self, tokens: Int[Array, "B 1"], position: Int[Array, ""], cache: Cache
    ) -> tuple[Float[Array, "B 1 D"], Cache]:
        """(hidden states, cache with this token) of one token a row, which sees the cache below `position` and itself.

        What the cache holds from `position` on is not read, so that a prompt may be padded at its end.
        """
        x, cos_sin = self._embed(tokens), rotation(self.config, position[None])
        apply_layer, weights = self._stack(cos_sin)
        number = jnp.arange(cache[0].shape[2], dtype=jnp.int32)
        visible = number <= position
        if self.config.sliding_window is not None:
            visible &= number > position - self.config.sliding_window

        def next_layer(carry, layer):
            x, cache = carry
            index, weights = layer

            def attend(q, k, v):
                # Into the whole cache, which XLA does in place: as outputs of the scan all of it would be copied.
                write = lambda all, new: jax.lax.dynamic_update_slice(all, new[None], (index, 0, position, 0, 0))
                written = write(cache[0], k), write(cache[1], v)
                keys, values = (jax.lax.dynamic_index_in_dim(x, index, keepdims=False) for x in written)
                # Of 16-bit inputs it makes float32 scores by a promotion that the strict rules refuse.
                with jax.numpy_dtype_promotion("standard"):
                    return jax.nn.dot_product_attention(q, keys, values, mask=visible[None, None, None]), written

            return apply_layer(x, weights, attend), None

        layers = (jnp.arange(self.config.num_hidden_layers, dtype=jnp.int32), weights)
        (x, cache), _ = jax.lax.scan(next_layer, (x, cache), layers)
        return self._final_norm(x), cache

    def _read(self, tokens, positions, attend):
        """(hidden states, what `attend` keeps of each layer) of whole rows."""
        x = self._embed(tokens)
        apply_layer, weights = self._stack(rotation(self.config, positions))
        read = lambda x, weights: apply_layer(x, weights, attend, self.projections)
        x, kept = jax.lax.scan(self.remat(read), x, weights)
        return self._final_norm(x), kept

    def _embed(self, tokens):
        with jax.named_scope("embed"):
            return self.gather("embed_tokens", self.embed_tokens[...])[tokens].astype(self.dtype)

    def _stack(self, cos_sin: Rotation):
        """((x, weights, attend, projections) -> what the layer returns, the weights of all layers)."""
        graphdef, stacked = nnx.split(self.layers)

        def apply_layer(x, weights, attend, projections=PLAIN):
            with jax.named_scope("gather"):
                layer = nnx.State({name: self.gather(name, weight) for name, weight in weights.items()})
            with jax.named_scope("layer"):
                return nnx.merge(graphdef, layer)(x, cos_sin, attend, projections)

        return apply_layer, nnx.to_pure_dict(stacked)

    def _final_norm(self, x):
        with jax.named_scope("final_norm"):
            return rms_norm(x, self.gather("norm", self.norm[...]), eps=self.config.rms_norm_eps)
