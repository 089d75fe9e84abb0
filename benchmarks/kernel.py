"""Block kernels on one GPU beside cuDNN, in turns: `python -m benchmarks.kernel`.

Forward is one call; backward is ours alone, and for cuDNN forward and backward minus forward. The bound of a row is the
rate of a bfloat16 matrix product of 8192 x 8192 in the same run.
"""

import argparse
import functools
from pathlib import Path

import jax
import jax.numpy as jnp

from benchmarks.cases import KERNEL, Case
from benchmarks.harness import RESULTS, Quantiles, time_in_turns, write_rows
from pallas_kernels import IMPLEMENTATIONS, Box, Mask, Operand


def make_calls(case: Case) -> dict[str, functools.partial]:
    """Compiled calls on random bfloat16 inputs, by implementation and mode."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(case.B, case.T, heads, case.H) for heads in (case.N, case.K, case.K, case.N)]
    q, k, v, dout = (jax.random.normal(key, x, jnp.bfloat16) for key, x in zip(keys, shapes, strict=True))
    mask = Mask(jnp.int32(0), jnp.int32(0), jnp.int32(case.T), case.is_causal)
    own = lambda *arrays: Operand(arrays, Box(0, case.T, 0, arrays[0].shape[2]), None, jnp.array(False))
    kernel, scale = IMPLEMENTATIONS["hopper"], case.H**-0.5
    forward = jax.jit(lambda q, k, v: kernel.forward(own(q), own(k, v), mask, scale))
    backward = jax.jit(lambda *x: kernel.backward(own(*x[:4]), own(*x[4:]), mask, scale))
    cudnn = functools.partial(jax.nn.dot_product_attention, implementation="cudnn", is_causal=case.is_causal)
    out, lse = forward(q, k, v)
    delta = jnp.sum(dout.astype(jnp.float32) * out, axis=-1)
    return {
        "hopper forward": functools.partial(forward, q, k, v),
        "cudnn forward": functools.partial(jax.jit(cudnn), q, k, v),
        "hopper backward": functools.partial(backward, q, dout, lse, delta, k, v),
        "cudnn both": functools.partial(jax.jit(lambda *x: jax.vjp(cudnn, *x[:3])[1](x[3])), q, k, v, dout),
    }


def matmul_tflops() -> float:
    a = jax.random.normal(jax.random.key(0), (8192, 8192), jnp.bfloat16)
    return 2 * 8192**3 / time_in_turns({"": functools.partial(jax.jit(jnp.dot), a, a)})[""].p50 / 1e12


def measure(case: Case, bound: float) -> list[dict[str, object]]:
    seconds = time_in_turns(make_calls(case))
    forward = seconds["cudnn forward"].p50
    seconds["cudnn backward"] = Quantiles(*(x - forward for x in seconds.pop("cudnn both")))
    rows = []
    for name, quantiles in seconds.items():
        implementation, mode = name.split()
        flops = case.forward_flops * (1 if mode == "forward" else 2.5)
        p80, p50, p20 = (flops / x / 1e12 for x in quantiles)
        common = {
            "benchmark": "kernel",
            "case": case.name,
            "implementation": implementation,
            "workers": 1,
            "mode": mode,
        }
        rows.append(
            common | {"metric": "tflops", "unit": "TFLOP/s", "p20": p20, "p50": p50, "p80": p80, "bound": bound}
        )
    rates = {f"{row['implementation']} {row['mode']}": row["p50"] for row in rows}
    print(f"{case.name:22} " + "  ".join(f"{name} {rate:5.0f}" for name, rate in rates.items()), flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="*", choices=KERNEL, default=list(KERNEL))
    parser.add_argument("--out", type=Path, default=RESULTS / "kernel.csv")
    arguments = parser.parse_args()
    bound = matmul_tflops()
    print(f"matrix product {bound:.0f} TFLOP/s", flush=True)
    for name in arguments.cases:
        write_rows(arguments.out, measure(KERNEL[name], bound))


if __name__ == "__main__":
    main()
