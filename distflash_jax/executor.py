"""Run a schedule on the workers of a mesh axis: fetch, compute, return, merge. Called inside shard_map.

Each step fetches what the next one needs before it computes, so that messages can travel behind the kernel; results of
tasks on fetched chunks go back the way the chunks came. Sums and merges over the steps are float32.

Source: DISTFLASHATTN, arXiv 2310.03294, algorithms 1 and 2.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from distflash_jax.merge import merge
from distflash_jax.schedule import Part, Permutation, Schedule, Side, Step
from pallas_kernels.block import BlockAttention, Box, Gradients, Operand
from pallas_kernels.masks import Mask

Arrays = tuple[Array, ...]
Combine = Callable[[Arrays, Arrays, Box, Bool[Array, ""]], Arrays]


@dataclass(frozen=True)
class Plan:
    """What does not change from call to call; hashable.

    axis: the mesh axis of the workers. num_keys: keys of the whole sequence; chunks may be padded beyond it.
    """

    schedule: Schedule
    kernel: BlockAttention
    axis: str
    num_keys: int
    scale: float
    deterministic: bool = False


def forward(
    plan: Plan, q: Float[Array, "B T N H"], k: Float[Array, "B S K H"], v: Float[Array, "B S K H"]
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """(out, lse) of this worker's queries against all keys; out in the dtype of q, lse float32."""
    steps = _run(plan, "forward", plan.kernel.forward, (q,), (k, v))
    _, _, _, total = next(steps)  # step 0 is the diagonal: every worker's own chunks, whole
    for step, queries, _, partial in steps:
        total = _collect(plan, total, partial, queries, step.q, _merge)
    out, lse = total
    return out.astype(q.dtype), lse


def backward(
    plan: Plan,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    dout: Float[Array, "B T N H"],
    lse: Float[Array, "B T N"],
    delta: Float[Array, "B T N"],
) -> Gradients:
    """(dq, dk, dv) of this worker's chunks, in the dtypes of q, k and v.

    lse is that of whole rows and delta = rowsum(dout * out) - dlse, so the gradients of all blocks simply add up.
    Helpers receive q, dout, lse and delta, never out; dk and dv travel summed over their group of heads.
    """
    kernel = functools.partial(plan.kernel.backward, deterministic=plan.deterministic)
    steps = _run(plan, "backward", kernel, (q, dout, lse, delta), (k, v))
    _, _, _, (dq, dk, dv) = next(steps)  # step 0 is the diagonal: every worker's own chunks, whole
    for step, queries, keys, partial in steps:
        (dq,) = _collect(plan, (dq,), partial[:1], queries, step.q, _add)
        dk, dv = _collect(plan, (dk, dv), partial[1:], keys, step.kv, _add)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


def _run(
    plan: Plan,
    direction: str,
    kernel: Callable[..., Arrays],
    q_side: Arrays,
    kv_side: Arrays,
) -> Iterator[tuple[Step, Operand, Operand, Arrays]]:
    """Each step with its operands and what the kernel made of them, while the next step's operands are on their way."""
    steps = plan.schedule.steps
    # What is merged or summed over steps is float32; one worker alone needs no more than the inputs' dtype.
    dtype = jnp.float32 if len(steps) > 1 else q_side[0].dtype
    fetched_q = fetched_kv = None
    for number, step in enumerate(steps):
        with jax.named_scope(f"{direction}_step_{number}"):
            queries = _operand(plan, q_side, fetched_q, step.q)
            keys = _operand(plan, kv_side, fetched_kv, step.kv)
            if number + 1 < len(steps):
                fetched_q = _fetch(plan, q_side, steps[number + 1].q)
                fetched_kv = _fetch(plan, kv_side, steps[number + 1].kv)
            with jax.named_scope("compute"):
                partial = kernel(queries, keys, _mask(plan, step, queries, keys), plan.scale, dtype=dtype)
            # The next step's sends depend on this kernel: memory for fetched chunks does not grow with the workers.
            q_side, kv_side, fetched_q, fetched_kv, partial = lax.optimization_barrier(
                (q_side, kv_side, fetched_q, fetched_kv, partial)
            )
            yield step, queries, keys, partial


def _fetch(plan: Plan, own: Arrays, side: Side) -> Arrays | None:
    """The parts of peers' chunks that this worker's task needs, one message an array; None if nobody fetches.

    Workers that fetch nothing themselves receive zeros and read their own chunk.
    """
    if not side.fetch:
        return None
    with jax.named_scope("fetch"):
        return _send(tuple(_box(side.peer, own[0]).take(x) for x in own), side.fetch, plan.axis)


def _send(arrays: Arrays, permutation: Permutation, axis: str) -> Arrays:
    return tuple(lax.ppermute(x, axis, permutation) for x in arrays)


def _operand(plan: Plan, own: Arrays, fetched: Arrays | None, side: Side) -> Operand:
    is_peer = _per_worker(plan, [chunk != worker for worker, chunk in enumerate(side.chunks)])
    return Operand(own, _box(side.own, own[0]), fetched, is_peer)


def _mask(plan: Plan, step: Step, queries: Operand, keys: Operand) -> Mask:
    """The mask of this worker's task; a worker without a task sees no key."""
    q, k = queries.own[0], keys.own[0]
    first_rows = [
        _box(step.q.own if chunk == worker else step.q.peer, q).row for worker, chunk in enumerate(step.q.chunks)
    ]
    return Mask(
        q_start=_per_worker(
            plan, [chunk * q.shape[1] + row for chunk, row in zip(step.q.chunks, first_rows, strict=True)]
        ),
        k_start=_per_worker(plan, [chunk * k.shape[1] for chunk in step.kv.chunks]),
        k_stop=_per_worker(plan, [plan.num_keys if is_active else 0 for is_active in step.active]),
        is_causal=plan.schedule.is_causal,
    )


def _collect(plan: Plan, total: Arrays, partial: Arrays, operand: Operand, side: Side, combine: Combine) -> Arrays:
    """The total with this step's results on the worker's own chunk: those it computed and those that peers return."""
    with jax.named_scope("merge"):
        total = combine(total, partial, operand.box, ~operand.is_peer)
    if not side.fetch:
        return total
    with jax.named_scope("return"):
        returned = _send(partial, side.returns, plan.axis)
    owners = [owner for owner, _ in side.fetch]
    is_owner = _per_worker(plan, [worker in owners for worker in range(plan.schedule.num_workers)])
    with jax.named_scope("merge"):
        return combine(total, returned, _box(side.peer, total[0]), is_owner)


def _merge(total: Arrays, partial: Arrays, box: Box, is_valid: Bool[Array, ""]) -> Arrays:
    """(out, lse) of `total` with a partial result of its box merged in, if valid."""
    (total_out, total_lse), (out, lse) = map(box.take, total), partial
    # A worker that receives nothing gets zeros, and 0 is a legal lse: only -inf says that no key was seen.
    merged = merge((total_out, total_lse), (out, jnp.where(is_valid, lse, -jnp.inf)))
    return tuple(map(box.put, total, merged))


def _add(total: Arrays, partial: Arrays, box: Box, is_valid: Bool[Array, ""]) -> Arrays:
    """`total` with a partial sum of its box added, if valid."""
    return tuple(box.put(x, box.take(x) + jnp.where(is_valid, y, 0.0)) for x, y in zip(total, partial, strict=True))


def _box(part: Part, chunk: Float[Array, "B T N ..."]) -> Box:
    _, num_rows, num_heads = chunk.shape[:3]
    if part.cut == "heads":
        size = num_heads // part.count
        return Box(0, num_rows, part.index * size, size)
    size = -(-num_rows // part.count)
    return Box(part.index * size, size, 0, num_heads)


def _per_worker(plan: Plan, values: Sequence[int | bool]) -> Array:
    """The value of this worker, at run time."""
    return jnp.asarray(values)[lax.axis_index(plan.axis)]
