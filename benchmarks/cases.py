"""The named shapes that benchmarks measure: <total tokens>_d<head dim>_<mha|gqa>_<what is visible>."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from distflash_jax import cost


class Case(NamedTuple):
    """One attention call on the whole sequence.

    window: a query sees no key that lies so many positions before it, or more. documents: lengths of those that share
    the sequence and do not see each other; () is one document.
    """

    T: int
    N: int
    K: int
    H: int
    is_causal: bool
    B: int = 1
    window: int | None = None
    documents: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        heads = "mha" if self.N == self.K else "gqa"
        visible = "causal" if self.is_causal else "full"
        if self.window is not None:
            visible = f"window{self.window // 1024}k"
        if self.documents:
            visible = f"packed{len(self.documents)}"
        return f"{self.T // 1024}k_d{self.H}_{heads}_{visible}"

    @property
    def visible_scores(self) -> int:
        """Pairs of a query and a key that it sees, of one head: causal is half, and half of the diagonal."""
        triangle = lambda length: length * (length + 1) // 2
        in_order = triangle if self.is_causal else lambda length: length**2
        too_far = lambda length: 0 if self.window is None else triangle(max(length - self.window, 0))
        return self.B * sum(in_order(length) - too_far(length) for length in self.documents or (self.T,))

    @property
    def forward_flops(self) -> float:
        """The backward counts 2.5 times as much."""
        return cost.flops("forward", self.N, self.H, self.visible_scores)


def long_tailed(count: int, total: int) -> tuple[int, ...]:
    """Lengths of so many documents of so many tokens together: a few are long, and most are short.

    They are quantiles of a log-normal distribution in which one document of six has more than exp(1) times as many
    tokens as the one in the middle, in an order as good as random.
    """
    places = (np.arange(count) * 5**0.5 % 1).argsort()
    sizes = np.exp([NormalDist().inv_cdf((place + 0.5) / count) for place in places])
    ends = np.round(np.cumsum(sizes) / sizes.sum() * total).astype(int)
    return tuple(np.diff(ends, prepend=0).tolist())


LENGTHS = (8, 16, 32, 64, 128, 256)  # thousands of tokens on all GPUs together
MHA = [Case(tokens * 1024, 32, 32, 128, is_causal=True) for tokens in LENGTHS]
GQA = [Case(tokens * 1024, 32, 8, 128, is_causal=True) for tokens in LENGTHS]
TOKENS = tuple(1024 * 2**i for i in range(8))
# Lengths as texts have them: none is a whole number of tiles.
DOCUMENTS = (4300, 10100, 1000, 7300, 2900, 12836, 1500, 6000, 3700, 8700, 2100, 5100)


def masked(heads: int) -> list[Case]:
    """Packed documents and windows in long sequences."""
    make = lambda T, **mask: Case(T, heads, heads, 128, is_causal=True, **mask)
    documents = {65536: DOCUMENTS, 131072: long_tailed(12, 131072)}
    return [
        case
        for T in documents
        for case in (
            *(make(T, documents=x) for x in (documents[T], long_tailed(100, T))),
            *(make(T, window=thousands * 1024) for thousands in (1, 4, 32)),
        )
    ]


ATTENTION = {case.name: case for case in MHA + GQA + masked(32)}
ATTENTION_DEFAULT = tuple(case.name for case in MHA + GQA)
KERNEL = {
    case.name: case
    for case in (
        *(Case(T, 16, 16, H, is_causal) for H in (64, 128, 256) for is_causal in (False, True) for T in TOKENS),
        *(Case(T, 32, 8, H, is_causal=True) for H in (64, 128, 256) for T in TOKENS),
        *(Case(T, 16, 16, 96, is_causal) for is_causal in (False, True) for T in (4096, 16384)),
        *masked(16),
        *(Case(65536, 16, 16, H, is_causal=True, documents=DOCUMENTS) for H in (64, 256)),
    )
}
# What each head dim, length, grouping and mask costs, in a few minutes; "*" measures all of KERNEL.
KERNEL_DEFAULT = (
    *("16k_d64_mha_*", "16k_d128_*", "16k_d256_mha_causal", "4k_d128_mha_causal", "64k_d128_mha_causal"),
    *("64k_*_packed12", "64k_*_window4k"),
)


def select(patterns: Iterable[str]) -> list[Case]:
    """The kernel cases that are named or match a glob pattern, each once, in the order of KERNEL.

    Raises:
        ValueError: a pattern that no case matches.
    """
    names = set()
    for pattern in patterns:
        matching = {name for name in KERNEL if fnmatchcase(name, pattern)}
        if not matching:
            raise ValueError(f"case {pattern!r}: must name or match one such as {next(iter(KERNEL))}")
        names |= matching
    return [case for name, case in KERNEL.items() if name in names]
