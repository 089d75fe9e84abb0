"""The table of a distributed attention: steps[step].tasks[worker] = Task(q, kv, part) or None.

Worker w owns query chunk w and key/value chunk w. A task with a chunk that is not its worker's own fetches that chunk
and sends its results back. Everything else follows from the table: who sends what to whom, forward and backward, and
idle time. A new schedule is one function that returns a table; no reader asks which schedule it has.

Source: DISTFLASHATTN, arXiv 2310.03294, sections 3.1 and 3.2 and appendix B. Unlike its algorithm 2, the tables here
are complete for odd P (helpers work through step floor((P-1)/2)), and the last pairs of an even P are split between
owner and helper, so that nobody idles. Half of the diagonal, which needs no messages, comes first and half comes last:
the first fetch and the last return travel meanwhile.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal, NamedTuple, get_args

MERGED_AT_ONCE = 2  # steps; more would need more memory for what waits to be merged, fewer more passes over it

Cut = Literal["heads", "rows"]
Direction = Literal["forward", "backward"]
Table = Literal["balanced", "balanced_unsplit", "ring", "burst"]
Collective = Literal[
    "ulysses", "all_gather", "hybrid", "zigzag", "rsa"
]  # see collectives.py, zigzag_plan.py and rsa.py
Strategy = Literal["auto", Table, Collective]
TABLES: tuple[Table, ...] = get_args(Table)
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
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
    P = schedule.num_workers
    done, wanted = {task.q * P + task.kv for task in tasks}, set[int]()
    if schedule.pairs is not None:
        wanted = {q * P + kv for q, kv in schedule.pairs}
    for q in range(P if schedule.pairs is None else 0):
        wanted.update(range(q * P, q * P + (q + 1 if schedule.is_causal else P)))
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


@functools.cache
def balanced(num_workers: int, *, is_causal: bool = True, cut: Cut | None = "heads") -> Schedule:
    """Workers that have no keys left of their own rows help the rows at the end: makespan P/2, the ideal, for every P.

    At step s worker w takes (q_w, kv_{w-s}); where there is no such chunk, it helps with (q_{w-s+P}, kv_w). For even P
    step s = P/2 holds each pair once: owner and helper each take half of it, cut along heads or rows. Step 0 is cut
    alike, and its second half comes last. cut=None is the paper's own table: step 0 whole, and step P/2 left to the
    owner alone (1/(P+1) of the machine time is then idle).
    Without a causal mask all chunks cost the same, and the steps between the halves are those of `ring`.
    """
    name = "balanced" if cut else "balanced_unsplit"
    if not is_causal:
        return Schedule(name, is_causal, _between_halves(_ring_steps(num_workers, is_causal=False), cut))

    def task(step: int, worker: int) -> Task | None:
        is_shared = 2 * step == num_workers
        if worker >= step:
            return Task(worker, worker - step, Part(cut, 0, 2) if is_shared and cut else WHOLE)
        if is_shared:
            return Task(worker - step + num_workers, worker, Part(cut, 1, 2)) if cut else None
        return Task(worker - step + num_workers, worker)

    steps = tuple(
        Step(tuple(task(step, worker) for worker in range(num_workers))) for step in range(num_workers // 2 + 1)
    )
    return Schedule(name, is_causal, _between_halves(steps, cut))


def _between_halves(steps: tuple[Step, ...], cut: Cut | None) -> tuple[Step, ...]:
    """The steps with half of the first one, the diagonal, at either end, if there are others."""
    diagonal, *others = steps
    if cut is None or not others:
        return steps
    half = lambda i: Step(tuple(task and task._replace(part=Part(cut, i, 2)) for task in diagonal.tasks))
    return (half(0), *others, half(1))


@functools.cache
def ring(num_workers: int, *, is_causal: bool = True) -> Schedule:
    """Each worker goes through the keys before its own: worker w takes (q_w, kv_{w-s}) while w >= s. Unbalanced.

    Source: Ring Attention, arXiv 2310.01889, with direct sends in place of a rotation, so that nothing unused travels.
    """
    return Schedule("ring", is_causal, _ring_steps(num_workers, is_causal=is_causal))


def _ring_steps(num_workers: int, *, is_causal: bool) -> tuple[Step, ...]:
    return tuple(
        Step(
            tuple(
                Task(worker, (worker - step) % num_workers) if worker >= step or not is_causal else None
                for worker in range(num_workers)
            )
        )
        for step in range(num_workers)
    )


@functools.cache
def burst(num_workers: int, *, is_causal: bool = True, cut: Cut | None = "heads") -> Schedule:
    """The balanced table, its backward mirrored: there q, dout, lse, delta and dq travel in place of k, v, dk and dv.

    That is less where K = N, and more where K < N.

    Source: BurstAttention, arXiv 2403.09347, from which this backward is. There chunks rotate and the order of tokens
    balances; here they are sent directly and the table balances, as in `balanced`, so that tokens lie in natural order.
    """
    return replace(balanced(num_workers, is_causal=is_causal, cut=cut), name="burst", mirrors=True)


@functools.cache
def visible_pairs(
    num_workers: int,
    rows: int,
    keys: int,
    *,
    first: int | None = None,
    last: int | None = None,
    stop: int | None = None,
) -> frozenset[tuple[int, int]]:
    """(q, kv) of all chunks of so many queries and keys where a key lies from `first` to `last` tokens behind a query.

    None is no limit; before a query are negative numbers. stop: the keys that there are.
    """

    def sees(q: int, kv: int) -> bool:
        start, end = kv * keys, min((kv + 1) * keys, num_workers * keys if stop is None else stop)
        is_after = first is None or end - 1 >= q * rows + first
        return start < end and is_after and (last is None or start <= (q + 1) * rows - 1 + last)

    return frozenset((q, kv) for q in range(num_workers) for kv in range(num_workers) if sees(q, kv))


def window_pairs(window: int | None, num_workers: int, rows: int) -> frozenset[tuple[int, int]] | None:
    """Those of a causal window of so many tokens; None without."""
    return None if window is None else visible_pairs(num_workers, rows, rows, first=1 - window, last=0)


@functools.cache
def within(schedule: Schedule, pairs: frozenset[tuple[int, int]] | None) -> Schedule:
    """The table without what is neither of these pairs nor of the diagonal, and without steps of which nothing is left.

    That is balanced where a window is short beside the sequence: all workers but the first few have as many chunks
    before their own as it reaches.
    """
    if pairs is None:
        return schedule
    keep = lambda task: task if task and (task.q == task.kv or (task.q, task.kv) in pairs) else None
    tasks = [tuple(map(keep, step.tasks)) for step in schedule.steps]
    steps = tuple(Step(x) for x in tasks if any(x))
    diagonal = frozenset((worker, worker) for worker in range(schedule.num_workers))
    return schedule if steps == schedule.steps else replace(schedule, steps=steps, pairs=pairs | diagonal)


@functools.cache
def ahead(schedule: Schedule) -> Schedule:
    """The causal table with workers and chunks in reverse: each query sees what comes after it."""
    last = schedule.num_workers - 1
    mirror = lambda task: task and task._replace(q=last - task.q, kv=last - task.kv)
    steps = tuple(Step(tuple(map(mirror, reversed(step.tasks)))) for step in schedule.steps)
    pairs = visible_pairs(schedule.num_workers, 1, 1, first=0)
    return replace(schedule, is_causal=False, steps=steps, pairs=pairs)


def choose(
    strategy: Table,
    num_workers: int,
    *,
    kv_heads: int,
    is_causal: bool = True,
    pairs: frozenset[tuple[int, int]] | None = None,
) -> Schedule:
    """The table of a strategy, within these pairs, if given: causal if they are, or its reverse if no key comes before.

    A shared pair is cut along heads, or along rows where heads cannot be halved.
    """
    is_causal = is_causal if pairs is None else all(kv <= q for q, kv in pairs)
    is_ahead = not is_causal and pairs is not None and all(kv >= q for q, kv in pairs)
    if strategy == "ring":
        table = ring(num_workers, is_causal=is_causal or is_ahead)
    else:
        cut = "heads" if kv_heads % 2 == 0 else "rows"
        build = burst if strategy == "burst" else balanced
        table = build(num_workers, is_causal=is_causal or is_ahead, cut=None if strategy == "balanced_unsplit" else cut)
    return within(ahead(table) if is_ahead else table, pairs)


def double_ring(
    nodes: int,
    workers: int,
    *,
    kv_heads: int,
    is_causal: bool = True,
    pairs: frozenset[tuple[int, int]] | None = None,
) -> tuple[Schedule, Schedule, Schedule]:
    """(table between nodes, of pieces within one where its own chunks meet, and where others do); see double_ring.py.

    Between nodes only heads are cut, so that pieces are not: an odd number leaves the paper's own table.
    """
    cut = "heads" if kv_heads % 2 == 0 else None
    heads = kv_heads // 2 if cut and nodes > 1 else kv_heads
    own, others = (choose("burst", workers, kv_heads=heads, is_causal=x) for x in (is_causal, False))
    return within(burst(nodes, is_causal=is_causal, cut=cut), pairs), own, others


def zigzag_owner(chunk: int, num_workers: int) -> int:
    """The worker of one of 2P chunks in zigzag order, in which worker w has chunks w and 2P-1-w."""
    return min(chunk, 2 * num_workers - 1 - chunk)


def deal(num_workers: int) -> tuple[Permutation, Permutation]:
    """Messages by which first and second halves of chunks in natural order get into zigzag order.

    Half i is that of worker i // 2. A worker receives one half of each: chunk w, and chunk 2P-1-w.
    """
    halves = [(i // 2, zigzag_owner(i, num_workers)) for i in range(2 * num_workers)]
    return tuple(halves[::2]), tuple(halves[1::2])


class HeadSplit(NamedTuple):
    """How N query heads and K key/value heads are dealt to workers, each of which has whole sequences of its heads.

    Each key/value head goes to `copies` places, with `group` of its query heads each. A worker has `kv_heads` places.
    Padding are copies * group - N / K query heads behind each group, and the places behind those of the last head.
    """

    num_heads: int
    num_kv_heads: int
    num_workers: int
    group: int

    @property
    def copies(self) -> int:
        return -(-self.num_heads // self.num_kv_heads // self.group)

    @property
    def kv_heads(self) -> int:
        return -(-self.num_kv_heads * self.copies // self.num_workers)

    @property
    def q_heads(self) -> int:
        return self.kv_heads * self.group


def split_heads(num_heads: int, num_kv_heads: int, num_workers: int) -> HeadSplit:
    """The split in which a worker computes the fewest heads; of those, the one in which the fewest keys travel."""
    groups = range(1, num_heads // num_kv_heads + 1)
    splits = [HeadSplit(num_heads, num_kv_heads, num_workers, group) for group in groups]
    return min(splits, key=lambda split: (split.q_heads, split.kv_heads))
