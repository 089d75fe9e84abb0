"""distflash_attention as the `attention_fn=` of Flax's multi-head attention modules (NNX and Linen)."""

import functools
from collections.abc import Callable
from typing import Any

from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from distflash_jax.attention import distflash_attention
from distflash_jax.masks import AttentionMask, CausalMask, Window
from distflash_jax.placement import Axis
from distflash_jax.schedule import Strategy


def flax_attention(
    *,
    mesh: Mesh | AbstractMesh | None = None,
    axis: Axis = "seq",
    spec: PartitionSpec | None = None,
    mask: AttentionMask | None = None,
    causal: bool | None = None,
    window: Window | None = None,
    global_tokens: int | None = None,
    prefix_lengths: Int[Array, " B"] | None = None,
    q_offset: int | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    kv_segment_ids: Int[Array, "B S"] | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    strategy: Strategy = "balanced",
    implementation: str | None = None,
    deterministic: bool = False,
) -> Callable[..., Float[Array, "... T N H"]]:
    """An attention_fn for flax.nnx.MultiHeadAttention and flax.linen.MultiHeadDotProductAttention.

    The arguments are those of distflash_attention. A module called with is_causal=True is causal in any case. What
    cannot be carried is refused by name: a dense mask, a bias, dropout, sown weights, a matmul precision.
    """
    given = mask
    attend = functools.partial(
        distflash_attention,
        mesh=mesh,
        axis=axis,
        spec=spec,
        window=window,
        global_tokens=global_tokens,
        prefix_lengths=prefix_lengths,
        q_offset=q_offset,
        segment_ids=segment_ids,
        kv_segment_ids=kv_segment_ids,
        softcap=softcap,
        scale=scale,
        strategy=strategy,
        implementation=implementation,
        deterministic=deterministic,
    )

    def attention_fn(
        query: Float[Array, "... T N H"],
        key: Float[Array, "... S K H"],
        value: Float[Array, "... S K H"],
        bias: Array | None = None,
        mask: Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: DTypeLike | None = None,
        precision: Any = None,
        module: Any = None,
        is_causal: bool = False,
        qk_attn_weights_einsum: Any = None,
        attn_weights_value_einsum: Any = None,
    ) -> Float[Array, "... T N H"]:
        del broadcast_dropout, dropout_rng  # they say how to drop; whether to is checked below
        refused = {
            "bias": bias,
            "mask": mask,
            "dropout_rate": dropout_rate if dropout_rate > 0 and not deterministic else None,
            "precision": precision,
            "module (sow_weights)": module,
            "qk_attn_weights_einsum": qk_attn_weights_einsum,
            "attn_weights_value_einsum": attn_weights_value_einsum,
        }
        for name, argument in refused.items():
            if argument is not None:
                hint = "; say causal=True instead of a causal mask" if name == "mask" else ""
                raise ValueError(f"{name}: distflash_attention cannot carry it, must be left out{hint}")
        dtype = query.dtype if dtype is None else dtype
        query, key, value = (x.astype(dtype) for x in (query, key, value))
        q, k, v = (x.reshape(-1, *x.shape[-3:]) for x in (query, key, value))
        visible = CausalMask() & given if is_causal and given is not None and not given.is_causal else given
        is_asked = is_causal and given is None
        return attend(q, k, v, mask=visible, causal=is_asked or causal).reshape(query.shape)

    return attention_fn
