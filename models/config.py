"""The shapes of Llama models: `LlamaConfig`, with Hugging Face's field names, and the named presets."""

import dataclasses
import math

from models.rope import RopeExtension, RopeScaling


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """One architecture of the Llama kind; the head width need not be hidden_size / num_attention_heads.

    Attributes:
        qkv_bias: q_proj, k_proj and v_proj have biases, as in Qwen2.5; o_proj has none.
        qk_norm: every head's queries and keys are normalised before RoPE, as in Qwen3.
        sliding_window: tokens that a token sees, itself included; None for all before it.
        max_position_embeddings: positions that the model is made for; kept for the export, nothing computes with it.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    max_position_embeddings: int = 4096

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and value < 1:
                raise ValueError(f"{field.name}={value} must be at least 1")
            if field.type is float and not 0 < value < math.inf:
                raise ValueError(f"{field.name}={value} must be positive and finite")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} must be a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window={self.sliding_window} must be at least 1")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even, RoPE turns pairs of components")

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model; a tied head is counted once."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_attention_heads + self.num_key_value_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size
        if self.qkv_bias:
            attention += self.head_dim * (self.num_attention_heads + 2 * self.num_key_value_heads)
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        tables = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_hidden_layers * (attention + mlp + norms) + self.hidden_size + tables

    def extended(self, extension: RopeExtension) -> "LlamaConfig":
        """This model with its RoPE stretched, in place of a scaling that it has, over `factor` times its context."""
        original = getattr(self.rope_scaling, "original_max_position_embeddings", self.max_position_embeddings)
        return dataclasses.replace(
            self,
            rope_scaling=extension.scaling(original),
            max_position_embeddings=round(original * extension.factor),
        )


LLAMA_7B = LlamaConfig(
    vocab_size=32_000,
    hidden_size=4096,
    intermediate_size=11_008,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
    head_dim=128,
)


def _with_heads(num_heads: int, num_layers: int) -> LlamaConfig:
    """Llama-7B with another number of heads of 128, as wide as its heads together."""
    return dataclasses.replace(
        LLAMA_7B,
        hidden_size=num_heads * LLAMA_7B.head_dim,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
    )


# llama-7b to llama-2h are those of DISTFLASHATTN, arXiv 2310.03294, section 4. It prints the layers of 16H
# only; 8H, 4H and 2H follow its rule that heads x layers stays 1024.
PRESETS: dict[str, LlamaConfig] = {
    "tiny": LlamaConfig(
        vocab_size=264,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
    ),
    "llama-7b": LLAMA_7B,
    "llama-gqa": dataclasses.replace(LLAMA_7B, num_key_value_heads=8),
    "llama-33h": _with_heads(33, num_layers=32),
    "llama-16h": _with_heads(16, num_layers=64),
    "llama-8h": _with_heads(8, num_layers=128),
    "llama-4h": _with_heads(4, num_layers=256),
    "llama-2h": _with_heads(2, num_layers=512),
    "llama-3-8b": dataclasses.replace(
        LLAMA_7B,
        vocab_size=128_256,
        intermediate_size=14_336,
        num_key_value_heads=8,
        rope_theta=500_000.0,
        max_position_embeddings=8192,
    ),
    "qwen3-8b": LlamaConfig(
        vocab_size=151_936,
        hidden_size=4096,
        intermediate_size=12_288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope_theta=1_000_000.0,
        qk_norm=True,
        max_position_embeddings=40_960,
    ),
    "llama-100m": LlamaConfig(
        vocab_size=32_000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=12,
        head_dim=64,
        tie_word_embeddings=True,
    ),
}
