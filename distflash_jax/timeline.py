"""When each kernel, message and merge of a strategy would run on a machine; workers.py has the rules."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from distflash_jax.cost import Cost, Machine, Shape, flops
from distflash_jax.schedule import TABLES, ring
from distflash_jax.spread import Exchange, Spread
from distflash_jax.table import Direction, Schedule
from distflash_jax.workers import Batch, Event, Kind, Numbers, Workers

# Bytes of memory that RSA reads and writes for each score, each line of rsa.py for itself: forward two float32 arrays
# of scores, their concatenation, both passes of the softmax, and weights twice. Counted, not measured.
RSA_BYTES: dict[Direction, int] = {"forward": 24, "backward": 50}


@dataclass(frozen=True)
class Timeline:
    """One attention call. events: those of the workers in `shown`, all if they are few.

    busy, exposed: seconds in which each worker computes or merges, and in which it waits for messages. makespan:
    seconds until the last one is done. schedule: of a table.
    """

    name: str
    shape: Shape
    machine: Machine
    directions: tuple[Direction, ...]
    is_causal: bool
    shown: tuple[int, ...]
    events: tuple[Event, ...]
    makespan: float
    busy: tuple[float, ...]
    exposed: tuple[float, ...]
    schedule: Schedule | None = None

    @property
    def num_workers(self) -> int:
        return len(self.busy)

    @functools.cached_property
    def efficiency(self) -> float:
        """Time of one worker alone, by the same rates, as a share of the machine time (workers x makespan)."""
        one = simulate(ring(1, is_causal=self.is_causal), self.shape, self.machine, self.directions)
        return one.makespan / (self.num_workers * self.makespan)

    @property
    def idle(self) -> tuple[float, ...]:
        """Share of the makespan in which each worker neither computes nor merges."""
        return tuple(1 - seconds / self.makespan for seconds in self.busy)


def simulate(
    schedule: Schedule, shape: Shape, machine: Machine, directions: Sequence[Direction] = ("forward",)
) -> Timeline:
    """The timeline of an attention call by a table: forward, backward, or one after the other.

    Raises:
        ValueError: the machine has no rates for this head dim.
    """
    workers = Workers(schedule.num_workers, shape.H, machine)
    for direction in directions:
        workers.start()
        workers.table(Cost(schedule, shape), direction)
    return _timeline(workers, schedule.name, shape, directions, schedule.is_causal, schedule)


def simulate_strategy(spread: Spread, machine: Machine, directions: Sequence[Direction] = ("forward",)) -> Timeline:
    """The timeline of an attention call by any strategy.

    Raises:
        ValueError: the machine has no rates for this head dim.
    """
    if spread.strategy in TABLES and not spread.is_double:
        return simulate(spread.table.schedule, spread.shape, machine, directions)
    spread = replace(spread, is_one_program=len(directions) > 1)
    rules = {"burst": _double_ring, "all_gather": _all_gather, "zigzag": _zigzag, "rsa": _rsa}
    workers = Workers(spread.num_workers, spread.shape.H, machine)
    for direction in directions:
        workers.start()
        rules.get(spread.strategy, _ulysses)(workers, spread, direction)
    return _timeline(workers, spread.strategy, spread.shape, directions, spread.is_causal)


def predict(spread: Spread, machine: Machine, directions: Sequence[Direction] = ("forward",)) -> float:
    """Seconds of an attention call by any strategy."""
    return simulate_strategy(spread, machine, directions).makespan


def _timeline(
    workers: Workers, name: str, shape: Shape, directions: Sequence[Direction], is_causal: bool,
    schedule: Schedule | None = None,
) -> Timeline:  # fmt: skip
    return Timeline(
        name, shape, workers.machine, tuple(directions), is_causal, workers.shown, tuple(workers.events),
        float(workers.ready.max()), tuple(workers.busy.tolist()), tuple(workers.exposed.tolist()), schedule,
    )  # fmt: skip


def _double_ring(workers: Workers, spread: Spread, direction: Direction) -> None:
    # What the tables within count for delta stands for the choice between a piece that was sent and an own one.
    workers.table(spread.table, direction, stride=spread.workers[1], within=spread.within)


def _ulysses(workers: Workers, spread: Spread, direction: Direction) -> None:
    """Of hybrid too. Heads and tokens change places in memory before and behind each exchange: read and written."""
    (before, after), size = spread.exchanges(direction), spread.workers[-1]
    copied = 4 * size / (size - 1) if size > 1 else 0.0
    _exchange(workers, direction, 0, "fetch", before, size, copied)
    last = workers.table(spread.table, direction, stride=size if spread.strategy == "hybrid" else 1)
    _exchange(workers, direction, last, "return", after, size, copied)


def _all_gather(workers: Workers, spread: Spread, direction: Direction) -> None:
    shape, P = spread.shape, spread.num_workers
    T, kernel = spread.rows * P, getattr(workers.machine, direction)
    rate = kernel.causal if spread.is_causal else kernel.full
    num_scores = shape.B * (T * (T + 1) // 2 if spread.is_causal else T * T) / P
    seconds = flops(direction, shape.N, shape.H, 1) * num_scores / rate.at(spread.rows)
    before, after = spread.exchanges(direction)
    _exchange(workers, direction, 0, "fetch", before, P, 1.0, is_gathered=True)
    workers.work((direction, 0, "compute", "own rows"), seconds)
    if direction == "backward" and P > 1:  # dk and dv of two halves of queries are added
        halves = 3 if spread.is_causal else 1
        workers.merge(direction, 1, halves * 2 * 4 * shape.B * T * shape.K * shape.H)
    _exchange(workers, direction, 1, "return", after, P, 1.0, is_gathered=True)


def _exchange(
    workers: Workers, direction: Direction, step: int, kind: Kind, exchange: Exchange, size: int, copied: float, *,
    is_gathered: bool = False,
) -> None:  # fmt: skip
    """A collective in groups of so many workers, of whose bytes so many times as many go through memory.

    is_gathered: keys and values enter a node once for all of its workers, as rings through all nodes bring them.
    """
    total = float(exchange.total.size)
    if not total:
        return
    in_node = min(workers.node, size)
    far = total * (size - in_node) / (size - 1)
    if is_gathered and far:
        far += float(exchange.kv.size) * (1 / in_node - (size - in_node) / (size - 1))
    workers.meet((direction, step, kind, "exchange"), size, total if is_gathered else total - far, far)
    workers.merge(direction, step, copied * total)


def _zigzag(workers: Workers, spread: Spread, direction: Direction) -> None:
    """Each step is two pairs of halves; two of the halves of its results are combined, and a third one again."""
    shape, P, rows = spread.shape, spread.num_workers, spread.rows
    kernel, of_score = getattr(workers.machine, direction), flops(direction, shape.N, shape.H, shape.B)
    own = of_score * (rows * (rows + 1) // 2) / kernel.causal.at(rows)
    both = of_score * (rows * rows // 2) / kernel.full.at(rows // 2)
    half = 2 * shape.B * (rows // 2) * shape.K * shape.H  # elements of k and v
    merged = 3 * 3 * (rows // 2) * shape.B * shape.N * shape.H * 4

    everyone = np.arange(P)

    def send(step: int, kind: Kind, issued: Numbers) -> Batch:
        """Second halves are seen by workers before their own only."""
        sources = (everyone - step) % P
        size = half * (1 + (everyone < sources)) * (shape.itemsize if kind == "fetch" else 4)
        label = (direction, step, kind, "k, v" if kind == "fetch" else "dk, dv")
        return workers.send(label, *((sources, everyone) if kind == "fetch" else (everyone, sources)), size, issued)

    for step in range(P):
        issued, batches = workers.ready, []
        if step > 1 and direction == "backward":
            batches.append(send(step - 1, "return", issued))
        if step + 1 < P:
            batches.append(send(step + 1, "fetch", issued))
        workers.merge(direction, step, merged if step else 0)
        name = lambda worker, step=step: f"keys of {(worker - step) % P}"
        workers.work((direction, step, "compute", ""), both if step else own, name)
        workers.wait(batches)
    if P > 1 and direction == "backward":
        workers.wait([send(P - 1, "return", workers.ready)])


def _rsa(workers: Workers, spread: Spread, direction: Direction) -> None:
    """Rounds of (what is passed on, what is summed up, matrix products); all scores are computed, seen or not."""
    shape, P, t = spread.shape, spread.num_workers, spread.rows
    rounds = [("k", "", 1), ("v", "", 1)]
    if direction == "backward":
        rounds = [("k", "", 1), ("v", "dv", 2), ("", "dk", 2)]
    scores = shape.B * t * t
    product = flops("forward", shape.N, shape.H, scores) / 2 / workers.machine.forward.full.at(t)
    in_memory = RSA_BYTES[direction] / len(rounds) * scores * shape.N / workers.machine.memory
    size = shape.B * t * shape.K * shape.H
    everyone = np.arange(P)
    for number, (passed, summed, products) in enumerate(rounds):
        for step in range(P + 1):
            issued, batches, at = workers.ready, [], number * P + step
            if summed and step > 1:
                label = (direction, at, "return", summed)
                batches.append(workers.send(label, everyone, (everyone + 1) % P, 4 * size, issued))
            if passed and step + 1 < P:
                label = (direction, at, "fetch", passed)
                batches.append(workers.send(label, everyone, (everyone + 1) % P, shape.itemsize * size, issued))
            if step < P:
                workers.work(
                    (direction, at, "compute", f"{passed or 'k'} of {step} before"), products * product + in_memory
                )
            workers.wait(batches)
