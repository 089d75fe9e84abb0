"""Zigzag: worker w has chunks w and 2P-1-w of 2P, so that each has the same to do although attention is causal.

Tokens are put into this order before, by `zigzag`, positions and labels with them. Each step is then two full chunk
pairs for every worker, and only keys that are seen travel: 1.5 (P-1) chunks of half a worker's tokens.

Source: the order of ring-flash-attention (zhuzilin) and Megatron-Core's context parallelism.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Shaped

from distflash_jax.masks import Segments
from distflash_jax.placement import Axis
from distflash_jax.schedule import zigzag_owner
from distflash_jax.table import Permutation
from pallas_kernels.block import BlockAttention, Box, Gradients, Operand, Partial
from pallas_kernels.masks import Mask
from pallas_kernels.merge import Arrays, add_valid, merge_valid

Combine = Callable[[Arrays, Arrays, Bool[Array, ""] | None], Arrays]


def zigzag(x: Shaped[Array, "B T ..."], num_workers: int, *, fill: float = 0) -> Shaped[Array, "B T2 ..."]:
    """The tokens of x in the order that strategy="zigzag" takes: chunks 0, 2P-1, 1, 2P-2, ... of 2P.

    A length that 2P does not divide is padded by `fill`, which for labels should be one that the loss ignores. No token
    sees the padding.
    """
    x = jnp.pad(x, [(0, -x.shape[1] % (2 * num_workers) if i == 1 else 0) for i in range(x.ndim)], constant_values=fill)
    return _take_chunks(x, _order(num_workers))


def unzigzag(x: Shaped[Array, "B T2 ..."], num_workers: int, *, length: int | None = None) -> Shaped[Array, "B T ..."]:
    """The first `length` tokens, default all, of x in their natural order, where x is in that of `zigzag`.

    Raises:
        ValueError: the tokens are no multiple of 2P.
    """
    if x.shape[1] % (2 * num_workers):
        raise ValueError(
            f"x: sequence length {x.shape[1]} must be a multiple of {2 * num_workers}, two chunks a worker"
        )
    return _take_chunks(x, np.argsort(_order(num_workers)))[:, :length]


def _order(num_workers: int) -> np.ndarray:
    chunks = range(2 * num_workers)
    return np.array(sorted(chunks, key=lambda chunk: (zigzag_owner(chunk, num_workers), chunk)))


def _take_chunks(x: Array, order: np.ndarray) -> Array:
    chunks = x.reshape(x.shape[0], len(order), -1, *x.shape[2:])
    return chunks[:, order].reshape(x.shape)


@dataclass(frozen=True)
class Zigzag:
    """The plan; see executor.Plan."""

    kernel: BlockAttention
    axis: Axis
    scale: float
    deterministic: bool = False

    def forward(self, q: Array, k: Array, v: Array, segments: Segments | None) -> Partial:
        """(out, lse) of this worker's two chunks; there are no segments."""
        out, lse = _run(self, "forward", self.kernel.forward, (q,), (k, v), 2, merge_valid)
        return out.astype(q.dtype), lse

    def backward(
        self, q: Array, k: Array, v: Array, dout: Array, lse: Array, delta: Array, segments: Segments | None
    ) -> Gradients:
        """(dq, dk, dv) of this worker's two chunks."""
        kernel = functools.partial(self.kernel.backward, deterministic=self.deterministic)
        dq, dk, dv = _run(self, "backward", kernel, (q, dout, lse, delta), (k, v), 1, add_valid)
        return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


def _run(
    plan: Zigzag,
    direction: str,
    kernel: Callable[..., Arrays],
    q_side: Arrays,
    kv_side: Arrays,
    num_rows_results: int,
    combine: Combine,
) -> Arrays:
    """What the kernel makes of all steps: its first results are of queries, and combined; others of keys, and added.

    Step 0 is this worker's own: its chunks are in order, so it is causal attention of one chunk of twice the length. In
    step s the keys are those of worker w - s, modulo P. The second chunk of queries sees all of its first chunk. And if
    that worker comes before this one, so does the first chunk of queries; if it comes after, the second sees both.
    """
    num_workers, worker = lax.axis_size(plan.axis), lax.axis_index(plan.axis)
    run = functools.partial(kernel, scale=plan.scale, dtype=jnp.float32 if num_workers > 1 else q_side[0].dtype)
    nowhere = worker < 0
    with jax.named_scope(f"{direction}_step_0"):
        fetched = _fetch(plan, kv_side, 1)
        with jax.named_scope("compute"):
            own = run(_operand(q_side, nowhere), _operand(kv_side, nowhere), _mask(worker, kv_side, is_causal=True))
        q_side, kv_side, fetched, own = lax.optimization_barrier((q_side, kv_side, fetched, own))
        first, second = _halves(own[:num_rows_results])
        returned, sums = None, _halves(own[num_rows_results:])
    for step in range(1, num_workers):
        is_after = worker < step
        with jax.named_scope(f"{direction}_step_{step}"):
            theirs, fetched = fetched, _fetch(plan, kv_side, step + 1)
            with jax.named_scope("compute"):
                queries, mask = _halves(q_side), _mask(worker, theirs[0], is_causal=False)
                whole = run(_operand(queries[1], nowhere), _operand(theirs[0], nowhere), mask)
                either = run(_operand(queries[0], is_after, queries[1]), _operand(theirs[0], is_after, theirs[1]), mask)
            # As in executor.py: the next sends wait for these kernels, and what the step before returns is not waited
            # for until they are done.
            paced = (q_side, kv_side, fetched, whole, either, returned, first, second, sums)
            q_side, kv_side, fetched, whole, either, returned, first, second, sums = lax.optimization_barrier(paced)
            with jax.named_scope("merge"):
                sums = _add_returned(sums, returned)
                first = combine(first, either[:num_rows_results], ~is_after)
                second = combine(combine(second, whole[:num_rows_results], None), either[:num_rows_results], is_after)
            gradients = whole[num_rows_results:], either[num_rows_results:]
            of_first = add_valid(*gradients, ~is_after)
            of_second = add_valid(None, gradients[1], is_after)
            returned = _return(plan, (of_first, of_second), step)
    with jax.named_scope(f"{direction}_step_{num_workers - 1}"), jax.named_scope("merge"):
        sums = _add_returned(sums, returned)
        return tuple(jnp.concatenate(pair, axis=1) for pair in zip(first + sums[0], second + sums[1], strict=True))


def _messages(num_workers: int, step: int) -> tuple[Permutation, Permutation]:
    """Those of the first chunks and of the second ones: the second are seen by workers before their own only."""
    first = tuple((source, (source + step) % num_workers) for source in range(num_workers))
    return first, tuple((source, worker) for source, worker in first if worker < source)


def _fetch(plan: Zigzag, kv_side: Arrays, step: int) -> tuple[Arrays, Arrays]:
    """Both chunks of the worker so many before this one, as far as it sees them; nothing behind the last step."""
    num_workers = lax.axis_size(plan.axis)
    if step == num_workers:
        return (), ()
    with jax.named_scope("fetch"):
        return _send(plan, _halves(kv_side), _messages(num_workers, step))


def _return(plan: Zigzag, sums: tuple[Arrays, Arrays], step: int) -> tuple[Arrays, Arrays]:
    first, second = _messages(lax.axis_size(plan.axis), step)
    with jax.named_scope("return"):
        return _send(plan, sums, (tuple((d, s) for s, d in first), tuple((d, s) for s, d in second)))


def _send(
    plan: Zigzag, halves: tuple[Arrays, Arrays], messages: tuple[Permutation, Permutation]
) -> tuple[Arrays, Arrays]:
    first, second = (
        tuple(lax.ppermute(x, plan.axis, permutation) for x in arrays)
        for arrays, permutation in zip(halves, messages, strict=True)
    )
    return first, second


def _halves(arrays: Arrays) -> tuple[Arrays, Arrays]:
    size = lambda x: x.shape[1] // 2
    return tuple(x[:, : size(x)] for x in arrays), tuple(x[:, size(x) :] for x in arrays)


def _operand(arrays: Arrays, is_other: Bool[Array, ""], others: Arrays | None = None) -> Operand:
    """These arrays, or the others of the same shapes."""
    _, num_rows, num_heads = arrays[0].shape[:3]
    return Operand(arrays, Box(0, num_rows, 0, num_heads), others, is_other)


def _mask(worker: Array, keys: Arrays, *, is_causal: bool) -> Mask:
    """All of these keys; or, causal, those up to each query, which are as many."""
    zero = 0 * worker
    return Mask(zero, zero, zero + keys[0].shape[1], is_causal=is_causal)


def _add_returned(sums: tuple[Arrays, Arrays], returned: tuple[Arrays, Arrays] | None) -> tuple[Arrays, Arrays]:
    """Workers to whom nothing was returned have received zeros."""
    if returned is None:
        return sums
    return add_valid(sums[0], returned[0], None), add_valid(sums[1], returned[1], None)
