"""The plan of a strategy, and the choice of one from what each would cost."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, cast

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array

from distflash_jax import executor, placement, schedule
from distflash_jax.collectives import AllGather, Ulysses
from distflash_jax.cost import MACHINES, Machine, Shape
from distflash_jax.double_ring import WithinNode
from distflash_jax.executor import Segments
from distflash_jax.placement import AnyMesh, Axis, names
from distflash_jax.rsa import RingSelfAttention
from distflash_jax.schedule import STRATEGIES, Direction, Strategy
from distflash_jax.spread import Spread
from distflash_jax.timeline import predict
from distflash_jax.zigzag_plan import Zigzag
from pallas_kernels.block import BlockAttention, Gradients, Partial

BOTH: tuple[Direction, ...] = ("forward", "backward")
# What another strategy has to be faster by than balanced: predictions are no better than this, see docs/predictions.md.
MARGIN = 0.05
# What "auto" never takes, and why.
NEVER = {"zigzag": "tokens in the order of distflash_jax.zigzag", "rsa": "for comparison only: all scores in memory"}


class Plan(Protocol):
    """How a worker computes attention of its chunk; hashable."""

    def forward(self, q: Array, k: Array, v: Array, segments: Segments | None) -> Partial: ...

    def backward(
        self, q: Array, k: Array, v: Array, dout: Array, lse: Array, delta: Array, segments: Segments | None
    ) -> Gradients: ...


@dataclass(frozen=True)
class Settings:
    """What all strategies are told alike; see executor.Plan."""

    kernel: BlockAttention
    axis: Axis
    num_keys: int
    scale: float
    is_causal: bool
    window: int | None
    softcap: float | None
    deterministic: bool


def make_plan(
    strategy: Strategy, *, num_heads: int, kv_heads: int, chunk: int, has_segments: bool, settings: Settings
) -> Plan:
    """The plan of any strategy but "auto", for a worker's chunk of so many tokens. Called inside shard_map.

    Raises:
        ValueError: the strategy cannot take these arguments.
    """
    x, axis = settings, settings.axis
    num_workers = lax.axis_size(axis)

    def table(axis: Axis, kv_heads: int, strategy: schedule.Table) -> executor.Plan:
        count = lax.axis_size(axis)
        reach = schedule.reach_of(x.window, chunk * num_workers // count)
        steps = schedule.choose(strategy, count, kv_heads=kv_heads, is_causal=x.is_causal, reach=reach)
        return executor.Plan(steps, x.kernel, axis, x.num_keys, x.scale, x.window, x.softcap, x.deterministic)

    if strategy == "ulysses":
        split = schedule.split_heads(num_heads, kv_heads, num_workers)
        return Ulysses(split, axis, table((), split.kv_heads, "balanced"))
    if strategy == "hybrid":
        if len(names(axis)) != 2:
            raise ValueError(f"axis={axis!r}: must be two axes with strategy='hybrid', such as ('node', 'gpu')")
        outer, inner = names(axis)
        if num_heads < lax.axis_size(inner):
            raise ValueError(
                f"q: number of heads {num_heads} must be at least the size {lax.axis_size(inner)} of mesh axis "
                f"{inner!r}, over which strategy='hybrid' deals them"
            )
        split = schedule.split_heads(num_heads, kv_heads, lax.axis_size(inner))
        return Ulysses(split, inner, table(outer, split.kv_heads, "balanced"))
    if strategy == "all_gather":
        return AllGather(x.kernel, axis, x.num_keys, x.scale, x.is_causal, x.window, x.softcap, x.deterministic)
    if strategy == "zigzag":
        if not x.is_causal:
            raise ValueError("causal=False: must be True with strategy='zigzag'")
        given = {"window": x.window is not None, "softcap": x.softcap is not None, "segment_ids": has_segments}
        if any(given.values()):
            name = next(name for name, is_given in given.items() if is_given)
            raise ValueError(f"{name}: must be left out with strategy='zigzag', which is causal alone")
        if x.num_keys != chunk * num_workers or chunk % 2:
            raise ValueError(
                f"q: sequence length {x.num_keys} must be a multiple of {2 * num_workers}, two chunks for each of "
                f"{num_workers} workers, with strategy='zigzag'; distflash_jax.zigzag pads"
            )
        return Zigzag(x.kernel, axis, x.scale, x.deterministic)
    if strategy == "burst" and len(names(axis)) == 2:
        if has_segments:
            raise ValueError("segment_ids: must be left out with strategy='burst' over two axes")
        outer, inner = names(axis)
        nodes, workers = lax.axis_size(outer), lax.axis_size(inner)
        reach = schedule.reach_of(x.window, chunk * workers)
        tables = schedule.double_ring(nodes, workers, kv_heads=kv_heads, is_causal=x.is_causal, reach=reach)
        between, own, others = (
            executor.Plan(steps, x.kernel, inner, x.num_keys, x.scale, x.window, x.softcap, x.deterministic)
            for steps in tables
        )
        return replace(between, kernel=cast(BlockAttention, WithinNode(own, others)), axis=outer, inner=inner)
    if strategy == "rsa":
        return RingSelfAttention(axis, x.num_keys, x.scale, x.is_causal, x.window, x.softcap)
    return table(axis, kv_heads, cast(schedule.Table, strategy))


class Estimate(NamedTuple):
    """What one attention call is predicted to take on one of its workers; forward and backward together, but for
    `forward`. seconds, and bytes received and at most held beside its own operands and results.
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
    found = mesh or jax.sharding.get_abstract_mesh()
    spec = placement.find_spec(spec or PartitionSpec(None, axis), found, axis, cast(Array, q))
    placement.check_divisible(cast(Array, q), cast(Array, k), found, spec)
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
        return Estimate(strategy, forward, seconds, received, max(map(spread.held, BOTH)))

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
