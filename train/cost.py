"""FLOPs of a training step and the seconds they take on devices of a known kind. Pure Python."""

import math

from models.config import LlamaConfig

# FLOP/s of dense 16-bit matrix products with float32 sums, as the manufacturers print them.
_PEAK_FLOPS = {
    "A100": 312e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
}
# Of the peak, what plain products and attention reach on an H200: benchmarks/results/kernel.csv, long causal cases.
_DENSE_SHARE = 0.65
_ATTENTION_SHARE = 0.55


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """FLOP/s of one device; None where they are not known of the kind or the dtype."""
    if dtype != "bfloat16":
        return None
    return next((peak for name, peak in _PEAK_FLOPS.items() if name in device_kind), None)


def step_flops(model: LlamaConfig, *, batch_size: int, seq_len: int) -> tuple[int, int]:
    """(dense, attention) FLOPs of a step over all devices: six a weight and token, and causal attention thrice.

    What is done twice for the sake of memory counts once; the backward counts as two forwards. Scores that a sliding
    window hides count nothing.
    """
    # The lookup multiplies nothing; a tied table is a head too.
    table = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size
    dense = 6 * (model.num_parameters - table) * batch_size * seq_len
    triangle = lambda length: length * (length + 1) // 2
    hidden = max(seq_len - model.sliding_window, 0) if model.sliding_window else 0
    pairs = batch_size * (triangle(seq_len) - triangle(hidden))
    attention = 3 * 4 * pairs * model.num_attention_heads * model.head_dim * model.num_hidden_layers
    return dense, attention


def step_seconds(dense: int, attention: int, *, remat: str, num_devices: int, device_kind: str) -> float:
    """Predicted seconds of a step in bfloat16 whose messages are hidden; nan where the kind of device is not known.

    Done beside what `step_flops` counts: the dense forward again in the backward, or about half of it where projections
    are kept, unless everything is; and scores again in the backward of the attention, or with them all of its forward
    where no output of it is kept.
    """
    peak = peak_flops(device_kind, "bfloat16")
    if peak is None:
        return math.nan
    dense_done = dense * (1 + {"none": 0, "projections": 1 / 2}.get(remat, 1) / 3)
    attention_done = attention * (4.5 if remat == "layer" else 3.5) / 3
    return (dense_done / _DENSE_SHARE + attention_done / _ATTENTION_SHARE) / (num_devices * peak)
