"""A table of who computes what when, and what follows from it: messages, parts, idle time, whether it is valid.

Worker w owns query chunk w and key/value chunk w. A task with a chunk that is not its worker's own fetches that chunk
and sends its results back. Everything else follows from the table: who sends what to whom, forward and backward, and
idle time. schedule.py makes tables.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal, NamedTuple

MERGED_AT_ONCE = 2  # steps; more would need more memory for what waits to be merged, fewer more passes over it

Cut = Literal["heads", "rows"]
Direction = Literal["forward", "backward"]
BOTH: tuple[Direction, ...] = ("forward", "backward")
Permutation = tuple[tuple[int, int], ...]  # (source worker, destination worker)


class Part(NamedTuple):
    """Slice number `index` of `count` equal slices of a chunk, cut along its heads or its rows (tokens)."""

    cut: Cut = "rows"
    index: int = 0
    count: int = 1


WHOLE = Part()


class Task(NamedTuple):
    """Attention of query chunk `q` against key/value chunk `kv`; of a part of the query's heads or rows, if cut."""

    q: int
    kv: int
    part: Part = WHOLE

    def __str__(self) -> str:
        """Such as q4.k0, or q4.k0/heads1 for the second slice of its heads."""
        suffix = f"/{self.part.cut}{self.part.index}" if self.part.count > 1 else ""
        return f"q{self.q}.k{self.kv}{suffix}"


class Side(NamedTuple):
    """One operand of a step: query side or key/value side.

    chunks: the chunk that each worker works on (its own where it idles). fetch: the messages that bring chunks which
    are not their worker's own; results travel along `returns`, the same way back. own, peer: the part of the chunk that
    tasks on own and on fetched chunks take.
    """

    chunks: tuple[int, ...]
    fetch: Permutation
    own: Part
    peer: Part

    @property
    def returns(self) -> Permutation:
        return tuple((destination, source) for source, destination in self.fetch)


@dataclass(frozen=True)
class Step:
    """One row of the table."""

    tasks: tuple[Task | None, ...]

    @functools.cached_property
    def q(self) -> Side:
        """The query side. Rows and heads of a cut task are those of its queries."""
        return _side(self.tasks, lambda task: task.q, lambda task: task.part)

    @functools.cached_property
    def kv(self) -> Side:
        """The key/value side. Cutting rows leaves the keys whole; cutting heads cuts the key/value heads alike."""
        return _side(self.tasks, lambda task: task.kv, lambda task: task.part if task.part.cut == "heads" else WHOLE)

    @property
    def active(self) -> tuple[bool, ...]:
        """Whether each worker has a task."""
        return tuple(task is not None for task in self.tasks)

    @functools.cached_property
    def is_diagonal(self) -> bool:
        """Whether each worker has its own chunks alone."""
        return all(task is not None and task.q == task.kv for task in self.tasks)


def _side(tasks: Sequence[Task | None], chunk: Callable[[Task], int], part: Callable[[Task], Part]) -> Side:
    chunks = tuple(worker if task is None else chunk(task) for worker, task in enumerate(tasks))
    parts: dict[bool, set[Part]] = {True: set(), False: set()}  # is the chunk the worker's own?
    for worker, task in enumerate(tasks):
        if task is not None:
            parts[chunk(task) == worker].add(part(task))
    if any(len(found) > 1 for found in parts.values()):
        raise ValueError(f"step {tasks}: all workers that fetch (or own) an operand must take the same part of it")
    own, peer = (next(iter(parts[is_own]), WHOLE) for is_own in (True, False))
    fetch = tuple((source, worker) for worker, source in enumerate(chunks) if source != worker)
    return Side(chunks, fetch, own, peer)


@dataclass(frozen=True)
class Schedule:
    """A valid table: every pair that the mask can see exactly once, own chunks first, fetches partial bijections.

    pairs: those that the mask can see, and the diagonal; if None all that there are, or are causal. See `within`.
    mirrors: whether the backward runs the mirrored table; see `towards`.

    Raises:
        ValueError: the table breaks one of these rules; the message names step and worker.
    """

    name: str
    is_causal: bool
    steps: tuple[Step, ...]
    pairs: frozenset[tuple[int, int]] | None = None
    mirrors: bool = False

    def __post_init__(self):
        _check_workers_own_an_operand(self)
        _check_fetches_are_bijections(self)
        _check_pairs_are_computed_once(self)
        _check_parts_are_of_the_diagonal(self)

    @property
    def num_workers(self) -> int:
        return len(self.steps[0].tasks)

    def towards(self, direction: Direction) -> "Schedule":
        """The table that runs forward or backward."""
        return self.mirrored if self.mirrors and direction == "backward" else self

    @functools.cached_property
    def mirrored(self) -> "Schedule":
        """The same tasks in the same steps, each by the worker that owns the other of its operands.

        Where queries stay and keys travel, keys then stay and queries travel.
        """

        def step(tasks: Sequence[Task | None]) -> Step:
            places = {task.q + task.kv - worker: task for worker, task in enumerate(tasks) if task is not None}
            return Step(tuple(places.get(worker) for worker in range(len(tasks))))

        return replace(self, steps=tuple(step(x.tasks) for x in self.steps))

    @functools.cached_property
    def q_parts(self) -> tuple[Part, ...]:
        """Those of a query chunk into which the diagonal is cut."""
        return tuple(sorted({step.q.own for step in self.steps if step.is_diagonal}))

    @functools.cached_property
    def kv_parts(self) -> tuple[Part, ...]:
        """Those of a key/value chunk."""
        return tuple(sorted({step.kv.own for step in self.steps if step.is_diagonal}))

    def work(self, task: Task | None) -> Fraction:
        """Cost of a task in units of one whole chunk pair; a causal diagonal is half a unit."""
        if task is None:
            return Fraction(0)
        return Fraction(1, 2 if self.is_causal and task.q == task.kv else 1) / task.part.count

    @property
    def makespan(self) -> Fraction:
        """Sum over the steps of the longest task, in units of one whole chunk pair."""
        return sum((max(map(self.work, step.tasks)) for step in self.steps), Fraction(0))

    @property
    def idle_fraction(self) -> Fraction:
        """Share of the machine time (workers x makespan) in which a worker waits for a longer task of the same step."""
        busy = sum((self.work(task) for step in self.steps for task in step.tasks), Fraction(0))
        return 1 - busy / (self.num_workers * self.makespan)

    def __str__(self) -> str:
        """The table as text: one line a step, one column a worker."""
        rows = [["-" if task is None else str(task) for task in step.tasks] for step in self.steps]
        width = max(len(cell) for row in rows for cell in row)
        lines = ["  ".join(cell.ljust(width) for cell in row).rstrip() for row in rows]
        return "\n".join(f"step {number}  {line}" for number, line in enumerate(lines))


def _check_workers_own_an_operand(schedule: Schedule) -> None:
    for number, step in enumerate(schedule.steps):
        if len(step.tasks) != schedule.num_workers:
            raise ValueError(f"step {number} has {len(step.tasks)} tasks for {schedule.num_workers} workers")
        for worker, task in enumerate(step.tasks):
            if task is not None and worker not in (task.q, task.kv):
                raise ValueError(f"step {number}: worker {worker} owns neither operand of {task}")
    if not schedule.steps[0].is_diagonal:
        raise ValueError(f"step 0 must be of the diagonal, got {schedule.steps[0].tasks}")


def _check_pairs_are_computed_once(schedule: Schedule) -> None:
    tasks = [task for step in schedule.steps for task in step.tasks if task is not None]
    # Pairs as numbers: there are half a million for a thousand workers.
    P, done = schedule.num_workers, {task.q * schedule.num_workers + task.kv for task in tasks}
    if schedule.pairs is None:
        wanted = set[int]().union(*(range(q * P, q * P + (q + 1 if schedule.is_causal else P)) for q in range(P)))
    else:
        wanted = {q * P + kv for q, kv in schedule.pairs}
    if done != wanted:
        missing, hidden = ({divmod(pair, P) for pair in pairs} for pairs in (wanted - done, done - wanted))
        raise ValueError(f"missing pairs {missing}, pairs that the mask hides {hidden}")
    parts: dict[tuple[int, int], list[Part]] = {}
    for task in tasks:
        if task.part is not WHOLE:
            parts.setdefault((task.q, task.kv), []).append(task.part)
    whole = [(task.q, task.kv) for task in tasks if task.part is WHOLE]
    if len(whole) + len(parts) > len(done):
        twice = next(pair for pair in whole if pair in parts or whole.count(pair) > 1)
        raise ValueError(f"pair {twice} must be computed exactly once")
    for pair, found in parts.items():
        if sorted(found) != [Part(found[0].cut, index, len(found)) for index in range(len(found))]:
            raise ValueError(f"pair {pair} must be computed exactly once, got the parts {found}")


def _check_parts_are_of_the_diagonal(schedule: Schedule) -> None:
    """A part of a result then lies in one of the arrays in which a worker sums its results; see executor.py."""
    cut = set(schedule.q_parts)
    for number, step in enumerate(schedule.steps):
        for task in step.tasks:
            if task is not None and task.part not in cut | {WHOLE}:
                raise ValueError(f"step {number}: {task} takes a part, but the diagonal is cut into {sorted(cut)}")


def _check_fetches_are_bijections(schedule: Schedule) -> None:
    for number, step in enumerate(schedule.steps):
        for fetch in (step.q.fetch, step.kv.fetch):
            sources = [source for source, _ in fetch]
            if len(set(sources)) != len(sources):
                raise ValueError(f"step {number}: a worker sends the same chunk twice: {fetch}")
