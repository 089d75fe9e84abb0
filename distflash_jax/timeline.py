"""When each kernel, message and merge of a table would run on a machine, by the rules of executor.py. Pure Python.

While step s computes, operands of step s + 1 and results of step s - 1 travel. A worker waits for both behind its
kernel, then sends, merges, and begins the next step. A message needs sender and receiver to have come that far, and
the links of both: those of a worker that go the same way travel one after the other. Not modelled: that kernels run
slower while messages travel, and the time by which cutting out a part delays its message.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from distflash_jax.cost import Amount, Cost, Direction, Machine, Message, Shape, Spread, flops
from distflash_jax.schedule import TABLES, Permutation, Schedule, ring

Kind = Literal["compute", "merge", "fetch", "return"]
KINDS: tuple[Kind, ...] = ("compute", "merge", "fetch", "return")


class Event(NamedTuple):
    """What a worker does from start to stop, in seconds; a message is an event of the worker that receives it.

    step: that of the task; merge is all that happens outside of kernels before step `step`. name: the task, or the
    arrays and where they come from. exposed: seconds in which the worker waits for this message and for none
    before it. Waiting for a sender that still computes is idle time, but not exposed.
    """

    worker: int
    direction: Direction
    step: int
    kind: Kind
    name: str
    start: float
    stop: float
    exposed: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """The events of one attention call."""

    schedule: Schedule
    shape: Shape
    machine: Machine
    directions: tuple[Direction, ...]
    events: tuple[Event, ...]

    @functools.cached_property
    def makespan(self) -> float:
        """Seconds until the last worker is done."""
        return max(event.stop for event in self.events)

    @property
    def efficiency(self) -> float:
        """Time of one worker alone, by the same rates, as a share of the machine time (workers x makespan)."""
        one = simulate(ring(1, is_causal=self.schedule.is_causal), self.shape, self.machine, self.directions)
        return one.makespan / (self.schedule.num_workers * self.makespan)

    @functools.cached_property
    def exposed(self) -> tuple[float, ...]:
        """Seconds in which each worker waits for messages."""
        return self._sum(lambda event: event.exposed)

    @functools.cached_property
    def idle(self) -> tuple[float, ...]:
        """Share of the makespan in which each worker neither computes nor merges."""
        busy = self._sum(lambda event: event.stop - event.start if event.kind in ("compute", "merge") else 0.0)
        return tuple(1 - seconds / self.makespan for seconds in busy)

    def _sum(self, seconds: Callable[[Event], float]) -> tuple[float, ...]:
        total = [0.0] * self.schedule.num_workers
        for event in self.events:
            total[event.worker] += seconds(event)
        return tuple(total)


def simulate(
    schedule: Schedule, shape: Shape, machine: Machine, directions: Sequence[Direction] = ("forward",)
) -> Timeline:
    """The timeline of an attention call: forward, backward, or one after the other.

    Raises:
        ValueError: the machine has no rates for this head dim.
    """
    if machine.head_dim != shape.H:
        raise ValueError(f"H={shape.H}: the rates of {machine.name} are those of head dim {machine.head_dim}")
    run = _Run(Cost(schedule, shape), machine)
    for direction in directions:
        run.add(direction)
    return Timeline(schedule, shape, machine, tuple(directions), tuple(run.events))


class _Run:
    """Workers on their way: when each is ready, and when its links, out and in, are free."""

    def __init__(self, cost: Cost, machine: Machine):
        self.cost, self.machine = cost, machine
        self.events: list[Event] = []
        self.ready, self.out, self.into = ([0.0] * cost.schedule.num_workers for _ in range(3))

    def add(self, direction: Direction) -> None:
        """All steps of one direction."""
        steps, memory = self.cost.schedule.steps, self.cost.memory(direction)
        if self.cost.schedule.num_workers > 1:
            self.ready = [seconds + self.machine.start for seconds in self.ready]
        for number, step in enumerate(steps):
            issued, arriving = list(self.ready), []
            if number:
                returns = self.cost.returns(direction, steps[number - 1])
                arriving += self._send(returns, issued, direction, number - 1, "return")
            if number + 1 < len(steps):
                fetches = self.cost.fetches(direction, steps[number + 1])
                arriving += self._send(fetches, issued, direction, number + 1, "fetch")
            self._work(direction, number, "merge", [(None, memory[number] / self.machine.memory)] * len(self.ready))
            kernels = [(task, self.machine.kernel_seconds(direction, self.cost, task)) for task in step.tasks]
            self._work(direction, number, "compute", kernels)
            self._wait(arriving)
        last = self.cost.returns(direction, steps[-1])
        self._wait(self._send(last, self.ready, direction, len(steps) - 1, "return"))
        self._work(direction, len(steps), "merge", [(None, memory[-1] / self.machine.memory)] * len(self.ready))

    def _work(self, direction: Direction, step: int, kind: Kind, work: Iterable[tuple[object, float]]) -> None:
        for worker, (name, seconds) in enumerate(work):
            if seconds:
                start, stop = self.ready[worker], self.ready[worker] + seconds
                self.events.append(Event(worker, direction, step, kind, str(name or "merge"), start, stop))
                self.ready[worker] = stop

    def _send(
        self, messages: Sequence[Message], issued: Sequence[float], direction: Direction, step: int, kind: Kind
    ) -> list[tuple[float, Event]]:
        """(when both ends are ready, event) of the messages of a step; arrays that travel together are one event."""
        together: dict[Permutation, list[Message]] = {}
        for message in messages:
            together.setdefault(message.permutation, []).append(message)
        events = []
        for permutation, arrays in together.items():
            names = ", ".join(message.name for message in arrays)
            seconds = sum(message.size for message in arrays) / self.machine.link
            for source, worker in permutation:
                possible = max(issued[source], issued[worker])
                start = max(possible, self.out[source], self.into[worker])
                self.out[source] = self.into[worker] = start + seconds
                stop = start + seconds + self.machine.latency
                event = Event(worker, direction, step, kind, f"{names} from {source}", start, stop)
                events.append((possible, event))
        return events

    def _wait(self, arriving: Iterable[tuple[float, Event]]) -> None:
        """Workers go on when all that they receive is there."""
        for possible, event in sorted(arriving, key=lambda pair: pair[1].stop):
            exposed = max(event.stop - max(self.ready[event.worker], possible), 0.0)
            self.ready[event.worker] = max(self.ready[event.worker], event.stop)
            self.events.append(event._replace(exposed=exposed))


def predict(
    spread: Spread, machine: Machine, directions: Sequence[Direction] = ("forward",), inner: Machine | None = None
) -> float:
    """Seconds of an attention call by any strategy; inner: the machine whose links join the inner workers of hybrid.

    Collectives of strategies that are no table travel behind nothing, and a step of zigzag takes as long as the longer
    of its kernels and its messages.

    Raises:
        ValueError: the machine has no rates for this head dim.
    """
    if spread.strategy in TABLES:
        return simulate(spread.table.schedule, spread.shape, machine, directions).makespan
    if spread.strategy in ("ulysses", "hybrid"):
        link = (inner or machine) if spread.strategy == "hybrid" else machine
        table = simulate(spread.table.schedule, spread.table.shape, machine, directions).makespan
        others = spread.workers[-1] - 1
        # Heads and tokens change places in memory before and behind each exchange: both read and written.
        copied = 4 * (others + 1) / others if others else 0.0
        exchanges = [amount for direction in directions for amount in spread.exchanges(direction)]
        starts = machine.start * len(directions) * (spread.strategy == "ulysses" and others > 0)
        return starts + table + sum(_exchange(amount, link, copied) for amount in exchanges)
    run = _zigzag if spread.strategy == "zigzag" else _all_gather
    return sum(run(spread, machine, direction) for direction in directions)


def _exchange(amount: Amount, machine: Machine, copied: float) -> float:
    """Seconds of collectives, of whose bytes so many times as many go through memory."""
    if not amount.size:
        return 0.0
    return machine.latency + float(amount.size) / machine.link + copied * float(amount.size) / machine.memory


def _all_gather(spread: Spread, machine: Machine, direction: Direction) -> float:
    shape, T = spread.shape, spread.rows * spread.num_workers
    kernel = machine.forward if direction == "forward" else machine.backward
    rate = kernel.causal if spread.is_causal else kernel.full
    num_scores = shape.B * (T * (T + 1) // 2 if spread.is_causal else T * T) / spread.num_workers
    seconds = flops(direction, shape.N, shape.H, 1) * num_scores / rate.at(spread.rows)
    if spread.num_workers == 1:
        return seconds
    if direction == "backward":  # dk and dv of two halves of queries are added
        seconds += (3 if spread.is_causal else 1) * 2 * 4 * shape.B * T * shape.K * shape.H / machine.memory
    return machine.start + seconds + sum(_exchange(amount, machine, 1.0) for amount in spread.exchanges(direction))


def _zigzag(spread: Spread, machine: Machine, direction: Direction) -> float:
    shape, rows, P = spread.shape, spread.rows, spread.num_workers
    kernel = machine.forward if direction == "forward" else machine.backward
    of_score = flops(direction, shape.N, shape.H, shape.B)
    own = of_score * (rows * (rows + 1) // 2) / kernel.causal.at(rows)
    if P == 1:
        return own
    step = of_score * (rows * rows // 2) / kernel.full.at(rows // 2)
    messages = [_exchange(amount, machine, 0.0) / (P - 1) for amount in spread.exchanges(direction)]
    # Two of the halves of the results are combined in a step, and a third one again: each read twice and written once.
    merged = 3 * 3 * (rows // 2) * shape.B * shape.N * shape.H * 4 / machine.memory
    return machine.start + max(own, messages[0]) + (P - 1) * (max(step, *messages) + merged) + messages[1]
