"""What a Config trains: a Llama whose attention, weights and remat are those of its mesh, and its compiled step."""

import functools
from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float32

from distflash_jax import distflash_attention, remat
from models.config import LlamaConfig
from models.llama import PROJECTION_NAME, Llama
from train import megatron
from train.config import Config, Remat, Strategy
from train.sharding import BLOCK_AXES, HEADS, TOKENS, make_gather
from train.step import OptimizerConfig, Program, build

_INPUT_NAME = "layer_input"
_save_projections = jax.checkpoint_policies.save_only_these_names(PROJECTION_NAME)
_offload_inputs = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=[_INPUT_NAME],
    offload_src="device",
    offload_dst="pinned_host",
)


Weights = dict[str, Float32[Array, "..."]]


def _all_but_weights(weights: Weights) -> remat.Policy:
    """Keeps whatever is not made of weights alone, so neither their rounded nor their gathered form."""
    shapes = {weight.shape for weight in weights.values()}
    return lambda primitive, *operands, **_: not all(operand.shape in shapes for operand in operands)


# In all of them the weights of a layer are gathered again for its backward: saved, they would be those of all layers.
_POLICIES: dict[str, Callable[[Weights], remat.Policy | None]] = {
    "attention": lambda _: remat.save_attention_outputs(),
    "projections": lambda _: remat.save_attention_outputs(_save_projections),
    "offload": lambda _: remat.offload_attention_outputs(),
    "offload-all": lambda _: remat.offload_attention_outputs(_offload_inputs),
    "layer": lambda _: None,
    "none": _all_but_weights,
}


def make_model(
    llama: LlamaConfig,
    mesh: Mesh,
    rngs: nnx.Rngs,
    *,
    dtype: DTypeLike,
    remat: Remat = "none",
    strategy: Strategy = "balanced",
    num_nodes: int = 1,
    deterministic: bool = False,
) -> Llama:
    """A Llama whose attention is spread over the seq axis of the mesh, its heads over tensor.

    num_nodes: parts of the seq axis, slowest along the sequence, that strategies over two axes tell apart.
    """
    options = {"remat": make_remat(remat, mesh), "dtype": dtype, "rngs": rngs}
    if strategy == "megatron":
        attention = functools.partial(
            distflash_attention, mesh=mesh, axis=(), spec=megatron.HEADS, causal=True, deterministic=deterministic
        )
        deal = functools.partial(megatron.deal, mesh, megatron.split_of(llama, mesh))
        gather = make_gather(mesh, dtype, deal, megatron.BLOCK_AXES)
        return Llama(llama, attention=attention, gather=gather, projections=megatron.make_projections(mesh), **options)
    axis = "seq" if num_nodes == 1 else ("node", "seq")
    attention = functools.partial(
        distflash_attention,
        mesh=_split_seq(mesh, num_nodes),
        axis=axis,
        spec=P(HEADS[0], axis, HEADS[2]),
        strategy=strategy,
        causal=True,
        deterministic=deterministic,
    )
    return Llama(llama, attention=attention, gather=make_gather(mesh, dtype), **options)


def _split_seq(mesh: Mesh, num_nodes: int) -> Mesh:
    """The mesh with an axis node before seq, of which it takes so many parts; the same devices in the same order."""
    if num_nodes == 1:
        return mesh
    data, seq, tensor = mesh.devices.shape
    devices = mesh.devices.reshape(data, num_nodes, seq // num_nodes, tensor)
    return Mesh(devices, ("data", "node", "seq", "tensor"), axis_types=(AxisType.Auto,) * 4)


def model_maker(config: Config, mesh: Mesh) -> Callable[[nnx.Rngs], Llama]:
    """What makes the model of a run from random streams."""
    return functools.partial(
        make_model,
        config.llama,
        mesh,
        dtype=jnp.dtype(config.dtype),
        remat=config.remat,
        strategy=config.strategy,
        num_nodes=config.mesh.num_nodes,
        deterministic=config.deterministic,
    )


def build_program(config: Config, mesh: Mesh) -> Program:
    """The compiled side of a run."""
    optimizer = OptimizerConfig(
        learning_rate=cast(float, config.lr),
        warmup_steps=config.warmup_steps,
        # Without it the rate stays constant, so that a run is exactly the beginning of one with more steps.
        total_steps=config.decay_steps,
        clip_norm=config.clip_norm,
        z_loss=config.z_loss,
        accumulate=config.accumulate,
    )
    return build(
        model_maker(config, mesh),
        mesh=mesh,
        optimizer=optimizer,
        seed=config.seed,
        is_packed=config.packing,
        is_zigzag=config.strategy == "zigzag",
        block_axes=megatron.BLOCK_AXES if config.strategy == "megatron" else BLOCK_AXES,
    )


def make_remat(name: Remat, mesh: Mesh) -> Callable[[Callable], Callable]:
    """Transforms the function of a layer so that its backward keeps what `name` says, and its input lies as tokens."""

    def transform(layer: Callable) -> Callable:
        def placed(x, weights):
            x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, TOKENS))
            return layer(checkpoint_name(x, _INPUT_NAME), weights)

        def rematerialised(x, weights):
            # Layers are scanned: nothing can merge a layer's recomputation with its forward, so it needs no barrier.
            return jax.checkpoint(placed, policy=_POLICIES[name](weights), prevent_cse=False)(x, weights)

        return rematerialised

    return transform
