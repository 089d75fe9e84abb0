"""The plan of a strategy, and the choice of one from what each would cost."""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, cast

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array

from distflash_jax import executor, placement, schedule
from distflash_jax.checks import check_arrays
from distflash_jax.collectives import AllGather, Ulysses
from distflash_jax.cost import MACHINES, Machine, Shape
from distflash_jax.double_ring import WithinNode
from distflash_jax.held import held
from distflash_jax.masks import AttentionMask, Band, Pass, Segments
from distflash_jax.placement import AnyMesh, Axis, names
from distflash_jax.rsa import RingSelfAttention
from distflash_jax.schedule import STRATEGIES, Strategy
from distflash_jax.spread import Spread
from distflash_jax.table import BOTH
from distflash_jax.timeline import predict
from distflash_jax.union import First, Union
from distflash_jax.zigzag_plan import Zigzag
from pallas_kernels.block import BlockAttention, Gradients, Partial

# What another strategy has to be faster by than balanced: predictions are no better than this, see docs/predictions.md.
MARGIN = 0.05
# What "auto" never takes, and why.
NEVER = {"zigzag": "tokens in the order of distflash_jax.zigzag", "rsa": "for comparison only: all scores in memory"}


class Plan(Protocol):
    """How a worker computes attention of its chunk; hashable. segments: those that make_plan returns with it."""

    def forward(self, q: Array, k: Array, v: Array, segments: Any) -> Partial: ...

    def backward(
        self, q: Array, k: Array, v: Array, dout: Array, lse: Array, delta: Array, segments: Any
    ) -> Gradients: ...


@dataclass(frozen=True)
class Settings:
    """What all strategies are told alike; see executor.Plan. rows, keys: of a worker's chunk."""

    kernel: BlockAttention
    axis: Axis
    num_heads: int
    kv_heads: int
    rows: int
    keys: int
    scale: float
    softcap: float | None
    deterministic: bool
    dtype: str | None = None


def make_plan(
    strategy: Strategy, mask: AttentionMask, settings: Settings, *, num_keys: int
) -> tuple[Plan, Segments | tuple[Segments | None, ...] | None]:
    """(the plan of any strategy but "auto", the segments that it takes). Called inside shard_map.

    num_keys: those of the whole sequence; chunks may be padded beyond it.

    Raises:
        ValueError: the strategy cannot take these arguments.
    """
    num_workers = lax.axis_size(settings.axis)
    if strategy == "zigzag":
        _check_zigzag(mask, settings, num_keys, num_workers)
        return Zigzag(settings.kernel, settings.axis, settings.scale, settings.deterministic), None
    passes = mask.passes(num_keys, settings.rows * num_workers)
    if len(passes) == 1:
        return _plan(strategy, passes[0].band, settings), passes[0].segments
    x = replace(settings, dtype="float32")

    def member(part: Pass) -> Plan:
        # Copies of many first keys would cost more than the messages of a table: workers keep these to themselves.
        if part.of == "all" or (part.of == "keys" and part.count > x.keys):
            return _plan(strategy, part.band, x)
        return First(x.kernel, x.axis, part.band, part.of, part.count, x.scale, x.softcap, x.deterministic)

    return Union(tuple(map(member, passes))), tuple(part.segments for part in passes)


def _plan(strategy: Strategy, band: Band, settings: Settings) -> Plan:
    """That of one pass."""
    x, axis, num_workers = settings, settings.axis, lax.axis_size(settings.axis)

    def table(axis: Axis, kv_heads: int, strategy: schedule.Table) -> executor.Plan:
        count = lax.axis_size(axis)
        pairs = band.pairs(count, x.rows * num_workers // count, x.keys * num_workers // count)
        steps = schedule.choose(strategy, count, kv_heads=kv_heads, pairs=pairs)
        return executor.Plan(steps, x.kernel, axis, band, x.scale, x.softcap, x.deterministic, x.dtype)

    if strategy == "ulysses":
        split = schedule.split_heads(x.num_heads, x.kv_heads, num_workers)
        return Ulysses(split, axis, table((), split.kv_heads, "balanced"))
    if strategy == "hybrid":
        if len(names(axis)) != 2:
            raise ValueError(f"axis={axis!r}: must be two axes with strategy='hybrid', such as ('node', 'gpu')")
        outer, inner = names(axis)
        if x.num_heads < lax.axis_size(inner):
            raise ValueError(
                f"q: number of heads {x.num_heads} must be at least the size {lax.axis_size(inner)} of mesh axis "
                f"{inner!r}, over which strategy='hybrid' deals them"
            )
        split = schedule.split_heads(x.num_heads, x.kv_heads, lax.axis_size(inner))
        return Ulysses(split, inner, table(outer, split.kv_heads, "balanced"))
    if strategy == "all_gather":
        return AllGather(x.kernel, axis, band, x.scale, x.softcap, x.deterministic, x.dtype)
    if strategy == "rsa":
        return RingSelfAttention(axis, band, x.scale, x.softcap, x.dtype)
    if strategy == "burst" and len(names(axis)) == 2:
        return _double_ring(band, x)
    return table(axis, x.kv_heads, cast(schedule.Table, strategy))


def _double_ring(band: Band, settings: Settings) -> Plan:
    """That of one pass, over two axes."""
    x, (outer, inner) = settings, names(settings.axis)
    nodes, workers = lax.axis_size(outer), lax.axis_size(inner)
    # Where chunks are of one length, those of a node lie to each other in the same way whatever its number.
    own = band if x.rows == x.keys else replace(band, is_causal=False, window=None)
    between, *within = schedule.double_ring(
        nodes,
        workers,
        kv_heads=x.kv_heads,
        pairs=band.pairs(nodes, x.rows * workers, x.keys * workers),
        own_pairs=own.pairs(workers, x.rows, x.keys),
    )
    plan = functools.partial(executor.Plan, scale=x.scale, softcap=x.softcap, deterministic=x.deterministic)
    # The positions that those within are told are shifted already.
    of_pieces = [plan(steps, x.kernel, inner, replace(band, shift=0)) for steps in within]
    kernel = cast(BlockAttention, WithinNode(*of_pieces))
    return plan(between, kernel, outer, band, dtype=x.dtype, inner=inner)


def _check_zigzag(mask: AttentionMask, settings: Settings, num_keys: int, num_workers: int) -> None:
    if not mask.is_causal:
        raise ValueError("causal=False: must be True with strategy='zigzag'")
    given = [name for name in mask.given if name != "is_causal"] + ["softcap"] * (settings.softcap is not None)
    if given:
        raise ValueError(f"{given[0]}: must be left out with strategy='zigzag', which is causal alone")
    if num_keys != settings.keys * num_workers or settings.keys % 2:
        raise ValueError(
            f"q: sequence length {num_keys} must be a multiple of {2 * num_workers}, two chunks for each of "
            f"{num_workers} workers, with strategy='zigzag'; distflash_jax.zigzag pads"
        )


class Estimate(NamedTuple):
    """What a worker is predicted to take for one attention call, forward and backward together.

    seconds: of both; forward: of the forward alone. received: bytes. held: most bytes at a time, beside the worker's
    own operands and results.
    """

    strategy: Strategy
    forward: float
    seconds: float
    received: float
    held: int


@dataclass(frozen=True)
class Explanation:
    """The strategy that "auto" takes, and why; str() is a table."""

    chosen: Strategy
    estimates: tuple[Estimate, ...]
    shape: Shape
    workers: tuple[int, ...]
    machine: Machine

    def __str__(self) -> str:
        s = self.shape
        lines = [
            f"{s.T} tokens, {s.N}/{s.K} heads of dim {s.H} on {' x '.join(map(str, self.workers))} workers of "
            f"{self.machine.name}, each with {s.B} x {s.T // math.prod(self.workers)} tokens:",
            f"{'':18}{'forward':>10}{'+ backward':>12}{'received':>12}{'held':>12}",
        ]
        for x in sorted(self.estimates, key=lambda x: x.seconds):
            remark = "  <- auto" if x.strategy == self.chosen else ""
            if x.strategy in NEVER:
                remark = f"  ({NEVER[x.strategy]})"
            lines.append(
                f"{x.strategy:18}{1e3 * x.forward:7.2f} ms{1e3 * x.seconds:9.2f} ms"
                f"{x.received / 2**20:8.1f} MiB{x.held / 2**20:8.1f} MiB{remark}"
            )
        return "\n".join(lines)


def explain_strategy(
    q: Array | jax.ShapeDtypeStruct,
    k: Array | jax.ShapeDtypeStruct,
    *,
    mesh: AnyMesh | None = None,
    axis: Axis = "seq",
    spec: PartitionSpec | None = None,
    causal: bool = True,
    machine: Machine | None = None,
) -> Explanation:
    """What strategy="auto" takes for such a call of distflash_attention, with the predictions behind it.

    Predictions are those of cost.py and timeline.py: with the rates of our kernels on H200s at head dim 128, whatever
    the device and the head dim, and with NVLink inside a host and 400 Gb/s of each GPU between hosts. "balanced" is
    taken unless another is predicted to be faster by 5 %. The memory that a device has is not looked at.

    Args:
        q, k: global arrays, or their shapes and dtypes.
        machine: in place of the one that the mesh tells.

    Raises:
        ValueError: as distflash_attention does.
    """
    q, k = cast(Array, q), cast(Array, k)
    check_arrays(q, k, k)
    found = placement.find_mesh(mesh, axis, q)
    spec = placement.find_spec(spec, found, axis, q)
    placement.check_divisible(q, k, found, spec)
    counts = [placement.size(found, names(entry)) for entry in spec]
    shape = Shape(
        max(q.shape[1], k.shape[1]), q.shape[2] // counts[2], k.shape[2] // counts[2], q.shape[3],
        q.shape[0] // counts[0], q.dtype.itemsize,
    )  # fmt: skip
    sizes = [found.shape[name] for name in names(axis)]
    return _explain(shape, sizes, machine or _find_machine(found, axis), is_causal=causal)


def choose(q: Array, k: Array, axis: Axis, mesh: AnyMesh | None, *, is_causal: bool) -> Strategy:
    """The strategy of "auto" for a worker's chunks. Called inside shard_map."""
    rows = max(q.shape[1], k.shape[1]) * lax.axis_size(axis)
    shape = Shape(rows, q.shape[2], k.shape[2], q.shape[3], q.shape[0], q.dtype.itemsize)
    sizes = [lax.axis_size(name) for name in names(axis)]
    return _explain(shape, sizes, _find_machine(mesh, axis), is_causal=is_causal).chosen


def _explain(shape: Shape, sizes: Sequence[int], machine: Machine, *, is_causal: bool) -> Explanation:
    machine = replace(machine, head_dim=shape.H)

    def estimate(strategy: Strategy) -> Estimate:
        has_two = len(sizes) == 2 and strategy in ("hybrid", "burst")
        spread = Spread(strategy, shape, tuple(sizes) if has_two else (math.prod(sizes),), is_causal)
        forward, seconds = (predict(spread, machine, x) for x in (BOTH[:1], BOTH))
        received = sum(float(spread.traffic(direction).size) for direction in BOTH)
        return Estimate(strategy, forward, seconds, received, max(held(spread, direction) for direction in BOTH))

    can = {"auto": False, "hybrid": len(sizes) == 2 and sizes[-1] <= shape.N, "zigzag": is_causal}
    estimates = {strategy: estimate(strategy) for strategy in STRATEGIES if can.get(strategy, True)}
    best = min((x for x in estimates.values() if x.strategy not in NEVER), key=lambda x: x.seconds)
    is_clear = best.seconds < (1 - MARGIN) * estimates["balanced"].seconds
    chosen = best.strategy if is_clear else "balanced"
    return Explanation(chosen, tuple(estimates.values()), shape, tuple(sizes), machine)


def _find_machine(mesh: AnyMesh | None, axis: Axis) -> Machine:
    """H200s, as many to a node as stand side by side along the axis on one host (JAX: in a slice).

    All of them where the mesh has no devices.
    """
    axes = names(axis)
    if isinstance(mesh, Mesh):
        places = [mesh.axis_names.index(name) for name in axes]
        devices = np.moveaxis(mesh.devices, places, range(-len(places), 0))
        lines = devices.reshape(-1, placement.size(mesh, axes))
    else:
        lines = np.array([jax.devices()])
    host = lambda device: getattr(device, "slice_index", device.process_index)
    size = min(len(list(group)) for line in lines for _, group in itertools.groupby(line, host))
    if size == lines.shape[1]:
        return MACHINES["h200-nvlink"]
    return replace(MACHINES["h200-nodes"], workers_per_node=size)
