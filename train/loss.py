"""Cross entropy per token without the logits of the sequence: each worker takes its tokens in chunks."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Float32, Int

from train.sharding import SHARDS, TOKENS, stored_spec

IGNORED = -1
_ALL = (*SHARDS, "tensor")

PerToken = tuple[Float32[Array, " R"], Float32[Array, " R"]]


class Cut(NamedTuple):
    """How a worker takes its rows: in chunks of so many, against columns of a head that may be gathered first."""

    chunk: int
    vocab_size: int
    gathers: bool


def token_losses(
    hidden: Float[Array, "B T D"],
    head: Float32[Array, "D V"],
    labels: Int[Array, "B T"],
    *,
    mesh: Mesh,
    chunk: int = 1024,
) -> tuple[Float32[Array, "B T"], Float32[Array, "B T"]]:
    """(cross entropy, log-sum-exp of the logits) of every position, both 0 where the label is -1.

    A worker holds chunk x V / tensor logits at a time, forward and backward: the backward makes them again.

    Raises:
        ValueError: if `chunk` is not positive.
    """
    if chunk < 1:
        raise ValueError(f"chunk={chunk} must be at least 1")
    vocab_size = head.shape[1]
    columns = jnp.pad(head, ((0, 0), (0, -vocab_size % mesh.shape["tensor"])))
    spec = stored_spec("lm_head", columns.shape, mesh)

    def worker_losses(hidden, head, labels):
        num_chunks = math.ceil(labels.size / chunk)
        cut = Cut(math.ceil(labels.size / num_chunks), vocab_size, gathers=spec[0] is not None)
        padding = num_chunks * cut.chunk - labels.size
        rows = jnp.pad(hidden.reshape(labels.size, -1), ((0, padding), (0, 0)))
        targets = jnp.pad(labels.reshape(-1), (0, padding), constant_values=IGNORED)
        # A head that is whole for each worker: its gradient is summed over them once, after the loop.
        head = lax.pcast(head, tuple(axis for axis in SHARDS if not cut.gathers), to="varying")
        per_row = _row_losses(cut, rows, head, targets)
        return jax.tree.map(lambda x: x[: labels.size].reshape(labels.shape), per_row)

    with jax.named_scope("head"):
        return jax.shard_map(worker_losses, mesh=mesh, in_specs=(TOKENS, spec, TOKENS), out_specs=(TOKENS, TOKENS))(
            hidden, columns, labels
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _row_losses(
    cut: Cut, hidden: Float[Array, "R D"], head: Float32[Array, "D V"], labels: Int[Array, " R"]
) -> PerToken:
    """logsumexp(hidden @ head) - (hidden @ head)[label], and the logsumexp, of the rows of one worker.

    The products run in the dtype of `hidden` and accumulate in float32, those of the gradient too. Plain
    autodiff would multiply by float32 logit gradients, far slower on a GPU, and round each chunk's share of
    the head's gradient.
    """
    return _forward(cut, hidden, head, labels)[0]


def _forward(cut: Cut, hidden, head, labels) -> tuple[PerToken, tuple[Array, ...]]:
    weights = _gather(cut, head, hidden.dtype)

    def of_chunk(chunk):
        logits, is_target = _logits(cut, weights, *chunk)
        return jax.nn.logsumexp(logits, axis=-1), jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)

    lse, chosen = (x.reshape(-1) for x in lax.map(of_chunk, _chunks(cut, hidden, labels)))
    largest = lax.pmax(lse, "tensor")
    lse = largest + jnp.log(lax.psum(jnp.exp(lse - largest), "tensor"))
    losses = lse - lax.psum(chosen, "tensor")
    losses = jnp.where((labels < IGNORED) | (labels >= cut.vocab_size), jnp.nan, losses)
    is_counted = labels != IGNORED
    return (jnp.where(is_counted, losses, 0.0), jnp.where(is_counted, lse, 0.0)), (hidden, head, labels, lse)


def _backward(cut: Cut, residuals, cotangents: PerToken):
    hidden, head, labels, lse = residuals
    weights = _gather(cut, head, hidden.dtype)
    dlosses, dlse = (jnp.where(labels == IGNORED, 0.0, x) for x in cotangents)

    def of_chunk(dweights, chunk):
        hidden, labels, lse, dlosses, dlse = chunk
        logits, is_target = _logits(cut, weights, hidden, labels)
        dlogits = jnp.exp(logits - lse[:, None]) * (dlosses + dlse)[:, None]
        dlogits = (dlogits - jnp.where(is_target, dlosses[:, None], 0.0)).astype(hidden.dtype)
        dhidden = jnp.dot(dlogits, weights.T, preferred_element_type=jnp.float32).astype(hidden.dtype)
        return dweights + jnp.dot(hidden.T, dlogits, preferred_element_type=jnp.float32), dhidden

    zeros = lax.pcast(jnp.zeros(weights.shape, jnp.float32), _ALL, to="varying")
    dweights, dhidden = lax.scan(of_chunk, zeros, _chunks(cut, hidden, labels, lse, dlosses, dlse))
    dhead = lax.psum_scatter(dweights, SHARDS, scatter_dimension=0, tiled=True) if cut.gathers else dweights
    return lax.psum(dhidden.reshape(hidden.shape), "tensor"), dhead, None


_row_losses.defvjp(_forward, _backward)


def _gather(cut: Cut, head: Float32[Array, "d V"], dtype) -> Float[Array, "D V"]:
    return lax.all_gather(head.astype(dtype), SHARDS, axis=0, tiled=True) if cut.gathers else head.astype(dtype)


def _logits(cut: Cut, weights, hidden, labels) -> tuple[Float32[Array, "C V"], Array]:
    """Logits of this worker's columns, -inf for those that pad the vocabulary, and where the labels are."""
    columns = lax.axis_index("tensor") * weights.shape[1] + jnp.arange(weights.shape[1], dtype=jnp.int32)
    logits = jnp.dot(hidden, weights, preferred_element_type=jnp.float32)
    return jnp.where(columns < cut.vocab_size, logits, -jnp.inf), columns == labels[:, None]


def _chunks(cut: Cut, *rows: Array) -> tuple[Array, ...]:
    return tuple(x.reshape(-1, cut.chunk, *x.shape[1:]) for x in rows)
