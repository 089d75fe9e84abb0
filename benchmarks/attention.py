"""distflash_attention on the GPUs of this machine beside others, in turns: `python -m benchmarks.attention`.

The bound of a row is the time of our kernel on one GPU divided by the number of workers. Beside the strategies stand
`ulysses_cudnn`, heads exchanged for tokens around cuDNN's kernel; `balanced_without_messages`, which computes alike and
leaves out what travels, so that the difference is what communication costs; and `balanced_default_flags`, without the
XLA flags of distflash_jax.xla_flags.
"""

import argparse
import contextlib
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from benchmarks.cases import ATTENTION, Case
from benchmarks.harness import RESULTS, time_in_turns, write_rows
from distflash_jax import cost, distflash_attention, executor, xla_flags
from distflash_jax.schedule import STRATEGIES

MODES = ("forward", "forward_backward")
DEFAULT_FLAGS = {
    "xla_gpu_collective_permute_mode": "COLLECTIVES_PRIVATE_MEMORY",
    "xla_gpu_experimental_parallel_collective_overlap_limit": "1",
}
PEERS = ("ulysses_cudnn", "balanced_without_messages", "balanced_default_flags")


def ulysses(q: Array, k: Array, v: Array, *, mesh: jax.sharding.Mesh, implementation: str) -> Array:
    """Causal attention of [B, T, N, H] sharded over T: all tokens of some heads on each GPU, and back."""
    exchange = functools.partial(lax.all_to_all, axis_name="seq", tiled=True)

    def attend(*chunks: Array) -> Array:
        whole = (exchange(x, split_axis=2, concat_axis=1) for x in chunks)
        out = jax.nn.dot_product_attention(*whole, is_causal=True, implementation=implementation)  # pyright: ignore
        return exchange(out, split_axis=1, concat_axis=2)

    spec = P(None, "seq")
    return jax.shard_map(attend, mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec)(q, k, v)


@contextlib.contextmanager
def without_messages(is_silent: bool) -> Iterator[None]:
    """Programs traced inside keep what they would send: wrong results in the same time, less that of the messages."""
    stay = mock.patch.object(executor, "_send", lambda arrays, permutation, axis: arrays)
    with stay if is_silent else contextlib.nullcontext():
        yield


def make_call(case: Case, num_workers: int, name: str, mode: str) -> tuple[jax.stages.Lowered, tuple[Array, ...]]:
    """(a lowered program, random bfloat16 inputs that lie on the workers already)."""
    mesh = jax.make_mesh((num_workers,), ("seq",), axis_types=(AxisType.Auto,), devices=jax.devices()[:num_workers])
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(case.B, case.T, heads, case.H) for heads in (case.N, case.K, case.K, case.N)]
    place = lambda key, shape: jax.device_put(
        jax.random.normal(key, shape, jnp.bfloat16), NamedSharding(mesh, P(None, "seq"))
    )
    inputs = tuple(map(place, keys, shapes))[: 3 if mode == "forward" else 4]
    attention: Callable[..., Array]
    if name == "ulysses_cudnn":
        on_gpu = mesh.devices.flat[0].platform != "cpu"
        attention = functools.partial(ulysses, mesh=mesh, implementation="cudnn" if on_gpu else "xla")
    else:
        strategy = name if name in STRATEGIES else "balanced"
        attention = functools.partial(distflash_attention, mesh=mesh, causal=case.is_causal, strategy=strategy)
    both = lambda q, k, v, dout: jax.vjp(attention, q, k, v)[1](dout)
    options = DEFAULT_FLAGS if name == "balanced_default_flags" else None
    program = jax.jit(attention if mode == "forward" else both, compiler_options=options)
    with without_messages(name == "balanced_without_messages"):
        return program.lower(*inputs), inputs


def measure(case: Case, mode: str) -> list[dict[str, object]]:
    """A row for ours on one GPU, and for each strategy and peer on all of them."""
    num_workers = jax.device_count()
    names = {"one": "balanced"} | {name: name for name in (*STRATEGIES, *PEERS)}
    # Lowered in turn, since Mosaic GPU keeps state in globals; compiled in parallel.
    lowered = {
        label: make_call(case, 1 if label == "one" else num_workers, name, mode) for label, name in names.items()
    }
    with ThreadPoolExecutor(len(lowered)) as pool:
        futures = {label: pool.submit(program.compile) for label, (program, _) in lowered.items()}
    calls = {label: functools.partial(futures[label].result(), *inputs) for label, (_, inputs) in lowered.items()}
    seconds = time_in_turns(calls)
    bound = seconds["one"].p50 / num_workers
    rows = []
    for label, quantiles in seconds.items():
        workers = 1 if label == "one" else num_workers
        common = {
            "benchmark": "attention",
            "case": case.name,
            "implementation": names[label],
            "workers": workers,
            "mode": mode,
            "bound": bound * num_workers / workers,
        }
        rows.append(common | {"metric": "seconds", "unit": "s"} | quantiles._asdict())
        flops = case.forward_flops * (1 if mode == "forward" else sum(cost.WORK.values()))
        print(
            f"{case.name:24} {mode:17} {label:26} {quantiles.p50 * 1e3:8.2f} ms  "
            f"{flops / quantiles.p50 / workers / 1e12:6.1f} TFLOP/s/GPU  "
            f"{100 * common['bound'] / quantiles.p50:5.1f}% of bound",
            flush=True,
        )
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", choices=ATTENTION, default=list(ATTENTION))
    parser.add_argument("--modes", nargs="*", choices=MODES, default=list(MODES))
    parser.add_argument("--out", type=Path, default=RESULTS / "attention.csv")
    arguments = parser.parse_args()
    xla_flags.apply(xla_flags.choose())
    for name in arguments.cases:
        for mode in arguments.modes:
            write_rows(arguments.out, measure(ATTENTION[name], mode))


if __name__ == "__main__":
    main()
