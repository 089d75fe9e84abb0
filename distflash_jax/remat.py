"""Policies for jax.checkpoint under which the backward pass never runs an attention forward, nor its messages, again.

distflash_attention names its output and log-sum-exp. A policy that keeps these two arrays makes the forward kernel and
its communication dead code in the recomputation; q, k and v are recomputed by local matrix products:

    layer = jax.checkpoint(layer, policy=distflash_jax.remat.save_attention_outputs())

Source: DISTFLASHATTN, arXiv 2310.03294, section 3.3.
"""

import warnings
from collections.abc import Callable
from typing import Any

import jax

OUT_NAME = "distflash_out"
LSE_NAME = "distflash_lse"

Policy = Callable[..., Any]


def save_attention_outputs(policy: Policy | None = None) -> Policy:
    """Saves each attention output and log-sum-exp on the device, and whatever `policy` saves; recomputes the rest."""
    return _either(jax.checkpoint_policies.save_only_these_names(OUT_NAME, LSE_NAME), policy)


def offload_attention_outputs(policy: Policy | None = None) -> Policy:
    """Keeps each attention output and log-sum-exp in pinned host memory until the backward pass needs it.

    Whatever `policy` saves or offloads is kept as it says; the rest is recomputed.
    """
    offload = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[OUT_NAME, LSE_NAME],
        offload_src="device",
        offload_dst="pinned_host",
    )
    return _either(offload, policy)


def _either(attention: Policy, other: Policy | None) -> Policy:
    _warn_if_names_are_ignored()
    if other is None:
        return attention

    def policy(primitive, *args, **params):
        is_ours = params.get("name") in (OUT_NAME, LSE_NAME)
        return (attention if is_ours else other)(primitive, *args, **params)

    return policy


def _warn_if_names_are_ignored() -> None:
    if getattr(jax.config, "jax_remat3", False) and not getattr(jax.config, "jax_custom_vjp3", False):
        warnings.warn(
            "JAX_REMAT3 is set without JAX_CUSTOM_VJP3: this JAX then ignores the names of attention outputs and "
            "runs every attention forward twice; set JAX_CUSTOM_VJP3=1 too, or unset JAX_REMAT3",
            stacklevel=3,
        )
