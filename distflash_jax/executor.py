"""Run a schedule on the workers of a mesh axis: fetch, compute, return, merge. Called inside shard_map.

Each step fetches what the next one needs before it computes, and results of tasks on fetched chunks go back the way the
chunks came while the next step computes: messages can travel behind kernels. Sums and merges over steps are float32.

Source: DISTFLASHATTN, arXiv 2310.03294, algorithms 1 and 2.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from distflash_jax.masks import Band, Segments
from distflash_jax.placement import Axis
from distflash_jax.table import MERGED_AT_ONCE, WHOLE, Part, Permutation, Schedule, Side, Step
from pallas_kernels.block import BlockAttention, Box, Gradients, Operand, Partial
from pallas_kernels.masks import Mask
from pallas_kernels.merge import Arrays, add_valid, merge_valid

Combine = Callable[[Arrays | None, Arrays, Bool[Array, ""] | None], Arrays]


@dataclass(frozen=True)
class Plan:
    """What does not change from call to call; hashable.

    axis: the mesh axis of the workers, or several; () for one alone. softcap: see distflash_attention. dtype: of out
    and of gradients; that of the inputs if None. inner: an axis over whose workers each chunk is spread, for which the
    kernel then has to know; see double_ring.py.
    """

    schedule: Schedule
    kernel: BlockAttention
    axis: Axis
    band: Band
    scale: float
    softcap: float | None = None
    deterministic: bool = False
    dtype: str | None = None
    inner: Axis = ()

    def forward(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B S K H"],
        v: Float[Array, "B S K H"],
        segments: Segments | None = None,
        place: Mask | None = None,
        alongside: Sequence["Passing"] = (),
    ) -> Partial:
        """(out, lse) of this worker's queries against all keys; out in the dtype of the plan or of q, lse float32.

        place: the mask of this worker's own chunks, if they do not lie where its number says. alongside: messages of a
        table around this one, to be sent with its steps.
        """
        results = [_Total("q", (0, 1), merge_valid)]
        dtypes = (self.dtype or q.dtype, jnp.float32)
        out, lse = _run(self, "forward", self.kernel.forward, (q,), (k, v), segments, place, results, dtypes, alongside)
        return out, lse

    def backward(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B S K H"],
        v: Float[Array, "B S K H"],
        dout: Float[Array, "B T N H"],
        lse: Float[Array, "B T N"],
        delta: Float[Array, "B T N"],
        segments: Segments | None = None,
        place: Mask | None = None,
        alongside: Sequence["Passing"] = (),
    ) -> Gradients:
        """(dq, dk, dv) of this worker's chunks, in the dtype of the plan or those of q, k and v.

        place, alongside: as in forward.

        By the table's own steps or by the mirrored ones, see Schedule.towards.

        lse is that of whole rows and delta = rowsum(dout * out) - dlse, so the gradients of all blocks simply add up.
        Helpers receive q, dout, lse and delta, never out; dk and dv travel summed over their group of heads.
        """
        plan = replace(self, schedule=self.schedule.towards("backward"))
        kernel = functools.partial(plan.kernel.backward, deterministic=plan.deterministic)
        results = [_Total("q", (0,), add_valid), _Total("kv", (1, 2), add_valid)]
        dtypes = [plan.dtype or x.dtype for x in (q, k, v)]
        q_side = (q, dout, lse, delta)
        dq, dk, dv = _run(plan, "backward", kernel, q_side, (k, v), segments, place, results, dtypes, alongside)
        return dq, dk, dv


class _Total:
    """Results on this worker's own chunk so far, for each part into which the diagonal is cut.

    side: "q" or "kv", that of the chunk. indices: which of the kernel's results. combine: two of them into one.
    """

    def __init__(self, side: str, indices: Sequence[int], combine: Combine):
        self.side, self.indices, self.combine = side, indices, combine
        self.parts: dict[Part, Arrays] = {}

    def include(self, plan: Plan, part: Part, partial: Arrays, is_valid: Bool[Array, ""] | None) -> None:
        """Takes in results of a part of the chunk; is_valid: whether they are for this worker, None if for all."""
        for own in getattr(plan.schedule, f"{self.side}_parts"):
            if part not in (own, WHOLE):
                continue
            piece = partial if part == own else tuple(_box(own, x).take(x) for x in partial)
            self.parts[own] = self.combine(self.parts.get(own), piece, is_valid)

    def whole(self, num_rows: int) -> Arrays:
        """The results of the whole chunk, of so many rows."""
        parts = sorted(self.parts)
        axis = 2 if parts[0].cut == "heads" else 1
        arrays = zip(*(self.parts[part] for part in parts), strict=True)
        return tuple(jnp.concatenate(pieces, axis)[:, :num_rows] for pieces in arrays)


def _run(
    plan: Plan,
    direction: str,
    kernel: Callable[..., Arrays],
    q_side: Arrays,
    kv_side: Arrays,
    segments: Segments | None,
    place: Mask | None,
    totals: Sequence[_Total],
    dtypes: Sequence[DTypeLike],
    alongside: Sequence["Passing"],
) -> Arrays:
    """What the kernel makes of all steps, on this worker's own chunks: the results of all totals, in these dtypes."""
    steps = plan.schedule.steps
    # What is merged or summed over steps is float32; one worker alone needs no more than the dtype of the results.
    dtype = jnp.float32 if len(steps) > 1 else dtypes[0]
    lengths = {"q": q_side[0].shape[1], "kv": kv_side[0].shape[1]}
    fetched_q = fetched_kv = returned = None
    for number, step in enumerate(steps):
        with jax.named_scope(f"{direction}_step_{number}"):
            queries = _operand(plan, q_side, fetched_q, step.q)
            keys = _operand(plan, kv_side, fetched_kv, step.kv)
            if number + 1 < len(steps):
                fetched_q = _fetch(plan, q_side, steps[number + 1].q)
                fetched_kv = _fetch(plan, kv_side, steps[number + 1].kv)
            pieces = [messages.send(number, len(steps)) for messages in alongside]
            with jax.named_scope("compute"):
                mask = _mask(plan, step, queries, keys, segments, place)
                passing = [x for x in (fetched_q, fetched_kv, *(returned or ())) if isinstance(x, Passing)]
                options = {"alongside": passing} if plan.inner else {}
                partial = kernel(queries, keys, mask, plan.scale, plan.softcap, dtype, **options)
            # The next step's sends depend on this kernel: memory for messages does not grow with the workers. And what
            # the step before returns is not waited for until this kernel is done.
            fetched_q, fetched_kv, returned = map(_arrived, (fetched_q, fetched_kv, returned))
            q_side, kv_side, fetched_q, fetched_kv, partial, returned, pieces = _pace(
                (q_side, kv_side, fetched_q, fetched_kv, partial, returned, pieces),
                totals if number % MERGED_AT_ONCE == 0 and number + 1 < len(steps) else (),
            )
            for messages, piece in zip(alongside, pieces, strict=True):
                messages.pieces.append(piece)
            _include_returned(plan, totals, steps[number - 1], returned)
            returned = _return(plan, totals, step, partial)
            with jax.named_scope("merge"):
                for total in totals:
                    side, operand = getattr(step, total.side), {"q": queries, "kv": keys}[total.side]
                    is_own = ~operand.is_peer if side.fetch else None
                    total.include(plan, side.own, tuple(partial[i] for i in total.indices), is_own)
    with jax.named_scope(f"{direction}_step_{len(steps) - 1}"):
        _include_returned(plan, totals, plan.schedule.steps[-1], _arrived(returned))
        with jax.named_scope("merge"):
            arrays = [x for total in totals for x in total.whole(lengths[total.side])]
            return tuple(x.astype(dtype) for x, dtype in zip(arrays, dtypes, strict=True))


def _pace[Tree](arrays: Tree, totals: Sequence[_Total]) -> Tree:
    """The arrays, none of which is used before all of them are there, and with them these totals.

    XLA puts all merges between two such points into one pass over memory, and keeps until then what is merged.
    """
    arrays, parts = lax.optimization_barrier((arrays, [total.parts for total in totals]))
    for total, merged in zip(totals, parts, strict=True):
        total.parts = merged
    return arrays


class Passing:
    """Messages that a table within sends, some of their rows with each of its steps, and so behind all of its kernels.

    XLA would send them whole behind the last one.
    """

    def __init__(self, arrays: Arrays, permutation: Permutation, axis: Axis):
        self.arrays, self.permutation, self.axis = arrays, permutation, axis
        self.pieces: list[Arrays] = []

    def send(self, index: int, count: int) -> Arrays:
        """This one of so many pieces, which is empty behind the last row."""
        size = -(-self.arrays[0].shape[1] // count)
        piece = tuple(x[:, index * size : (index + 1) * size] for x in self.arrays)
        return _send(piece, self.permutation, self.axis) if piece[0].size else piece

    def arrived(self) -> Arrays:
        """Whole; sent now what no table has sent."""
        return tuple(jnp.concatenate(x, axis=1) for x in zip(*(self.pieces or [self.send(0, 1)]), strict=True))


def _arrived(messages: Any) -> Any:
    """A tree of messages, or of arrays, as arrays."""
    is_passing = lambda x: isinstance(x, Passing)
    return jax.tree.map(lambda x: x.arrived() if is_passing(x) else x, messages, is_leaf=is_passing)


def _return(plan: Plan, totals: Sequence[_Total], step: Step, partial: Arrays) -> list[Any]:
    """For each total what peers made of this worker's chunk, one message an array; None if nobody fetched it."""
    with jax.named_scope("return"):
        return [
            _pass(plan, tuple(partial[i] for i in total.indices), side.returns) if side.fetch else None
            for total in totals
            for side in [getattr(step, total.side)]
        ]


def _include_returned(
    plan: Plan, totals: Sequence[_Total], step: Step, returned: Sequence[Arrays | None] | None
) -> None:
    with jax.named_scope("merge"):
        for total, arrays in zip(totals, returned or (), strict=False):
            if arrays is not None:
                side = getattr(step, total.side)
                owners = [owner for owner, _ in side.fetch]
                is_owner = _per_worker(plan, [worker in owners for worker in range(plan.schedule.num_workers)])
                total.include(plan, side.peer, arrays, is_owner)


def _fetch(plan: Plan, own: Arrays, side: Side) -> Any:
    """The parts of peers' chunks that this worker's task needs, one message an array; None if nobody fetches.

    Workers that fetch nothing themselves receive zeros and read their own chunk.
    """
    if not side.fetch:
        return None
    with jax.named_scope("fetch"):
        return _pass(plan, tuple(_box(side.peer, own[0]).take(x) for x in own), side.fetch)


def _pass(plan: Plan, arrays: Arrays, permutation: Permutation) -> "Arrays | Passing":
    """Sent at once, or handed to the table that is this plan's kernel."""
    messages = Passing(arrays, permutation, plan.axis)
    return messages if plan.inner else _send(arrays, permutation, plan.axis)


def _send(arrays: Arrays, permutation: Permutation, axis: Axis) -> Arrays:
    return tuple(lax.ppermute(x, axis, permutation) for x in arrays)


def _operand(plan: Plan, own: Arrays, fetched: Arrays | None, side: Side) -> Operand:
    is_peer = _per_worker(plan, [chunk != worker for worker, chunk in enumerate(side.chunks)])
    return Operand(own, _box(side.own, own[0]), fetched, is_peer)


def _mask(
    plan: Plan, step: Step, queries: Operand, keys: Operand, segments: Segments | None, place: Mask | None
) -> Mask:
    """The mask of this worker's task; a worker without a task sees no key."""
    q, k = queries.own[0], keys.own[0]
    first_rows = [
        _box(step.q.own if chunk == worker else step.q.peer, q).row for worker, chunk in enumerate(step.q.chunks)
    ]
    ids = None
    if segments is not None:
        ids = (
            _segments(plan, segments.q, step.q, queries),
            _segments(plan, segments.kv, step.kv, keys),
        )
    size = lax.axis_size(plan.inner)  # of the chunks, each worker has one piece in so many
    q_rows, k_rows = size * q.shape[1], size * k.shape[1]
    q_start = _per_worker(plan, [chunk * q_rows + row for chunk, row in zip(step.q.chunks, first_rows, strict=True)])
    k_start = _per_worker(plan, [chunk * k_rows for chunk in step.kv.chunks])
    if size > 1:
        piece = lax.axis_index(plan.inner)
        q_start, k_start = q_start + piece * q.shape[1], k_start + piece * k.shape[1]
    if place is not None:
        worker = lax.axis_index(plan.axis)
        q_start, k_start = place.q_start - worker * q_rows + q_start, place.k_start - worker * k_rows + k_start
    mask = plan.band.mask(q_start, k_start, ids, is_active=_per_worker(plan, step.active))
    return mask if place is None else replace(mask, k_stop=jnp.minimum(mask.k_stop, place.k_stop))


def _segments(plan: Plan, ids: Int[Array, "B PT"], side: Side, operand: Operand) -> Int[Array, "B rows"]:
    """Those of the rows of an operand of this worker's task."""
    chunks = ids.reshape(ids.shape[0], plan.schedule.num_workers, -1)
    chunk = lax.dynamic_index_in_dim(chunks, _per_worker(plan, side.chunks), axis=1, keepdims=False)[..., None]
    take = lambda part: _box(part, chunk)._replace(head=0, num_heads=1).take(chunk)[..., 0]
    return jnp.where(operand.is_peer, take(side.peer), take(side.own)) if side.fetch else take(side.own)


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
