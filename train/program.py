"""What a Config trains: a Llama whose attention, weights and remat are those of its mesh, and its compiled step."""

import functools
from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding

from distflash_jax import distflash_attention, remat
from models.llama import Llama
from train.config import Config
from train.sharding import HEADS, TOKENS, make_gather
from train.step import OptimizerConfig, Program, build

_INPUT_NAME = "layer_input"
_offload_inputs = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=[_INPUT_NAME],
    offload_src="device",
    offload_dst="pinned_host",
)


def _all_but_gathered_weights(primitive, *_, **__) -> bool:
    return primitive.name != "sharding_constraint"


# In all of them the weights of a layer are gathered again for its backward: saved, they would be those of all layers.
_POLICIES: dict[str, Callable[[], remat.Policy | None]] = {
    "attention": remat.save_attention_outputs,
    "offload": remat.offload_attention_outputs,
    "offload-all": lambda: remat.offload_attention_outputs(_offload_inputs),
    "layer": lambda: None,
    "none": lambda: _all_but_gathered_weights,
}


def build_program(config: Config, mesh: Mesh) -> Program:
    """The compiled side of a run: a Llama whose attention is spread over the seq axis of the mesh."""
    attention = functools.partial(
        distflash_attention,
        mesh=mesh,
        axis="seq",
        spec=HEADS,
        strategy=config.strategy,
        causal=True,
    )
    dtype = jnp.dtype(config.dtype)

    def create_model(rngs: nnx.Rngs) -> Llama:
        return Llama(
            config.llama,
            attention=attention,
            remat=make_remat(config.remat, mesh),
            gather=make_gather(mesh, dtype),
            dtype=dtype,
            rngs=rngs,
        )

    optimizer = OptimizerConfig(
        learning_rate=cast(float, config.lr),
        warmup_steps=config.warmup_steps,
        # Without it the rate stays constant, so that a run is exactly the beginning of one with more steps.
        total_steps=config.decay_steps,
        clip_norm=config.clip_norm,
        z_loss=config.z_loss,
        accumulate=config.accumulate,
    )
    return build(create_model, mesh=mesh, optimizer=optimizer, seed=config.seed)


def make_remat(name: str, mesh: Mesh) -> Callable[[Callable], Callable]:
    """Transforms the function of a layer so that its backward keeps what `name` says, and its input lies as tokens."""
    policy = _POLICIES[name]()

    def transform(layer: Callable) -> Callable:
        def placed(x, weights):
            x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, TOKENS))
            return layer(checkpoint_name(x, _INPUT_NAME), weights)

        # Layers are scanned, so nothing can merge a layer's recomputation with its forward: no barrier is needed.
        return jax.checkpoint(placed, policy=policy, prevent_cse=False)

    return transform
