"""What a table costs: FLOPs, bytes and, on a machine, seconds of its kernels, messages and merges. Pure Python.

Nothing here is tuned to the predictions: a machine has the rates of the kernels alone on one GPU, of one message alone,
and of its memory; timeline.py puts them in order. Valid where the rates were measured: chunks of 4096 tokens and more.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from distflash_jax.table import MERGED_AT_ONCE, WHOLE, Direction, Part, Permutation, Schedule, Side, Step, Task

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

    def steps(self, direction: Direction) -> tuple[Step, ...]:
        return self.schedule.towards(direction).steps

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
            for step in self.steps(direction)
            for message in self.fetches(direction, step) + self.returns(direction, step)
        )
        return sum((Fraction(x.size * len(x.permutation)) for x in messages), Fraction(0)) / self.schedule.num_workers

    def elements(self, direction: Direction) -> Fraction:
        """Those of the arrays that a worker receives on average, and sends."""
        total = Fraction(0)
        for step in self.steps(direction):
            for name, permutation, size in self.fetches(direction, step) + self.returns(direction, step):
                total += Fraction(size * len(permutation), self.width(name))
        return total / self.schedule.num_workers

    def width(self, name: str) -> int:
        """Bytes of an element of an array."""
        return 4 if name in FLOAT32 else self.shape.itemsize

    def memory(self, direction: Direction) -> tuple[int, ...]:
        """Bytes that each worker reads and writes outside of kernels: before each step, and after the last.

        Those are delta, parts that are cut out to be sent, results that are merged or added, and the last cast. All
        workers run the same program: what is masked out costs the same.
        """
        steps = self.steps(direction)
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
    """GPUs that are all alike, each with a full-duplex link of its own, and one more if there are several nodes.

    head_dim: that for which the rates hold. link: bytes/s each way to others of its node. latency: seconds from the
    last byte sent until the receiver can go on. memory: bytes/s. start: seconds at the beginning of a pass in which
    several GPUs' hosts meet. workers_per_node: None if all are of one. network: bytes/s each way to other nodes.
    """

    name: str
    forward: Kernel
    backward: Kernel
    head_dim: int
    link: float
    latency: float
    memory: float
    start: float
    workers_per_node: int | None = None
    network: float = 0.0

    def kernel_seconds(self, direction: Direction, cost: Cost, task: Task | None) -> float:
        """Of a task; a worker without one passes at once."""
        if task is None:
            return 0.0
        kernel = self.forward if direction == "forward" else self.backward
        rate = kernel.causal if cost.schedule.is_causal and task.q == task.kv else kernel.full
        return cost.flops(direction, task) / rate.at(cost.rows)


# Least squares of 1 / rate over 1 / T, of the medians of `hopper` in benchmarks/results/kernel.csv at commit f9889ab,
# cases [4..128]k_d128_mha_{causal,full}. Below 4096 tokens the rows time the host that starts the kernels.
H200_FORWARD = Kernel(causal=Rate(687.4e12, 1488), full=Rate(696.0e12, 1476))
H200_BACKWARD = Kernel(causal=Rate(554.2e12, 404), full=Rate(550.5e12, 413))
H200_MEMORY = 4.8e12  # data sheet
# Line through two times of one ppermute between two H200s (NV18) with the flags of xla_flags.py, 2026-11-29: 16 MiB at
# 123 GB/s, 512 MiB at 382 GB/s. The data sheet has 450 GB/s each way.
NVLINK = 410e9
NVLINK_LATENCY = 95e-6
NETWORK = 50e9
# What a pass on two GPUs takes beside all of this: the mean over the rows of `balanced` of 8K to 32K tokens in
# benchmarks/results/attention.csv at commits 32ef19e and f9889ab.
START = 138e-6
MACHINES = {
    machine.name: machine
    for machine in (
        Machine("h200-nvlink", H200_FORWARD, H200_BACKWARD, 128, NVLINK, NVLINK_LATENCY, H200_MEMORY, START),
        # Nominal, nothing measured: 400 Gb/s for each GPU, and the latency that was measured over NVLink.
        Machine("h200-400g", H200_FORWARD, H200_BACKWARD, 128, NETWORK, NVLINK_LATENCY, H200_MEMORY, START),
        # Eight to a node.
        Machine("h200-nodes", H200_FORWARD, H200_BACKWARD, 128, NVLINK, NVLINK_LATENCY, H200_MEMORY, START, 8, NETWORK),
    )
}
