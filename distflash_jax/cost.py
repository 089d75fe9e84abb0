"""What a table costs: FLOPs, bytes and, on a machine, seconds of its kernels, messages and merges. Pure Python.

Nothing here is tuned to the predictions: a machine has the rates of the kernels alone on one GPU, of one message alone,
and of its memory; timeline.py puts them in order. Valid where the rates were measured: chunks of 4096 tokens and more.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal, NamedTuple, cast

from distflash_jax.schedule import (
    MERGED_AT_ONCE,
    TABLES,
    WHOLE,
    HeadSplit,
    Part,
    Permutation,
    Schedule,
    Side,
    Step,
    Strategy,
    Table,
    Task,
    choose,
    split_heads,
)

Direction = Literal["forward", "backward"]
Arrays = dict[str, tuple[str, ...]]  # names, by the side of the task
# In units of the forward's FLOPs. A backward makes five matrix products where a forward makes two.
WORK: dict[Direction, float] = {"forward": 1, "backward": 2.5}

# The arrays that executor.py sends, for each side of a task: operands there, results back.
FETCHED: dict[Direction, Arrays] = {
    "forward": {"q": ("q",), "kv": ("k", "v")},
    "backward": {"q": ("q", "dout", "lse", "delta"), "kv": ("k", "v")},
}
RETURNED: dict[Direction, Arrays] = {
    "forward": {"q": ("out", "lse")},
    "backward": {"q": ("dq",), "kv": ("dk", "dv")},
}
KV_HEADS = {"k", "v", "dk", "dv"}  # these have key/value heads, all others query heads
ONE_PER_ROW = {"lse", "delta"}  # of each head; all others have the head dim
FLOAT32 = {"lse", "delta", "out", "dq", "dk", "dv"}  # results are merged and summed in float32, and travel so


def flops(direction: Direction, num_heads: int, head_dim: int, num_scores: int) -> float:
    """Two matrix products of 2 * H FLOPs for each visible score and query head; 2.5 times as many backward."""
    return 4 * WORK[direction] * num_heads * head_dim * num_scores


@dataclass(frozen=True)
class Shape:
    """T tokens of the whole sequence, N query heads, K key/value heads of dim H; q, k and v have so many bytes each.

    window: a causal query sees itself and the window - 1 keys before it; None is no limit.

    Raises:
        ValueError: names the field, its value and what is allowed.
    """

    T: int
    N: int = 32
    K: int = 32
    H: int = 128
    B: int = 1
    itemsize: int = 2
    window: int | None = None

    def __post_init__(self):
        for name, value in vars(self).items():
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")
        if self.N % self.K:
            raise ValueError(f"N={self.N}: must be a multiple of K={self.K}")


class Message(NamedTuple):
    """An array that travels along a permutation; size: bytes that each pair of workers sends."""

    name: str
    permutation: Permutation
    size: int


@dataclass(frozen=True)
class Cost:
    """FLOPs and bytes of an attention call of this shape by this table."""

    schedule: Schedule
    shape: Shape

    @property
    def rows(self) -> int:
        """Tokens of a chunk, padding included."""
        return -(-self.shape.T // self.schedule.num_workers)

    def flops(self, direction: Direction, task: Task | None) -> float:
        """FLOPs of a task on the scores that are visible in it."""
        if task is None:
            return 0.0
        first, last, num_heads = self._box(task.part, self.shape.N)
        num_scores = (last - first) * self.rows
        if self.schedule.is_causal:
            # Keys of its chunk up to the position of the first row, which is number 0 where both chunks are the same.
            offset = (task.q - task.kv) * self.rows + 1
            num_scores = _visible(offset + first, offset + last, self.rows)
            if self.shape.window is not None:
                before = offset - self.shape.window
                num_scores -= _visible(before + first, before + last, self.rows)
        return flops(direction, num_heads, self.shape.H, self.shape.B * num_scores)

    def fetches(self, direction: Direction, step: Step) -> tuple[Message, ...]:
        """What travels before a step."""
        return self._messages(FETCHED[direction], step, lambda side: side.fetch)

    def returns(self, direction: Direction, step: Step) -> tuple[Message, ...]:
        """What travels after a step."""
        return self._messages(RETURNED[direction], step, lambda side: side.returns)

    def _messages(self, arrays: Arrays, step: Step, permutation: Callable[[Side], Permutation]) -> tuple[Message, ...]:
        sides = [(names, getattr(step, key)) for key, names in arrays.items()]
        return tuple(
            Message(name, permutation(side), self.size(name, side.peer))
            for names, side in sides
            if side.fetch
            for name in names
        )

    def traffic(self, direction: Direction) -> Fraction:
        """Bytes that a worker receives on average, and sends."""
        messages = (
            message
            for step in self.schedule.steps
            for message in self.fetches(direction, step) + self.returns(direction, step)
        )
        return sum((Fraction(x.size * len(x.permutation)) for x in messages), Fraction(0)) / self.schedule.num_workers

    def elements(self, direction: Direction) -> Fraction:
        """Those of the arrays that a worker receives on average, and sends."""
        total = Fraction(0)
        for step in self.schedule.steps:
            for name, permutation, size in self.fetches(direction, step) + self.returns(direction, step):
                total += Fraction(size * len(permutation), self.width(name))
        return total / self.schedule.num_workers

    def width(self, name: str) -> int:
        """Bytes of an element of an array."""
        return 4 if name in FLOAT32 else self.shape.itemsize

    def held(self, direction: Direction) -> int:
        """Most bytes that a worker holds at a time beside its own operands and results.

        Those are the operands of a step and of the next, the results of a step and of the one before on their way, and
        the sums of its own.
        """
        sides = ("q", "kv")
        size = lambda names, part: self._size(names, part)
        fetched = [
            sum(size(FETCHED[direction][key], getattr(step, key).peer) for key in sides if getattr(step, key).fetch)
            for step in self.schedule.steps
        ]
        if len(fetched) == 1:
            return 0
        results = RETURNED[direction]
        returned = [
            sum(size(names, getattr(step, key).peer) for key, names in results.items() if getattr(step, key).fetch)
            for step in self.schedule.steps
        ]
        totals = sum(size(names, WHOLE) for names in results.values())
        pairs = zip(fetched, [*fetched[1:], 0], returned, [0, *returned[:-1]], strict=True)
        return totals + max(map(sum, pairs)) + totals  # and what the kernel makes in this step

    def memory(self, direction: Direction) -> tuple[int, ...]:
        """Bytes that each worker reads and writes outside of kernels: before each step, and after the last.

        Those are delta, parts that are cut out to be sent, results that are merged or added, and the last cast. All
        workers run the same program: what is masked out costs the same.
        """
        steps = self.schedule.steps
        amounts = [self._cut(direction, step) for step in steps[1:]] + [0, 0]
        if direction == "backward":
            amounts[0] += self.size("q") + self.size("dout") + self.size("delta")
        if len(steps) == 1:
            return tuple(amounts)
        for key, names in RETURNED[direction].items():
            read: dict[Part, int] = {}  # of each part, how many arrays its next merge reads
            for number, step in enumerate(steps):
                if number % MERGED_AT_ONCE == 0 and number + 1 < len(steps):
                    for part in (part for part, count in read.items() if count > 1):
                        amounts[number + 1] += (read[part] + 1) * self._size(names, part)
                        read[part] = 1
                side, before = getattr(step, key), getattr(steps[number - 1], key) if number else None
                for part in ([before.peer] if before and before.fetch else []) + [side.own]:
                    self._include(key, part, read)
            if getattr(steps[-1], key).fetch:
                self._include(key, getattr(steps[-1], key).peer, read)
            amounts[-1] += sum(count * self._size(names, part) for part, count in read.items())
            amounts[-1] += sum(self.size(name) * self.shape.itemsize // 4 for name in names)
        return tuple(amounts)

    def _cut(self, direction: Direction, step: Step) -> int:
        sides = [(names, getattr(step, key)) for key, names in FETCHED[direction].items()]
        cut = [(names, side.peer) for names, side in sides if side.fetch and side.peer != WHOLE]
        return sum(2 * self.size(name, part) for names, part in cut for name in names)

    def _include(self, key: str, part: Part, read: dict[Part, int]) -> None:
        for own in getattr(self.schedule, f"{key}_parts"):
            if part in (own, WHOLE):
                read[own] = read.get(own, 0) + 1

    def _size(self, names: tuple[str, ...], part: Part) -> int:
        return sum(self.size(name, part) for name in names)

    def size(self, name: str, part: Part = WHOLE) -> int:
        """Bytes of a part of a chunk of an array, by its name in executor.py."""
        first, last, num_heads = self._box(part, self.shape.K if name in KV_HEADS else self.shape.N)
        width = 1 if name in ONE_PER_ROW else self.shape.H
        return self.shape.B * (last - first) * num_heads * width * self.width(name)

    def _box(self, part: Part, num_heads: int) -> tuple[int, int, int]:
        """(first row, row after the last, heads) of a part, as executor.py cuts it."""
        if part.cut == "heads":
            return 0, self.rows, num_heads // part.count
        size = -(-self.rows // part.count)
        return part.index * size, (part.index + 1) * size, num_heads


def _visible(start: int, stop: int, num_keys: int) -> int:
    """Sum of how many of the keys are among the first start, start + 1, .. stop - 1 of them."""

    def up_to(stop: int) -> int:
        inside = min(max(stop, 0), num_keys + 1)
        return inside * (inside - 1) // 2 + max(stop - inside, 0) * num_keys

    return up_to(stop) - up_to(start)


@dataclass(frozen=True)
class Amount:
    """Of arrays, or of parts of them; on average, where workers differ. size: bytes."""

    elements: Fraction = Fraction(0)
    size: Fraction = Fraction(0)

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(self.elements + other.elements, self.size + other.size)


@dataclass(frozen=True)
class Spread:
    """What a strategy costs each of its workers; workers: their number, or for hybrid (outer, inner).

    As closed forms where the strategy is no table. With rows t of a worker, K and N its heads, before they are dealt:

        ulysses     (P-1) t of q_heads and kv_heads of each array there, and of each result back
        hybrid      the same with the inner workers, and then a table of the outer ones
        all_gather  (P-1) t of k and v, and backward of dk and dv in float32; causal besides, each array
                    and each result of queries: (2P - 1) / P halves of t, or (2P - 2) / P where 3 does not divide P
        zigzag      3/2 (P-1) halves of t of k and v, and backward of dk and dv in float32
    """

    strategy: Strategy
    shape: Shape
    workers: tuple[int, ...]
    is_causal: bool = True

    @property
    def num_workers(self) -> int:
        return math.prod(self.workers)

    @property
    def rows(self) -> int:
        """Tokens of a worker, padding included."""
        chunks = 2 * self.num_workers if self.strategy == "zigzag" else self.num_workers
        return -(-self.shape.T // chunks) * chunks // self.num_workers

    @property
    def split(self) -> HeadSplit:
        """Of ulysses and hybrid."""
        return split_heads(self.shape.N, self.shape.K, self.workers[-1])

    @property
    def table(self) -> Cost:
        """That of the strategy; with some of the heads for hybrid, whose outer workers have it, and ulysses, of one."""
        if self.strategy in TABLES:
            heads, shape, num_workers, strategy = self.shape.K, self.shape, self.num_workers, self.strategy
        else:
            heads, strategy = self.split.kv_heads, "balanced"
            num_workers = self.workers[0] if self.strategy == "hybrid" else 1
            shape = replace(self.shape, T=self.rows * self.num_workers, N=self.split.q_heads, K=heads)
        return Cost(choose(cast(Table, strategy), num_workers, kv_heads=heads, is_causal=self.is_causal), shape)

    def traffic(self, direction: Direction) -> Amount:
        """What a worker receives, and sends."""
        if self.strategy in TABLES:
            return Amount(self.table.elements(direction), self.table.traffic(direction))
        before, after = self.exchanges(direction)
        total = before + after
        if self.strategy == "hybrid":
            total += Amount(self.table.elements(direction), self.table.traffic(direction))
        return total

    def exchanges(self, direction: Direction) -> tuple[Amount, Amount]:
        """What a worker receives in the collectives of a strategy that is no table: before kernels, and behind them."""
        P, t = self.num_workers, self.rows
        fetched, returned = FETCHED[direction], RETURNED[direction]
        if self.strategy in ("ulysses", "hybrid"):
            others = self.workers[-1] - 1
            queries, keys, float32 = others * self.split.q_heads, others * self.split.kv_heads, ONE_PER_ROW
        elif self.strategy == "all_gather":
            halves = 2 * P - 1 - (P % 3 != 0) if self.is_causal and P > 1 else 0
            queries, keys = Fraction(halves * -(-t // 2), P * t) * self.shape.N, (P - 1) * self.shape.K
            float32 = ONE_PER_ROW | {"dk", "dv"}
        else:
            queries, keys, float32 = 0, Fraction(3 * (P - 1), 4) * self.shape.K, {"dk", "dv"}
        heads = {"q": Fraction(queries), "kv": Fraction(keys)}

        def amount(arrays: Arrays) -> Amount:
            total = Amount()
            for key, names in arrays.items():
                for name in names:
                    elements = self.shape.B * t * heads[key] * (1 if name in ONE_PER_ROW else self.shape.H)
                    total += Amount(elements, elements * (4 if name in float32 else self.shape.itemsize))
            return total

        return amount(fetched), amount(returned)

    def held(self, direction: Direction) -> int:
        """Most bytes that a worker holds at a time beside its own operands and results, by what it has to keep.

        Of both passes in one program, on 8 H200s with 8192 tokens each, XLA allocates 0.83 to 1.2 times as much.
        """
        if self.strategy in TABLES:
            return self.table.held(direction)
        shape, t, T = self.shape, self.rows, self.rows * self.num_workers
        bytes_of = lambda name, width: 4 if name in ONE_PER_ROW else shape.H * width
        size = lambda names, rows, heads, width: shape.B * rows * heads * sum(bytes_of(name, width) for name in names)
        q_names = FETCHED[direction]["q"] + RETURNED[direction]["q"]
        results = RETURNED[direction].get("kv", ())
        if self.strategy in ("ulysses", "hybrid"):
            rows = t * self.workers[-1]
            dealt = size(q_names, rows, self.split.q_heads, shape.itemsize)
            dealt += size(("k", "v", *results), rows, self.split.kv_heads, shape.itemsize)
            return dealt + (self.table.held(direction) if self.strategy == "hybrid" else 0)
        if self.strategy == "all_gather":
            dealt = size(q_names, t, shape.N, 4) if self.is_causal else 0
            return dealt + size(("k", "v"), T, shape.K, shape.itemsize) + 2 * size(results, T, shape.K, 4)
        halves = size(FETCHED[direction]["q"], t, shape.N, shape.itemsize)
        halves += 2 * size(("k", "v"), t, shape.K, shape.itemsize)
        return halves + 2 * size(RETURNED[direction]["q"], t, shape.N, 4) + 5 * size(results, t, shape.K, 4)


class Rate(NamedTuple):
    """A kernel's FLOP/s on a chunk of T tokens: peak * T / (T + half). half: tokens at which it is half of the peak."""

    peak: float
    half: float

    def at(self, T: int) -> float:
        return self.peak * T / (T + self.half)


class Kernel(NamedTuple):
    """Rates on chunks that the causal mask cuts, and on full ones."""

    causal: Rate
    full: Rate


@dataclass(frozen=True)
class Machine:
    """GPUs that are all alike, each with a full-duplex link of its own.

    head_dim: that for which the rates hold. link: bytes/s each way. latency: seconds from the last byte sent until the
    receiver can go on. memory: bytes/s. start: seconds at the beginning of a pass in which several GPUs' hosts meet.
    """

    name: str
    forward: Kernel
    backward: Kernel
    head_dim: int
    link: float
    latency: float
    memory: float
    start: float

    def kernel_seconds(self, direction: Direction, cost: Cost, task: Task | None) -> float:
        """Of a task; a worker without one passes at once."""
        if task is None:
            return 0.0
        kernel = self.forward if direction == "forward" else self.backward
        rate = kernel.causal if cost.schedule.is_causal and task.q == task.kv else kernel.full
        return cost.flops(direction, task) / rate.at(cost.rows)


# Least squares of 1 / rate over 1 / T, of the medians of `hopper` in benchmarks/results/kernel.csv: forward at commit
# 81373ec, cases [4..128]k_d128_mha_{causal,full}, backward at d852ec8, [4,16,64]k. Below 4096 tokens the rows time the
# host that starts the kernels.
H200_FORWARD = Kernel(causal=Rate(633.0e12, 680), full=Rate(617.8e12, 469))
H200_BACKWARD = Kernel(causal=Rate(567.4e12, 731), full=Rate(564.1e12, 363))
H200_MEMORY = 4.8e12  # data sheet
# Line through two times of one ppermute between two H200s (NV18) with the flags of xla_flags.py, 2026-11-29: 16 MiB at
# 123 GB/s, 512 MiB at 382 GB/s. The data sheet has 450 GB/s each way.
NVLINK = 410e9
NVLINK_LATENCY = 95e-6
# Without a kernel or a merge before the first kernel of a forward on two GPUs: tests/data/overlap/trace_full.csv.
START = 271e-6
MACHINES = {
    machine.name: machine
    for machine in (
        Machine("h200-nvlink", H200_FORWARD, H200_BACKWARD, 128, NVLINK, NVLINK_LATENCY, H200_MEMORY, START),
        # Nominal, nothing measured: 400 Gb/s for each GPU, and the latency that was measured over NVLink.
        Machine("h200-400g", H200_FORWARD, H200_BACKWARD, 128, 50e9, NVLINK_LATENCY, H200_MEMORY, START),
    )
}
