"""The named shapes that benchmarks measure: <total tokens>_d<head dim>_<mha|gqa>_<causal|full>."""

from typing import NamedTuple


class Case(NamedTuple):
    """One attention call on the whole sequence."""

    T: int
    N: int
    K: int
    H: int
    is_causal: bool
    B: int = 1

    @property
    def name(self) -> str:
        heads = "mha" if self.N == self.K else "gqa"
        return f"{self.T // 1024}k_d{self.H}_{heads}_{'causal' if self.is_causal else 'full'}"

    @property
    def forward_flops(self) -> float:
        """Two matrix products a visible score; causal counts half. The backward counts 2.5 times as much."""
        return 4 * self.B * self.N * self.H * self.T**2 * (0.5 if self.is_causal else 1)


MHA = [Case(tokens * 1024, 32, 32, 128, is_causal=True) for tokens in (8, 16, 32)]
GQA = [Case(tokens * 1024, 32, 8, 128, is_causal=True) for tokens in (8, 16, 32)]
ATTENTION = {case.name: case for case in MHA + GQA}
KERNEL = {
    case.name: case
    for case in (
        *(Case(tokens * 1024, 16, 16, 128, is_causal) for tokens in (4, 16) for is_causal in (False, True)),
        Case(16384, 32, 8, 128, is_causal=True),
        *(Case(16384, 16, 16, 64, is_causal) for is_causal in (False, True)),
    )
}
