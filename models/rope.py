"""How RoPE is changed so that a model reads more positions than it was trained on; Hugging Face's field names.

Each scaling has `slowed`, which changes the frequencies, and `magnitude`, by which cosine and sine are multiplied.
"""

import contextlib
import dataclasses
import math
from typing import ClassVar

import numpy as np


@dataclasses.dataclass(frozen=True)
class LinearRopeScaling:
    """Every frequency divided by `factor`. Source: position interpolation, arXiv 2306.15595."""

    rope_type: ClassVar[str] = "linear"
    magnitude: ClassVar[float] = 1.0

    factor: float

    def __post_init__(self):
        _check_factor(self.factor)

    def slowed(self, frequencies: np.ndarray, *, theta: float) -> np.ndarray:
        return frequencies / self.factor


@dataclasses.dataclass(frozen=True)
class Llama3RopeScaling:
    """How Llama 3.1 stretches RoPE: wavelengths longer than the old context are slowed down by `factor`."""

    rope_type: ClassVar[str] = "llama3"
    magnitude: ClassVar[float] = 1.0

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self):
        _check_factor(self.factor)
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"rope_scaling.low_freq_factor={self.low_freq_factor} must be positive and less than "
                f"high_freq_factor={self.high_freq_factor}"
            )
        _check_original(self.original_max_position_embeddings)

    def slowed(self, frequencies: np.ndarray, *, theta: float) -> np.ndarray:
        """Wavelengths that fit the old context at least `high_freq_factor` times stay, those that fit it at most
        `low_freq_factor` times grow by `factor`; in between the two are mixed linearly in the number of turns.
        """
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        kept = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0.0, 1.0)
        return kept * frequencies + (1 - kept) * frequencies / self.factor


@dataclasses.dataclass(frozen=True)
class YarnRopeScaling:
    """YaRN: slow pairs are interpolated, fast ones stay, and all scores are sharpened. Source: arXiv 2309.00071."""

    rope_type: ClassVar[str] = "yarn"

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self):
        _check_factor(self.factor)
        _check_original(self.original_max_position_embeddings)
        if not 0 < self.beta_slow < self.beta_fast:
            raise ValueError(
                f"rope_scaling.beta_slow={self.beta_slow} must be positive and less than beta_fast={self.beta_fast}"
            )
        if self.attention_factor is not None and self.attention_factor <= 0:
            raise ValueError(f"rope_scaling.attention_factor={self.attention_factor} must be positive")

    @property
    def magnitude(self) -> float:
        """`attention_factor`, by default 1 + ln(factor) / 10: its square is what multiplies the scores."""
        return 1 + 0.1 * math.log(self.factor) if self.attention_factor is None else self.attention_factor

    def slowed(self, frequencies: np.ndarray, *, theta: float) -> np.ndarray:
        """Pairs that turn more than `beta_fast` times in the old context stay, those that turn less than
        `beta_slow` times are slowed down by `factor`; in between the two are mixed linearly in the pair's number.
        """
        half = len(frequencies)

        def pair_that_turns(times: float) -> float:
            return half * math.log(self.original_max_position_embeddings / (2 * math.pi * times)) / math.log(theta)

        first, last = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * half - 1)
        # 0.001 is what Hugging Face has where first and last are one pair.
        slowed = np.clip((np.arange(half) - first) / ((last - first) or 0.001), 0.0, 1.0)
        return (1 - slowed) * frequencies + slowed * frequencies / self.factor


RopeScaling = LinearRopeScaling | Llama3RopeScaling | YarnRopeScaling
SCALINGS: dict[str, type[RopeScaling]] = {
    kind.rope_type: kind for kind in (LinearRopeScaling, Llama3RopeScaling, YarnRopeScaling)
}


@dataclasses.dataclass(frozen=True)
class RopeExtension:
    """A scaling that is still to be fitted to a model: what `--rope-scaling yarn:32` says."""

    rope_type: str
    factor: float

    def __str__(self) -> str:
        return f"{self.rope_type}:{self.factor:g}"

    @classmethod
    def parse(cls, text: str) -> "RopeExtension":
        """Reads yarn:FACTOR, linear:FACTOR, llama3:FACTOR or llama3, whose factor is 8."""
        rope_type, _, factor = text.partition(":")
        with contextlib.suppress(ValueError):
            extension = cls(rope_type, float(factor or (8 if text == "llama3" else "")))
            if rope_type in SCALINGS and 1 <= extension.factor < math.inf:
                return extension
        raise ValueError(
            f"{text}: yarn:FACTOR, linear:FACTOR, llama3:FACTOR or llama3 with a factor of at least 1, such as yarn:32"
        )

    def scaling(self, original: int) -> RopeScaling:
        """The scaling for a model that was trained on `original` positions."""
        if self.rope_type == "linear":
            return LinearRopeScaling(self.factor)
        if self.rope_type == "llama3":
            return Llama3RopeScaling(self.factor, original_max_position_embeddings=original)
        return YarnRopeScaling(self.factor, original)


def _check_factor(factor: float) -> None:
    if not factor >= 1:
        raise ValueError(f"rope_scaling.factor={factor} must be at least 1")


def _check_original(original: int) -> None:
    if original < 1:
        raise ValueError(f"rope_scaling.original_max_position_embeddings={original} must be at least 1")
