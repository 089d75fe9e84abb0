"""Cross entropy per token without the logits of the sequence: each worker takes its tokens in chunks."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Float32, Int

IGNORED = -1
TOKENS = P("data", "seq")


@jax.custom_vjp
def chunk_losses(
    hidden: Float[Array, "C D"], head: Float32[Array, "D V"], labels: Int[Array, " C"]
) -> Float32[Array, " C"]:
    """logsumexp(hidden @ head) - (hidden @ head)[label], and 0 where the label is ignored.

    The products run in the dtype of `hidden` and accumulate in float32, those of the gradient too. Plain
    autodiff would multiply by float32 logit gradients, far slower on a GPU, and round each chunk's share of
    the head's gradient.
    """
    return _forward(hidden, head, labels)[0]


def _forward(hidden, head, labels):
    logits = jnp.dot(hidden, head.astype(hidden.dtype), preferred_element_type=jnp.float32)
    lse = jax.nn.logsumexp(logits, axis=-1)
    targets = jnp.where(labels == IGNORED, 0, labels)
    chosen = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
    return jnp.where(labels == IGNORED, 0.0, lse - chosen), (hidden, head, labels, lse)


def _backward(residuals, dlosses):
    hidden, head, labels, lse = residuals
    weights = head.astype(hidden.dtype)
    logits = jnp.dot(hidden, weights, preferred_element_type=jnp.float32)
    is_target = jnp.arange(head.shape[1]) == labels[:, None]
    dlosses = jnp.where(labels == IGNORED, 0.0, dlosses)
    dlogits = (jnp.exp(logits - lse[:, None]) - is_target.astype(jnp.float32)) * dlosses[:, None]
    dlogits = dlogits.astype(hidden.dtype)
    dhidden = jnp.dot(dlogits, weights.T, preferred_element_type=jnp.float32).astype(hidden.dtype)
    return dhidden, jnp.dot(hidden.T, dlogits, preferred_element_type=jnp.float32), None


chunk_losses.defvjp(_forward, _backward)


def token_losses(
    hidden: Float[Array, "B T D"],
    head: Float32[Array, "D V"],
    labels: Int[Array, "B T"],
    *,
    mesh: Mesh,
    chunk: int = 1024,
) -> Float32[Array, "B T"]:
    """Cross entropy of every position, 0 where the label is -1; a worker holds chunk x V logits at a time.

    Raises:
        ValueError: if `chunk` is not positive.
    """
    if chunk < 1:
        raise ValueError(f"chunk={chunk} must be at least 1")

    def worker_losses(hidden, head, labels):
        # Varying before the loop: the head's gradient is then summed over workers once, not in every chunk.
        head = jax.lax.pcast(head, tuple(TOKENS), to="varying")
        num_chunks = -(-labels.size // chunk)
        size = -(-labels.size // num_chunks)
        padding = num_chunks * size - labels.size
        rows = jnp.pad(hidden.reshape(labels.size, -1), ((0, padding), (0, 0)))
        targets = jnp.pad(labels.reshape(-1), (0, padding), constant_values=IGNORED)
        chunks = rows.reshape(num_chunks, size, -1), targets.reshape(num_chunks, size)
        losses = jax.lax.map(lambda pair: chunk_losses(pair[0], head, pair[1]), chunks)
        return losses.reshape(-1)[: labels.size].reshape(labels.shape)

    with jax.named_scope("head"):
        return jax.shard_map(worker_losses, mesh=mesh, in_specs=(TOKENS, P(), TOKENS), out_specs=TOKENS)(
            hidden, head, labels
        )


def mean_loss(losses: Float32[Array, "B T"], labels: Int[Array, "B T"]) -> tuple[Float32[Array, ""], Int[Array, ""]]:
    """Sum of the losses / number of labels that count, and that number; 0 where no label counts."""
    num_tokens = jnp.sum(labels != IGNORED, dtype=jnp.int32)
    return jnp.sum(losses) / jnp.maximum(num_tokens, 1).astype(jnp.float32), num_tokens
