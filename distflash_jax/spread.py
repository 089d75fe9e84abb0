"""What a strategy sends: bytes that travel to each of its workers. Pure Python.

As closed forms where the strategy is no table. With rows t of a worker, K and N its heads, before they are dealt:

    ulysses     (P-1) t of q_heads and kv_heads of each array there, and of each result back
    hybrid      the same with the inner workers, and then a table of the outer ones
    all_gather  (P-1) t of k and v, and backward of dk and dv in float32; causal besides, each array and each result of
                queries: (2P - 1) / P halves of t, or (2P - 2) / P where 3 does not divide P
    zigzag      3/2 (P-1) halves of t of k and v, and backward of dk and dv in float32
    rsa         (P-1) t of k and v, and backward of dk and dv in float32
    burst       over nodes and the workers of each: the table between nodes, and one within a node for each of its steps
"""

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import cast

from distflash_jax.cost import FETCHED, ONE_PER_ROW, RETURNED, Cost, Shape
from distflash_jax.schedule import TABLES, HeadSplit, Strategy, Table, choose, double_ring, split_heads
from distflash_jax.table import Direction, Step


@dataclass(frozen=True)
class Amount:
    """Of arrays, or of parts of them; on average, where workers differ. size: bytes."""

    elements: Fraction = Fraction(0)
    size: Fraction = Fraction(0)

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(self.elements + other.elements, self.size + other.size)


@dataclass(frozen=True)
class Exchange:
    """What a worker receives in a collective, of queries and their results, and of keys and values and theirs."""

    q: Amount = Amount()
    kv: Amount = Amount()

    @property
    def total(self) -> Amount:
        return self.q + self.kv


@dataclass(frozen=True)
class Spread:
    """A strategy on so many workers; or for hybrid, and for burst over two axes, on (outer, inner).

    is_one_program: the backward finds q, k and v as the forward has exchanged them; of two equal collectives of a
    program XLA makes one.
    """

    strategy: Strategy
    shape: Shape
    workers: tuple[int, ...]
    is_causal: bool = True
    is_one_program: bool = False

    @property
    def num_workers(self) -> int:
        return math.prod(self.workers)

    @property
    def rows(self) -> int:
        """Tokens of a worker, padding included."""
        chunks = 2 * self.num_workers if self.strategy == "zigzag" else self.num_workers
        return -(-self.shape.T // chunks) * chunks // self.num_workers

    @property
    def is_double(self) -> bool:
        """Whether tables within nodes take the place of kernels."""
        return self.strategy == "burst" and len(self.workers) == 2

    @property
    def split(self) -> HeadSplit:
        """Of ulysses and hybrid."""
        return split_heads(self.shape.N, self.shape.K, self.workers[-1])

    @property
    def table(self) -> Cost:
        """That of the strategy: of all workers, of the outer ones, or for ulysses of one, with the heads it has."""
        shape, P = self.shape, self.num_workers
        if self.is_double:
            nodes, workers = self.workers
            between, *_ = double_ring(nodes, workers, kv_heads=shape.K, is_causal=self.is_causal)
            return Cost(between, replace(shape, T=self.rows * nodes))
        strategy, heads = self.strategy, shape.K
        if strategy not in TABLES:
            strategy, heads, P = "balanced", self.split.kv_heads, self.workers[0] if self.strategy == "hybrid" else 1
            shape = replace(shape, T=self.rows * self.num_workers, N=self.split.q_heads, K=heads)
        return Cost(choose(cast(Table, strategy), P, kv_heads=heads, is_causal=self.is_causal), shape)

    def within(self, step: Step) -> Cost:
        """The table within a node in a step of the table between nodes, with the heads that this step takes."""
        nodes, workers = self.workers
        _, own, others = double_ring(nodes, workers, kv_heads=self.shape.K, is_causal=self.is_causal)
        count = max(step.q.own.count, step.q.peer.count)
        shape = replace(self.shape, T=self.rows * workers, N=self.shape.N // count, K=self.shape.K // count)
        return Cost(own if step.is_diagonal else others, shape)

    def traffic(self, direction: Direction) -> Amount:
        """What a worker receives, and sends."""
        tables = []
        if self.strategy in TABLES or self.strategy == "hybrid":
            tables.append(self.table)
        if self.is_double:
            tables += [self.within(step) for step in self.table.steps(direction)]
        before, after = self.exchanges(direction)
        amounts = [Amount(table.elements(direction), table.traffic(direction)) for table in tables]
        return sum(amounts, before.total + after.total)

    def exchanges(self, direction: Direction) -> tuple[Exchange, Exchange]:
        """The collectives of a strategy that is no table: before its kernels, and behind them."""
        P, t, N, K = self.num_workers, self.rows, self.shape.N, self.shape.K
        fetched, returned, float32 = FETCHED[direction], RETURNED[direction], ONE_PER_ROW | {"dk", "dv"}
        if self.is_one_program and direction == "backward":
            is_new = lambda side, name: name not in FETCHED["forward"][side]
            fetched = {side: tuple(name for name in names if is_new(side, name)) for side, names in fetched.items()}
        if self.strategy in TABLES:
            return Exchange(), Exchange()
        if self.strategy in ("ulysses", "hybrid"):
            others, float32 = self.workers[-1] - 1, ONE_PER_ROW
            queries, keys = others * self.split.q_heads, others * self.split.kv_heads
        elif self.strategy == "all_gather":
            halves = 2 * P - 1 - (P % 3 != 0) if self.is_causal and P > 1 else 0
            queries, keys = Fraction(halves * -(-t // 2), P * t) * N, (P - 1) * K
        elif self.strategy == "rsa":
            queries, keys = 0, (P - 1) * K
        else:
            queries, keys = 0, Fraction(3 * (P - 1), 4) * K

        def amount(names: tuple[str, ...], heads: Fraction) -> Amount:
            elements = [self.shape.B * t * heads * (1 if name in ONE_PER_ROW else self.shape.H) for name in names]
            widths = [4 if name in float32 else self.shape.itemsize for name in names]
            return Amount(
                sum(elements, Fraction(0)), sum(map(Fraction.__mul__, elements, map(Fraction, widths)), Fraction(0))
            )

        heads = {"q": Fraction(queries), "kv": Fraction(keys)}
        before, after = (
            Exchange(**{side: amount(names, heads[side]) for side, names in arrays.items()})
            for arrays in (fetched, returned)
        )
        return before, after
