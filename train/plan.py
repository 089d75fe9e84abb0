"""What a run needs before it runs: `--dry-run` compiles the step, and tells bytes, FLOPs, seconds and what fits."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from distflash_jax.schedule import split_heads
from train.config import Config
from train.cost import peak_flops, step_flops, step_seconds
from train.flags import InputError, MeshShape
from train.mesh import usable_memory
from train.program import build_program, model_maker
from train.sharding import bytes_per_device
from train.step import Program

_SEARCH_SECONDS = 45
_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one device while it takes a step; `host` are those in its host's memory.

    Attributes:
        saved: what the layers keep for the backward, on the device.
        temporaries: all else that XLA allocates: gradients, gathered weights, a layer's intermediate arrays.
    """

    parameters: int
    optimizer: int
    saved: int
    temporaries: int
    host: int

    @property
    def total(self) -> int:
        return sum(self.classes.values())

    @property
    def classes(self) -> dict[str, int]:
        on_device = {"parameters": self.parameters, "optimizer": self.optimizer}
        return on_device | {"saved activations": self.saved, "temporaries": self.temporaries}


def measure(config: Config, program: Program, mesh: Mesh) -> Memory:
    """Bytes of each class, by a compilation of the step."""
    total = allocated(program, batch_size=config.batch_size, seq_len=config.seq_len)
    saved, host = saved_activations(config, mesh)
    parameters = bytes_per_device(program.state_struct.params)
    optimizer = bytes_per_device(program.state_struct) - parameters
    return Memory(parameters, optimizer, saved, total - parameters - optimizer - saved, host)


def allocated(program: Program, *, batch_size: int, seq_len: int) -> int:
    """Bytes that XLA says a step needs on a device; it is compiled on abstract arguments, or found compiled."""
    return bytes_of(lower_step(program, batch_size=batch_size, seq_len=seq_len).compile())


def lower_step(program: Program, *, batch_size: int, seq_len: int) -> jax.stages.Lowered:
    """The step for batches of this size, lowered on abstract arguments."""
    return program.step.lower(program.state_struct, program.batch_struct(batch_size, seq_len))


def bytes_of(step: jax.stages.Compiled) -> int:
    """Bytes that XLA says a compiled step needs on a device."""
    analysis: Any = step.memory_analysis()
    # Outputs that take the place of arguments, which the state does, are counted once.
    new_outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return analysis.argument_size_in_bytes + new_outputs + analysis.temp_size_in_bytes


def saved_activations(config: Config, mesh: Mesh) -> tuple[int, int]:
    """Bytes that the layers of one device keep from forward to backward: (on the device, in host memory).

    Counted in the residuals of a model as small as one device's part of this one, which is traced and not run.
    """
    shape, model = config.mesh, config.llama
    divides = model.intermediate_size % shape.tensor == 0
    heads, kv_heads = model.num_attention_heads // shape.tensor, model.num_key_value_heads // shape.tensor
    if config.strategy == "megatron":  # some heads of all tokens, which are as many as all heads of some tokens
        split = split_heads(heads, kv_heads, shape.seq)
        heads, kv_heads = split.q_heads * shape.seq, split.kv_heads * shape.seq
    part = dataclasses.replace(
        config,
        mesh=MeshShape(),
        strategy="balanced",
        seq_len=config.seq_len // shape.seq,
        batch_size=config.batch_size // (shape.data * config.accumulate),
        accumulate=1,
        overrides=dataclasses.replace(
            config.overrides,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            intermediate_size=model.intermediate_size // (shape.tensor if divides else 1),
        ),
    )
    one_device = Mesh(np.array(mesh.devices.flat[:1]).reshape(1, 1, 1), mesh.axis_names)
    of_tokens = (model.num_hidden_layers, part.batch_size, part.seq_len)
    saved = [x for x in residuals(part, one_device) if x.shape[:3] == of_tokens]
    host = [x.size * x.dtype.itemsize for x in saved if x.memory_space == jax.memory.Space.Host]
    return sum(x.size * x.dtype.itemsize for x in saved) - sum(host), sum(host)


def residuals(config: Config, mesh: Mesh) -> list[Any]:
    """Types of all that the model keeps from forward to backward beside its parameters; those of layers are stacked."""
    graphdef, params = nnx.split(nnx.eval_shape(lambda: model_maker(config, mesh)(nnx.Rngs(0))))
    tokens = jax.ShapeDtypeStruct((config.batch_size, config.seq_len), jnp.int32)
    pullback = lambda params, tokens: jax.vjp(lambda params: nnx.merge(graphdef, params)(tokens), params)[1]
    jaxpr = jax.make_jaxpr(pullback)(params, tokens).jaxpr
    return [variable.aval for variable in jaxpr.outvars if variable not in jaxpr.invars]


def dry_run(config: Config, mesh: Mesh) -> str:
    """The table of `--dry-run`, of one device where nothing else is said."""
    start = time.perf_counter()
    memory = measure(config, build_program(config, mesh), mesh)
    seconds = time.perf_counter() - start
    rows = [(name, _gib(size)) for name, size in memory.classes.items()]
    rows += [("total", _gib(memory.total)), ("in host memory", _gib(memory.host)), *_speed(config, mesh)]
    limit = config.device_memory or usable_memory(mesh)
    if limit is None:
        rows.append(("longest sequence", "unknown: --device-memory says what a device has, such as 140GiB"))
    else:

        def total(seq_len: int) -> int:
            longer = dataclasses.replace(config, seq_len=seq_len)
            return allocated(build_program(longer, mesh), batch_size=config.batch_size, seq_len=seq_len)

        first = config.seq_len, memory.total
        fits, would = longest(total, first, limit=limit, unit=128 * config.mesh.seq, seconds=_SEARCH_SECONDS - seconds)
        rows.append(("longest sequence", f"{fits:,} tokens compiled to fit {_gib(limit)}, about {would:,} would"))
    return "\n".join(f"{name:<18} {value}" for name, value in rows)


def longest(
    total: Callable[[int], int], first: tuple[int, int], *, limit: int, unit: int, seconds: float
) -> tuple[int, int]:
    """(longest length tried that needs at most `limit` bytes, longest that would by a line through those tried).

    Bytes grow about linearly, so each length tried is where the line through the nearest two meets 98 % of the
    limit; it ends with a length at 95 % or more, or when another trial would outlast `seconds`.

    Args:
        total: sequence length -> bytes, by a compilation.
        first: a length and its bytes.
        unit: lengths tried are multiples of it.
    """
    deadline = time.perf_counter() + seconds
    known, reached = dict([first]), 0
    guess = max(unit, (2 * first[0] if first[1] <= limit else first[0] // 2) // unit * unit)
    while guess not in known:
        begun = time.perf_counter()
        known[guess] = total(guess)
        nearest = sorted(known, key=lambda length: abs(known[length] - limit))[:2]
        (short, low), (long, high) = sorted((length, known[length]) for length in nearest)
        slope = max(high - low, 1) / (long - short)
        reached = int(short + (0.98 * limit - low) / slope) // unit * unit
        guess = max(unit, reached)
        is_near = any(0.95 * limit <= size <= limit for size in known.values())
        if is_near or 2 * time.perf_counter() - begun > deadline:
            break
    fits = max((length for length, size in known.items() if size <= limit), default=0)
    return fits, max(fits, reached)


@contextlib.contextmanager
def explain_exhaustion(config: Config, program: Program, mesh: Mesh) -> Iterator[None]:
    """Turns an out-of-memory error of JAX into one that names the largest class of bytes and the flag to try next.

    Raises:
        InputError: memory was exhausted inside.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise InputError(_explain(config, measure(config, program, mesh), mesh)) from error


def _explain(config: Config, memory: Memory, mesh: Mesh) -> str:
    largest = max(memory.classes, key=memory.classes.__getitem__)
    has = usable_memory(mesh)
    return (
        f"--seq-len {config.seq_len}: out of memory{f', of which a device has {_gib(has)}' if has else ''}: "
        f"a step takes {_gib(memory.total)} and gaps, most of it {largest}, {_gib(memory.classes[largest])}; "
        f"try {_next_flag(config, largest)}"
    )


def _next_flag(config: Config, largest: str) -> str:
    """What makes the class smaller at the least cost in time."""
    cheaper = {"none": "projections", "projections": "attention", "attention": "offload"}
    cheaper |= {"layer": "offload-all", "offload": "offload-all"}
    rows = config.batch_size // config.mesh.data
    if largest == "saved activations" and config.remat in cheaper:
        return f"--remat {cheaper[config.remat]}"
    if largest in ("saved activations", "temporaries") and config.accumulate < rows:
        factor = next(n for n in range(config.accumulate + 1, rows + 1) if rows % n == 0)
        return f"--accumulate {factor}"
    larger = dataclasses.replace(config.mesh, seq=2 * config.mesh.seq)
    return f"more devices, such as --mesh {larger}"


def _speed(config: Config, mesh: Mesh) -> list[tuple[str, str]]:
    kind = mesh.devices.flat[0].device_kind
    dense, attention = step_flops(config.llama, batch_size=config.batch_size, seq_len=config.seq_len)
    seconds = step_seconds(dense, attention, remat=config.remat, num_devices=mesh.size, device_kind=kind)
    flops = dense + attention
    rows = [("FLOPs a step", f"{flops / mesh.size:.3e} ({attention / flops:.0%} attention)")]
    ideal = ideal_seconds(config, mesh)
    if ideal is None:
        return [*rows, ("seconds a step", f"unknown: no peak FLOP/s known of {kind} in {config.dtype}")]
    return [*rows, ("seconds a step", f"{seconds:.3g}, if messages hide"), ("utilisation", f"{ideal / seconds:.0%}")]


def ideal_seconds(config: Config, mesh: Mesh) -> float | None:
    """Seconds in which all devices at their peak do a step's FLOPs: as a share of those it took, the utilisation.

    What is done twice to save memory, and scores that the causal mask hides, count nothing. None where no peak is
    known, as of CPUs.
    """
    peak = peak_flops(mesh.devices.flat[0].device_kind, cast(str, config.dtype))
    flops = sum(step_flops(config.llama, batch_size=config.batch_size, seq_len=config.seq_len))
    return peak and flops / (mesh.size * peak)


def _gib(size: float) -> str:
    return f"{size / _GIB:.2f} GiB" if size >= _GIB / 10 else f"{math.ceil(size / 2**10):,} KiB"
