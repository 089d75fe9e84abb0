"""distflash_attention on the GPUs of this machine beside others, in turns: `python -m benchmarks.attention`.

The bound of a row is the time of our kernel on one GPU divided by the number of workers. Beside the strategies stand
Ulysses around cuDNN's kernel (`ulysses_cudnn`), and PyTorch's context_parallel (`torch_cp`, in processes of its own
before the others); `balanced_without_messages`, which computes alike and leaves out what travels, so that the
difference is what communication costs; and `balanced_default_flags`, without the XLA flags of distflash_jax.xla_flags.
`zigzag` takes its tokens as if they lay in its order already. `rsa` is measured where it is named: from 32K tokens on,
its scores do not fit on two GPUs.
"""

import argparse
import contextlib
import functools
import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from benchmarks.cases import ATTENTION, Case
from benchmarks.harness import RESULTS, Quantiles, quantiles, time_in_turns, write_rows
from benchmarks.peers import one_line
from distflash_jax import cost, distflash_attention, executor, schedule, xla_flags

MODES = ("forward", "forward_backward")
DEFAULT_FLAGS = {
    "xla_gpu_collective_permute_mode": "COLLECTIVES_PRIVATE_MEMORY",
    "xla_gpu_experimental_parallel_collective_overlap_limit": "1",
}
STRATEGIES = tuple(name for name in schedule.STRATEGIES if name not in ("auto", "hybrid"))  # those over one axis
ULYSSES_CUDNN = "ulysses_cudnn"
VARIANTS = ("balanced_without_messages", "balanced_default_flags")
TORCH = "torch_cp"
NAMES = (*STRATEGIES, *VARIANTS, ULYSSES_CUDNN, TORCH)


@contextlib.contextmanager
def without_messages(is_silent: bool) -> Iterator[None]:
    """Programs traced inside keep what they would send: wrong results in the same time, less that of the messages."""
    stay = mock.patch.object(executor, "_send", lambda arrays, permutation, axis: arrays)
    with stay if is_silent else contextlib.nullcontext():
        yield


def ulysses(mesh: Mesh, attention: Callable[[Array, Array, Array], Array]) -> Callable[[Array, Array, Array], Array]:
    """Attention of whole sequences around which heads are exchanged for tokens, whose number divides both. It has
    gradients of its own: strategy="ulysses" is for kernels that have not.
    """
    exchange = functools.partial(lax.all_to_all, axis_name="seq", tiled=True)

    def attend(*chunks: Array) -> Array:
        whole = (exchange(x, split_axis=2, concat_axis=1) for x in chunks)
        return exchange(attention(*whole), split_axis=1, concat_axis=2)

    tokens = P(None, "seq")
    return jax.shard_map(attend, mesh=mesh, in_specs=(tokens,) * 3, out_specs=tokens, check_vma=False)


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
    if name == ULYSSES_CUDNN:
        attention = ulysses(
            mesh, functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
        )
    else:
        strategy: Any = name if name in STRATEGIES else "balanced"
        attention = functools.partial(distflash_attention, mesh=mesh, causal=case.is_causal, strategy=strategy)
    both = lambda q, k, v, dout: jax.vjp(attention, q, k, v)[1](dout)
    options = DEFAULT_FLAGS if name == "balanced_default_flags" else None
    program = jax.jit(attention if mode == "forward" else both, compiler_options=options)
    with without_messages(name == "balanced_without_messages"):
        return program.lower(*inputs), inputs


def time_torch(cases: Sequence[Case], modes: Sequence[str]) -> dict[tuple[str, str], Quantiles]:
    """Seconds of PyTorch's context_parallel by (case, mode); {} and a line where it cannot run."""
    calls = {f"{case.T} {case.N} {case.K} {case.H} {mode}": (case.name, mode) for case in cases for mode in modes}
    num_gpus = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    command = ["torchrun", "--nproc-per-node", str(num_gpus), "-m", "benchmarks.torch_cp", *calls]
    try:
        child = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"{TORCH}: left out, {one_line(error)} {(getattr(error, 'stderr', None) or '')[-300:]}", flush=True)
        return {}
    lines = [json.loads(line) for line in child.stdout.splitlines() if line.startswith("{")]
    for line in lines:
        if "error" in line:
            print(f"{TORCH}: {line['case']} left out, {line['error']}", flush=True)
    return {calls[line["case"]]: quantiles(line["seconds"]) for line in lines if "seconds" in line}


def measure(case: Case, mode: str, names: Sequence[str], torch: Quantiles | None) -> list[dict[str, object]]:
    """A row for ours on one GPU, and for each of these names on all of them."""
    num_workers = jax.device_count()
    labels = {"one": "balanced"} | {name: name for name in names if name != TORCH}
    # Lowered in turn, since Mosaic GPU keeps state in globals; compiled in parallel.
    lowered = {
        label: make_call(case, 1 if label == "one" else num_workers, name, mode) for label, name in labels.items()
    }
    with ThreadPoolExecutor(len(lowered)) as pool:
        futures = {label: pool.submit(program.compile) for label, (program, _) in lowered.items()}
    calls = {label: functools.partial(futures[label].result(), *inputs) for label, (_, inputs) in lowered.items()}
    seconds = time_in_turns(calls) | ({} if torch is None else {TORCH: torch})
    bound = seconds["one"].p50 / num_workers
    rows = []
    for label, found in seconds.items():
        workers = 1 if label == "one" else num_workers
        common = {
            "benchmark": "attention",
            "case": case.name,
            "implementation": labels.get(label, label),
            "workers": workers,
            "mode": mode,
            "bound": bound * num_workers / workers,
        }
        rows.append(common | {"metric": "seconds", "unit": "s"} | found._asdict())
        flops = case.forward_flops * (1 if mode == "forward" else sum(cost.WORK.values()))
        print(
            f"{case.name:24} {mode:17} {label:26} {found.p50 * 1e3:8.2f} ms  "
            f"{flops / found.p50 / workers / 1e12:6.1f} TFLOP/s/GPU  "
            f"{100 * common['bound'] / found.p50:5.1f}% of bound",
            flush=True,
        )
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", choices=ATTENTION, default=list(ATTENTION))
    parser.add_argument("--modes", nargs="*", choices=MODES, default=list(MODES))
    parser.add_argument("--names", nargs="*", choices=NAMES, default=[name for name in NAMES if name != "rsa"])
    parser.add_argument("--out", type=Path, default=RESULTS / "attention.csv")
    arguments = parser.parse_args()
    xla_flags.apply(xla_flags.choose())
    cases = [ATTENTION[name] for name in arguments.cases]
    torch = time_torch(cases, arguments.modes) if TORCH in arguments.names else {}
    for case in cases:
        for mode in arguments.modes:
            write_rows(arguments.out, measure(case, mode, arguments.names, torch.get((case.name, mode))))


if __name__ == "__main__":
    main()
