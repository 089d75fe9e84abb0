"""distflash_attention: exact attention over a sequence that is sharded along a mesh axis. Read this first.

The path of a call: the checks and the custom_vjp here -> the plan of a strategy (strategies.py), most often a table
(schedule.py) -> fetch, compute, return, merge (executor.py) -> a block kernel (pallas_kernels).
"""

import functools
import re
import warnings
from typing import Any, Literal, NoReturn, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from distflash_jax import placement, strategies
from distflash_jax.checks import check_arrays, check_mask, check_number, check_sinks
from distflash_jax.masks import AttentionMask, Window
from distflash_jax.placement import Axis
from distflash_jax.remat import LSE_NAME, OUT_NAME
from distflash_jax.schedule import STRATEGIES, Strategy
from pallas_kernels import IMPLEMENTATIONS, BlockAttention, Choice, choose
from pallas_kernels.block import Partial


@overload
def distflash_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    *,
    mesh: Mesh | AbstractMesh | None = ...,
    axis: Axis = ...,
    spec: PartitionSpec | None = ...,
    mask: AttentionMask | None = ...,
    causal: bool | None = ...,
    window: Window | None = ...,
    global_tokens: int | None = ...,
    prefix_lengths: Int[Array, " B"] | None = ...,
    q_offset: int | None = ...,
    segment_ids: Int[Array, "B T"] | None = ...,
    kv_segment_ids: Int[Array, "B S"] | None = ...,
    softcap: float | None = ...,
    sinks: Float[Array, " N"] | None = ...,
    scale: float | None = ...,
    strategy: Strategy = ...,
    implementation: str | None = ...,
    deterministic: bool = ...,
    return_lse: Literal[False] = ...,
) -> Float[Array, "B T N H"]: ...


@overload
def distflash_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    *,
    mesh: Mesh | AbstractMesh | None = ...,
    axis: Axis = ...,
    spec: PartitionSpec | None = ...,
    mask: AttentionMask | None = ...,
    causal: bool | None = ...,
    window: Window | None = ...,
    global_tokens: int | None = ...,
    prefix_lengths: Int[Array, " B"] | None = ...,
    q_offset: int | None = ...,
    segment_ids: Int[Array, "B T"] | None = ...,
    kv_segment_ids: Int[Array, "B S"] | None = ...,
    softcap: float | None = ...,
    sinks: Float[Array, " N"] | None = ...,
    scale: float | None = ...,
    strategy: Strategy = ...,
    implementation: str | None = ...,
    deterministic: bool = ...,
    return_lse: Literal[True],
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]: ...


def distflash_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
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
    sinks: Float[Array, " N"] | None = None,
    scale: float | None = None,
    strategy: Strategy = "balanced",
    implementation: str | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
) -> Float[Array, "B T N H"] | tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """softmax(scale * q k^T) v, with the sequence sharded over the mesh axis `axis`.

    Called on global arrays (under jit or not) it runs its own shard_map; called inside a shard_map that already holds
    `axis`, on the chunks of this worker. Tokens lie in their natural order, worker w holding the w-th chunk; a length
    that the workers do not divide is padded inside. Differentiable once, in reverse mode, in q, k, v and sinks through
    out and lse. A token that sees nothing gets out = 0 and lse = -inf (with a sink: the sink).

    Args:
        q, k, v: float32, bfloat16 or float16, all of one dtype. N must be a multiple of K; query head n reads
            key/value head n // (N / K). S may differ from T.
        mesh: defaults to that of q's explicit sharding, else to the ambient mesh (jax.set_mesh).
        axis: the mesh axis that the sequence is sharded over; or several, such as ("node", "gpu"), of which the first
            varies slowest along the sequence.
        spec: how q, k, v and out lie on the mesh, such as P("data", "seq", "tensor"). Defaults to the explicit sharding
            of q, else to P(None, axis).
        mask: what is seen, as distflash_jax.masks composes it, such as CausalMask() & SegmentMask(ids); in place of
            the arguments from causal to kv_segment_ids, which are its short form.
        causal: each token sees itself and those before it. True by default.
        window: each token sees itself and the window - 1 before it; needs causal. Or (left, right): itself, so many
            tokens before it and so many behind it, each without limit if None; right is 0 with causal. Chunks beyond
            are neither sent nor computed. All workers have as much to do where both sides are limited.
        global_tokens: beyond the window, the first so many tokens are seen by all and, if not causal, see all. Every
            worker gets a copy of them; or, of more keys than a worker has, what a table sends.
        prefix_lengths: of each row, how many tokens at its start are seen by all of them, also by those before; needs
            causal. Messages are then those of full attention, as nobody knows the lengths when it compiles.
        q_offset: the place of the first query among the keys: query t has the position t + q_offset of a key. 0 by
            default, but has to be given with causal or a window where S differs from T: 0 aligns the first tokens, as
            jax.nn does, and S - T the last, as FlashAttention does. The table is then not balanced.
        segment_ids: of each query, the number of its document, from 0 to 2**24: it sees keys of the same number, and
            with 0 (padding) none. Growing along the sequence, as packed documents are numbered, tiles between
            documents cost nothing. Every worker reads all of them: a layer needs no message for ids that are
            replicated over `axis`.
        kv_segment_ids: those of the keys; defaults to segment_ids.
        softcap: scores s become softcap * tanh(s / softcap), after the scale.
        sinks: a score for each head that takes part in the softmax and has no value, as in gpt-oss.
        scale: defaults to 1 / sqrt(H).
        strategy: "balanced" keeps every worker busy; "balanced_unsplit" is the paper's own table, where half of an even
            number of workers idle in the last step; "ring" is the unbalanced baseline. "ulysses" exchanges heads for
            tokens and pads heads that the workers do not divide; "all_gather" gathers keys and values; "hybrid", over
            two axes, is Ulysses over the second and the balanced table over the first. "zigzag", which takes no mask
            but causal, has tokens in the order of distflash_jax.zigzag. "burst" is "balanced" with a backward in which
            queries travel instead of keys; over two axes, such as ("node", "gpu"), a double ring. "rsa", for
            comparison, has all scores in memory. "auto" is the one of the others in natural order for which
            explain_strategy predicts the least time, forward and backward; with a window, "balanced".
        implementation: the block kernel; None chooses, and which_implementation tells.
        deterministic: gradients repeat bit by bit on the Hopper kernels too, whose dq else varies in its last bits;
            their backward then makes seven matmuls instead of five.
        return_lse: also return the log-sum-exp of the scaled scores: float32, natural logarithm, differentiable.

    Raises:
        ValueError: names the argument, its value and what is allowed.

    Source: DISTFLASHATTN, arXiv 2310.03294.
    """
    check_arrays(q, k, v)
    visible = check_mask(
        mask, q, k, causal=causal, window=window, global_tokens=global_tokens, prefix_lengths=prefix_lengths,
        q_offset=q_offset, segment_ids=segment_ids, kv_segment_ids=kv_segment_ids,
    )  # fmt: skip
    check_sinks(sinks, q)
    softcap = None if softcap is None else check_number("softcap", softcap, is_positive=True)
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy={strategy!r}: must be one of {STRATEGIES}")
    T, S, H = q.shape[1], k.shape[1], q.shape[3]
    factor = H**-0.5 if scale is None else check_number("scale", scale)
    choice = which_implementation(implementation, mesh=mesh, dtype=q.dtype, head_dim=H, scale=factor)
    _check_kernel(choice)
    attend = functools.partial(
        _attend,
        axis=axis,
        scale=factor,
        strategy=strategy,
        softcap=softcap,
        kernel=IMPLEMENTATIONS[choice.name],
        deterministic=deterministic,
        mesh=mesh,
    )
    if placement.is_inside_shard_map(axis):
        placement.check_chunks(q, k, v, axis, mesh, spec)
        _check_flags(mesh, lax.axis_size(axis))
        visible = visible.map_ids(lambda x: lax.all_gather(x, axis, axis=1, tiled=True))
        out, lse = _with_sinks(*attend(q, k, v, visible, num_keys=S * lax.axis_size(axis)), sinks)
        return (out, lse) if return_lse else out
    mesh = placement.find_mesh(mesh, axis, q)
    num_workers = placement.size(mesh, axis)
    _check_flags(mesh, num_workers)
    spec = placement.find_spec(spec, mesh, axis, q)
    placement.check_divisible(q, k, mesh, spec)
    placed = [placement.place(name, x, mesh, spec) for name, x in (("q", q), ("k", k), ("v", v))]
    q, k, v = (_pad_rows(x, num_workers) for x in placed)
    whole = lambda path, x: placement.place(path[0].name, x, mesh, PartitionSpec(spec[0], *(None,) * (x.ndim - 1)))
    visible = jax.tree.map_with_path(whole, visible).map_ids(lambda x: _pad_rows(x, num_workers))
    on_mesh = jax.shard_map(
        functools.partial(attend, num_keys=S, mesh=mesh),
        mesh=mesh,
        in_specs=(spec, spec, spec, PartitionSpec(spec[0])),
        out_specs=(spec, PartitionSpec(*spec[:3])),
        axis_names=frozenset(mesh.axis_names) - frozenset(jax.sharding.get_abstract_mesh().manual_axes),
    )
    # Outside of jit, each operation in a shard_map would be compiled by itself, at every call.
    out, lse = jax.jit(on_mesh, inline=True)(q, k, v, visible)
    out, lse = _with_sinks(out[:, :T], lse[:, :T], sinks)
    return (out, lse) if return_lse else out


def which_implementation(
    implementation: str | None = None,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    dtype: DTypeLike = jnp.bfloat16,
    head_dim: int = 128,
    scale: float = 1.0,
) -> Choice:
    """(name, reason) of the block kernel that distflash_attention runs with these arguments.

    Raises:
        ValueError: `implementation` names none, or one that cannot run there.
    """
    device = _first_device(mesh)
    return choose(
        implementation,
        platform=device.platform,
        compute_capability=getattr(device, "compute_capability", None),
        dtype=jnp.dtype(dtype),
        head_dim=head_dim,
        scale=scale,
        cuda_version=_cuda_version(device.client.platform_version),
    )


def _first_device(mesh: Mesh | AbstractMesh | None):
    return mesh.devices.flat[0] if isinstance(mesh, Mesh) else jax.devices()[0]


def _check_kernel(choice: Choice) -> None:
    """Warns, by Python's own rule once in a process, where a package would bring kernels in place of plain JAX."""
    if choice.name == "xla" and "pip install" in choice.reason:
        warnings.warn(f"attention runs in plain JAX: {choice.reason}", RuntimeWarning, stacklevel=2)


def _check_flags(mesh: Mesh | AbstractMesh | None, num_workers: int) -> None:
    """Warns where messages will not travel behind kernels for want of XLA flags."""
    if num_workers > 1 and _first_device(mesh).platform == "gpu":
        from distflash_jax import xla_flags  # only here: `python -m` warns of a module that its package has imported

        xla_flags.warn_if_missing(jax.process_count())


def _cuda_version(platform_version: str) -> int | None:
    """Of the toolchain that JAX runs with, such as 13000 for 13.0; None where there is none."""
    found = re.search(r"cuda (\d+)", platform_version)
    return int(found[1]) if found else None


def _attend(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    mask: AttentionMask,
    *,
    axis: Axis,
    num_keys: int,
    softcap: float | None,
    scale: float,
    strategy: Strategy,
    kernel: BlockAttention,
    deterministic: bool,
    mesh: Mesh | AbstractMesh | None,
) -> Partial:
    """(out, lse) of this worker's chunks; num_keys counts the keys of the whole sequence, without padding."""
    if strategy == "auto":
        strategy = "balanced" if mask.window else strategies.choose(q, k, axis, mesh, is_causal=mask.is_causal)
    q, k, v = placement.vary_alike(q, k, v)
    settings = strategies.Settings(
        kernel, axis, q.shape[2], k.shape[2], q.shape[1], k.shape[1], scale, softcap, deterministic
    )
    plan, segments = strategies.make_plan(strategy, mask, settings, num_keys=num_keys)
    return _attention(plan, q, k, v, segments)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(plan: strategies.Plan, q: Array, k: Array, v: Array, segments: Any) -> Partial:
    return plan.forward(q, k, v, segments)


def _attention_fwd(
    plan: strategies.Plan, q: Array, k: Array, v: Array, segments: Any
) -> tuple[Partial, tuple[Any, ...]]:
    out, lse = plan.forward(q, k, v, segments)
    # The named values must be both results and residuals: a policy that saves them then leaves no use of the forward.
    out, lse = checkpoint_name(out, OUT_NAME), checkpoint_name(lse, LSE_NAME)
    return (out, lse), (q, k, v, segments, out, lse)


def _attention_bwd(plan: strategies.Plan, residuals: tuple[Any, ...], cotangents: Partial) -> tuple[Array | None, ...]:
    q, k, v, segments, out, lse = residuals
    q, k, v, out, lse, dout, dlse = _once((q, k, v, out, lse, *cotangents))
    # d lse / d scores = weights, so the whole gradient of lse is one subtraction here.
    delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1) - dlse
    # XLA would compute it where a kernel's operand is transposed, by threads that each walk along a row.
    delta = lax.optimization_barrier(delta)
    return *plan.backward(q, k, v, dout, lse, delta, segments), None


_attention.defvjp(_attention_fwd, _attention_bwd)


@jax.custom_jvp
def _once(arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """The arrays; a derivative by them is refused, which kernels would not have, or by way of their loops as NaN."""
    return arrays


@_once.defjvp
def _refuse_twice(primals: Any, tangents: Any) -> NoReturn:
    raise NotImplementedError(
        "distflash_attention: must be differentiated once, in reverse mode (jax.grad, jax.vjp); its gradient has no "
        "derivative"
    )


def _with_sinks(out: Float[Array, "B T N H"], lse: Float[Array, "B T N"], sinks: Float[Array, " N"] | None) -> Partial:
    """(out, lse) where each head has one more score in its softmax, whose value is 0."""
    if sinks is None:
        return out, lse
    sinks = sinks.astype(jnp.float32)
    # Where no key is seen out is 0 and its share does not matter; a sink of -inf would make it NaN.
    share = jax.nn.sigmoid(jnp.where(lse == -jnp.inf, 0.0, lse) - sinks)
    return (out.astype(jnp.float32) * share[..., None]).astype(out.dtype), jnp.logaddexp(lse, sinks)


def _pad_rows(x: Float[Array, "B T ..."], multiple: int) -> Float[Array, "B T2 ..."]:
    """Zero rows up to a multiple: no causal query sees them, and num_keys hides them from all others."""
    return jnp.pad(x, [(0, 0), (0, -x.shape[1] % multiple)] + [(0, 0)] * (x.ndim - 2)) if x.shape[1] % multiple else x
