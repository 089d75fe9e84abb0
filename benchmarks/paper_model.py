"""Seconds and bytes of the paper's systems on its own GPUs, from a few constants, for benchmarks.paper.

Source: DISTFLASHATTN, arXiv 2310.03294 v2, appendix D, and where a constant says so.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

from distflash_jax.cost import Direction, Kernel, Machine, Rate, Shape
from distflash_jax.schedule import Table, choose, split_heads
from distflash_jax.table import BOTH
from distflash_jax.timeline import Timeline, simulate
from models.config import LlamaConfig

# Of one A100, from the paper's figure of a layer's forward, LLaMA-7B: the rest beside attention has this rate from 16K
# to 64K tokens if it is the MLP; attention this one at 64K, if its four projections are part of it.
PRODUCTS = 187e12
FORWARD = 188e12
BACKWARD = FORWARD * 63 / 73  # the shares of the peak that FlashAttention-2, arXiv 2307.08691, says it reaches
HALF = 500  # tokens at which a kernel is half as fast; kernels measured on H200s have 400 to 1500
MEMORY = 2.0e12  # data sheet, bytes/s
NVLINK = 300e9 * 410 / 450  # data sheet, times the share that one message reaches on an H200
# 100 Gb/s for each GPU. Were it for a node, messages alone would take longer than the published steps.
NETWORK = 12.5e9
PER_NODE = 8
A100 = Machine(
    "a100",
    Kernel(Rate(FORWARD, HALF), Rate(FORWARD, HALF)),
    Kernel(Rate(BACKWARD, HALF), Rate(BACKWARD, HALF)),
    head_dim=128,
    link=NVLINK,
    latency=95e-6,  # as measured on H200s
    memory=MEMORY,
    start=0.0,
    workers_per_node=PER_NODE,
    network=NETWORK,
)
# Megatron's collectives in units of the activations of a layer, recomputed ones included: appendix D.
MEGATRON_COLLECTIVES = 14
# Passes of Ring Self-Attention over its 16-bit scores: forward, and backward. Counted, not measured.
RSA_PASSES = {"forward": 6, "backward": 12}
TWICE: tuple[Direction, ...] = ("forward", *BOTH)  # where attention outputs are not kept


def table_seconds(strategy: Table, model: LlamaConfig, P: int, T: int, directions: Sequence[Direction] = BOTH) -> float:
    """Attention of all layers by a table."""
    return model.num_hidden_layers * timeline(strategy, model, P, T, directions).makespan


def timeline(strategy: Table, model: LlamaConfig, P: int, T: int, directions: Sequence[Direction] = BOTH) -> Timeline:
    """Attention of one layer by a table."""
    heads = model.num_key_value_heads
    shape = Shape(T, model.num_attention_heads, heads, model.head_dim)
    return simulate(choose(strategy, P, kv_heads=heads), shape, A100, directions)


def whole_seconds(model: LlamaConfig, num_heads: float, T: int, directions: Sequence[Direction]) -> float:
    """Attention of all layers where a GPU has so many heads and all tokens."""
    rates = {"forward": A100.forward.causal.at(T), "backward": 2 / 5 * A100.backward.causal.at(T)}
    flops = 2 * T**2 * num_heads * model.head_dim
    return model.num_hidden_layers * sum(flops / rates[direction] for direction in directions)


def dense_seconds(model: LlamaConfig, P: int, T: int, heads: float | None = None) -> float:
    """Products with weights, those of layers once more for the backward; heads: those computed, padding included."""
    table = model.vocab_size * model.hidden_size
    projections = 2 * model.hidden_size * model.head_dim * (model.num_attention_heads + model.num_key_value_heads)
    padded = projections * ((heads or model.num_attention_heads) / model.num_attention_heads - 1)
    layers = model.num_parameters - 2 * table + model.num_hidden_layers * padded
    return (8 * layers + 6 * table) * T / P / PRODUCTS


def collective_seconds(num_bytes: float, P: int) -> float:
    """Of all-gathers or reduce-scatters of so many bytes over all GPUs: between nodes all their links carry them."""
    return num_bytes * (P - 1) / P / (NVLINK if P <= PER_NODE else min(NVLINK, PER_NODE * NETWORK))


def weights_seconds(model: LlamaConfig, P: int) -> float:
    """Weights gathered twice, and their gradients reduced, in 16 bits."""
    return collective_seconds(3 * 2 * model.num_parameters, P)


def sharded_seconds(model: LlamaConfig, P: int, T: int, attention: float) -> float:
    """A step whose sequence and weights are both cut over the GPUs, with so many seconds of attention."""
    return attention + dense_seconds(model, P, T) + weights_seconds(model, P)


def step_seconds(system: str, model: LlamaConfig, P: int, T: int, passes: Sequence[Direction] = TWICE) -> float:
    """A step of T tokens on P GPUs, by "megatron", "ulysses", "rsa", "layer" or the name of a table.

    "layer" is the paper's table with checkpoints at the borders of layers. passes: those of attention, of all but
    tables, which always keep its outputs.
    """
    heads = split_heads(model.num_attention_heads, model.num_key_value_heads, P).q_heads * P
    if system == "megatron":
        gathered = MEGATRON_COLLECTIVES * model.num_hidden_layers * 2 * T * model.hidden_size
        return (
            whole_seconds(model, heads / P, T, passes)
            + dense_seconds(model, P, T, heads)
            + collective_seconds(gathered, P)
        )
    if system == "ulysses":
        ratio = heads / model.num_attention_heads
        each = 2 * T / P * (2 * model.num_attention_heads * ratio + 2 * model.num_key_value_heads * ratio)
        outside = (P - PER_NODE) / P if P > PER_NODE else 0.0
        # Forward q, k, v and out; once more; backward those four and dout, dq, dk and dv.
        exchanged = 4 * model.num_hidden_layers * each * model.head_dim
        travels = exchanged * max(outside / NETWORK, ((P - 1) / P - outside) / NVLINK)
        return sharded_seconds(model, P, T, whole_seconds(model, heads / P, T, passes) + travels)
    if system == "rsa":
        scores = model.num_attention_heads * T**2 / P * model.num_hidden_layers
        through_memory = sum(RSA_PASSES[direction] for direction in passes)
        # Two forwards, and a backward without recomputation.
        products = 4 * model.head_dim * scores * (2 + 2) / PRODUCTS
        rings = 2 * 2 * T * model.num_key_value_heads * model.head_dim * model.num_hidden_layers * (2 + 2)
        wire = NVLINK if P <= PER_NODE else NETWORK
        return sharded_seconds(
            model, P, T, through_memory * 2 * scores / MEMORY + products + rings * (P - 1) / P / wire
        )
    if system == "layer":
        return sharded_seconds(model, P, T, table_seconds("balanced_unsplit", model, P, T, passes))
    return sharded_seconds(model, P, T, table_seconds(cast(Table, system), model, P, T))


class Part(NamedTuple):
    """What a GPU has of a model: tokens between layers (inside them as many in the share of the width), and layers.

    states: bytes of parameters, gradients and moments. kept: activations of a layer, in units of its input.
    """

    tokens: float
    layers: float
    states: float
    has_head: bool
    kept: int


def memory_bytes(model: LlamaConfig, part: Part) -> float:
    """A closed form in 16 bits: what layers keep, six arrays of the MLP's width, and logits with their gradient."""
    kept = 2 * part.kept * part.tokens * model.hidden_size * part.layers
    mlp = 2 * 6 * part.tokens * model.intermediate_size
    logits = (4 + 2) * part.tokens * model.vocab_size if part.has_head else 0
    return part.states + kept + mlp + logits


def parts(system: str, model: LlamaConfig, P: int, T: int) -> Iterator[Part]:
    """Those that differ. Megatron has as many GPUs to a model as heads; the others are replicas, or stages."""
    size, layers = model.num_parameters, model.num_hidden_layers
    width = min(P, model.num_attention_heads)
    if system == "megatron-dp":  # optimizer cut over all GPUs, weights and gradients over those of a replica
        yield Part(T / width, layers, 4 * size / width + 12 * size / P, has_head=True, kept=1)
    elif system == "megatron-pp":
        stages = P // width
        for stage in range(stages):  # whose first has as many rows underway as there are stages
            underway = layers * (stages - stage) / stages
            yield Part(T / width, underway, 16 * size / P, has_head=stage + 1 == stages, kept=1)
    else:  # input and attention output
        yield Part(T / P, layers, 16 * size / P, has_head=True, kept=1 if system == "rsa" else 2)


def needed(system: str, model: LlamaConfig, P: int, T: int) -> float:
    """Bytes of the GPU that needs the most."""
    scores = 3 * 2 * model.num_attention_heads * T**2 / P if system == "rsa" else 0
    return scores + max(memory_bytes(model, part) for part in parts(system, model, P, T))


def longest(system: str, model: LlamaConfig, P: int, memory: float) -> int:
    """The largest power of two of thousands of tokens that fits, up to 1024."""
    fitting = [n for n in (2**k for k in range(11)) if needed(system, model, P, 1024 * n) <= memory]
    return max(fitting, default=0)
