"""distflash_attention on the GPUs of this machine, strategy by strategy: `python -m benchmarks.attention`.

The bound of a row is the time of the same kernel on one GPU divided by the number of workers.
"""

import argparse
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.cases import ATTENTION, Case
from benchmarks.harness import RESULTS, time_in_turns, write_rows
from distflash_jax import distflash_attention
from distflash_jax.attention import STRATEGIES, Strategy

MODES = ("forward", "forward_backward")


def make_call(case: Case, num_workers: int, strategy: Strategy, mode: str):
    """A compiled call on random bfloat16 inputs that lie on the workers already."""
    mesh = jax.make_mesh((num_workers,), ("seq",), axis_types=(AxisType.Auto,), devices=jax.devices()[:num_workers])
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(case.B, case.T, heads, case.H) for heads in (case.N, case.K, case.K, case.N)]
    place = lambda key, shape: jax.device_put(
        jax.random.normal(key, shape, jnp.bfloat16), NamedSharding(mesh, P(None, "seq"))
    )
    q, k, v, dout = map(place, keys, shapes)
    attention = functools.partial(distflash_attention, mesh=mesh, causal=case.is_causal, strategy=strategy)
    if mode == "forward":
        return functools.partial(jax.jit(attention), q, k, v)
    return functools.partial(jax.jit(lambda q, k, v, dout: jax.vjp(attention, q, k, v)[1](dout)), q, k, v, dout)


def measure(case: Case, mode: str) -> list[dict[str, object]]:
    num_workers = jax.device_count()
    calls = {"one": make_call(case, 1, "balanced", mode)}
    calls |= {strategy: make_call(case, num_workers, strategy, mode) for strategy in STRATEGIES}
    seconds = time_in_turns(calls)
    bound = seconds["one"].p50 / num_workers
    rows = []
    for name, quantiles in seconds.items():
        is_one = name == "one"
        common = {
            "benchmark": "attention",
            "case": case.name,
            "implementation": "balanced" if is_one else name,
            "workers": 1 if is_one else num_workers,
            "mode": mode,
            "bound": seconds["one"].p50 if is_one else bound,
        }
        rows.append(common | {"metric": "seconds", "unit": "s"} | quantiles._asdict())
        flops = case.forward_flops * (1 if mode == "forward" else 3.5)
        print(
            f"{case.name:24} {mode:17} {name:17} {quantiles.p50 * 1e3:8.2f} ms  "
            f"{flops / quantiles.p50 / common['workers'] / 1e12:6.1f} TFLOP/s/GPU  "
            f"{100 * common['bound'] / quantiles.p50:5.1f}% of bound",
            flush=True,
        )
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="*", choices=ATTENTION, default=list(ATTENTION))
    parser.add_argument("--out", type=Path, default=RESULTS / "attention.csv")
    arguments = parser.parse_args()
    for name in arguments.cases:
        for mode in MODES:
            write_rows(arguments.out, measure(ATTENTION[name], mode))


if __name__ == "__main__":
    main()
