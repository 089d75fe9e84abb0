"""Workers of a simulation on their way: kernels, messages, collectives, and the steps of a table.

In a table (executor.py), operands of step s + 1 and results of step s - 1 travel while step s computes. A worker waits
for both behind its kernel, then sends, merges, and begins the next step. A message needs sender and receiver to have
come that far, and the links of both: those of a worker that go the same way travel one after the other, and apart from
them those to other nodes. A collective begins when all of its workers are there, and travels behind nothing.
Not modelled: that kernels run slower while messages travel, and by how much cutting out a part delays its message.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from distflash_jax.cost import FETCHED, RETURNED, Cost, Machine
from distflash_jax.schedule import Direction, Step

Kind = Literal["compute", "merge", "fetch", "return"]
KINDS: tuple[Kind, ...] = ("compute", "merge", "fetch", "return")
MOST_SHOWN = 64  # workers of which all events are kept; of more, those of SOME
SOME = 16


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


Label = tuple[Direction, int, Kind, str]  # as in Event
Numbers = np.ndarray  # one for each worker, or for each message


class Batch(NamedTuple):
    """Messages on their way, each from another source to another worker; possible: when both ends were ready."""

    label: Label
    sources: Numbers
    workers: Numbers
    possible: Numbers
    start: Numbers
    stop: Numbers


class Workers:
    """ready: when each of them is. busy, exposed: seconds in which it computes or merges, or waits for messages.

    shown: the workers whose events are kept.

    Raises:
        ValueError: the machine has no rates for this head dim.
    """

    def __init__(self, num_workers: int, head_dim: int, machine: Machine):
        if machine.head_dim != head_dim:
            raise ValueError(f"H={head_dim}: the rates of {machine.name} are those of head dim {machine.head_dim}")
        self.machine, self.node = machine, machine.workers_per_node or num_workers
        self.ready, self.busy, self.exposed, *free = np.zeros((7, num_workers))
        # (out free at, in free at, bytes/s) of the links within a node, and of those between.
        self.links = (free[0], free[1], machine.link), (free[2], free[3], machine.network)
        count = num_workers if num_workers <= MOST_SHOWN else SOME
        self.shown = tuple(worker * num_workers // count for worker in range(count))
        self.events: list[Event] = []

    def start(self) -> None:
        """The hosts of several workers meet."""
        if self.ready.size > 1:
            self.ready = self.ready + self.machine.start

    def work(self, label: Label, seconds: Numbers | float, name: Callable[[int], object] | None = None) -> None:
        """Each worker computes for so many seconds; name: what, if not as the label says."""
        seconds = np.broadcast_to(seconds, self.ready.shape)
        for worker in self.shown:
            if seconds[worker]:
                what, start = label[3] if name is None else str(name(worker)), float(self.ready[worker])
                self.events.append(Event(worker, *label[:3], what, start, start + float(seconds[worker])))
        self.busy = self.busy + seconds
        self.ready = self.ready + seconds

    def merge(self, direction: Direction, step: int, num_bytes: float) -> None:
        """What every worker reads and writes outside of kernels before a step."""
        if num_bytes:
            self.work((direction, step, "merge", "merge"), num_bytes / self.machine.memory)

    def send(self, label: Label, sources: Numbers, workers: Numbers, size: Numbers | float, issued: Numbers) -> Batch:
        """Messages of so many bytes, sent by workers that were ready at `issued`."""
        possible, size = np.maximum(issued[sources], issued[workers]), np.broadcast_to(size, sources.shape)
        start, stop = possible.copy(), possible.copy()
        is_near = sources // self.node == workers // self.node
        for chosen, (out, into, rate) in zip((is_near, ~is_near), self.links, strict=True):
            if chosen.any():
                ends = sources[chosen], workers[chosen]
                start[chosen] = np.maximum(np.maximum(possible[chosen], out[ends[0]]), into[ends[1]])
                stop[chosen] = out[ends[0]] = into[ends[1]] = start[chosen] + size[chosen] / rate
        return Batch(label, sources, workers, possible, start, stop + self.machine.latency)

    def wait(self, batches: Sequence[Batch]) -> None:
        """Workers go on when all that they receive is there."""
        if not batches:
            return
        stops, possible = np.full((2, len(batches), self.ready.size), -np.inf)
        for i, batch in enumerate(batches):
            stops[i, batch.workers], possible[i, batch.workers] = batch.stop, batch.possible
        exposed, everyone = np.zeros(stops.shape), np.arange(self.ready.size)
        for first in np.argsort(stops, axis=0, kind="stable"):
            stop = stops[first, everyone]
            exposed[first, everyone] = waited = np.maximum(stop - np.maximum(self.ready, possible[first, everyone]), 0)
            self.exposed = self.exposed + waited
            self.ready = np.maximum(self.ready, stop)
        for i, (label, sources, workers, _, start, stop) in enumerate(batches):
            for j in np.flatnonzero(np.isin(workers, self.shown)):
                name = f"{label[3]} from {sources[j]}"
                times = float(start[j]), float(stop[j]), float(exposed[i, workers[j]])
                self.events.append(Event(int(workers[j]), *label[:3], name, *times))

    def meet(self, label: Label, size: int, near: float, far: float) -> None:
        """A collective in groups of so many workers, each of which receives so many bytes from its node and others."""
        seconds = max(near / self.machine.link, far / self.machine.network if far else 0.0) + self.machine.latency
        start = self.ready.reshape(-1, size).max(axis=1).repeat(size)
        for worker in self.shown:
            self.events.append(Event(worker, *label, float(start[worker]), float(start[worker]) + seconds, seconds))
        self.exposed = self.exposed + seconds
        self.ready = start + seconds

    def table(
        self, cost: Cost, direction: Direction, *, stride: int = 1, number: int = 0,
        active: Numbers | None = None, within: Callable[[Step], Cost] | None = None,
    ) -> int:  # fmt: skip
        """All steps of a direction, of as many tables side by side as there are workers for; the next step's number.

        stride: from worker to worker of a table. number: of the first step. active: the workers that compute; all.
        within: the table that takes the place of a step's kernels, of the workers between those of this one.
        """
        steps, memory = cost.steps(direction), cost.memory(direction)
        size = len(steps[0].tasks)
        everyone = np.arange(self.ready.size)
        place, firsts = everyone // stride % size, everyone[everyone % (stride * size) < stride]
        inner = [within(step) if within else None for step in steps]
        numbers = [number]
        for table in inner:
            numbers.append(numbers[-1] + (1 if table is None else len(table.steps(direction))))
        known: dict[object, float] = {}

        def send(step: int, kind: Kind, issued: Numbers) -> list[Batch]:
            batches = []
            for side_of, names in (FETCHED if kind == "fetch" else RETURNED)[direction].items():
                side = getattr(steps[step], side_of)
                if side.fetch:
                    ends = (firsts[:, None, None] + stride * np.array(side.fetch)).reshape(-1, 2).T
                    sources, workers = ends if kind == "fetch" else ends[::-1]
                    num_bytes = sum(cost.size(name, side.peer) for name in names)
                    label = (direction, numbers[step], kind, ", ".join(names))
                    batches.append(self.send(label, sources, workers, num_bytes, issued))
            return batches

        def seconds(step: Step) -> Numbers:
            found = []
            for task in step.tasks:
                key = task and (task.q - task.kv, task.part)
                if key not in known:
                    known[key] = self.machine.kernel_seconds(direction, cost, task)
                found.append(known[key])
            return np.array(found)[place]

        for i, step in enumerate(steps):
            issued, batches = self.ready, []
            if i:
                batches += send(i - 1, "return", issued)
            if i + 1 < len(steps):
                batches += send(i + 1, "fetch", issued)
            self.merge(direction, numbers[i], memory[i])
            if (table := inner[i]) is not None:
                self.table(table, direction, number=numbers[i], active=np.array(step.active)[place])
            else:
                found = seconds(step) if active is None else seconds(step) * active
                self.work(
                    (direction, numbers[i], "compute", ""), found, lambda worker, tasks=step.tasks: tasks[place[worker]]
                )
            self.wait(batches)
        self.wait(send(len(steps) - 1, "return", self.ready))
        self.merge(direction, numbers[-1], memory[-1])
        return numbers[-1]
