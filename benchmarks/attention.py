"""distflash_attention on the GPUs of this machine beside others, in turns: `python -m benchmarks.attention`.

The bound of a row is the time of our kernel on one GPU divided by the number of workers. Beside the strategies stand
Ulysses around cuDNN's kernel (`ulysses_cudnn`), and PyTorch's context_parallel (`torch_cp`, in processes of its own
before the others); `balanced_without_messages`, which computes alike and leaves out what travels, so that the
difference is what communication costs; and `balanced_default_flags`, without the XLA flags of distflash_jax.xla_flags.
`zigzag` takes its tokens as if they lay in its order already. Packed documents follow each other in the order of
distflash_jax.order_documents, and for `balanced_unordered` as they come. What cannot take a case is left out of it.
"""

import argparse
import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from benchmarks import peers
from benchmarks.cases import ATTENTION, ATTENTION_DEFAULT, Case
from benchmarks.harness import RESULTS, Quantiles, time_in_turns, write_rows
from distflash_jax import cost, distflash_attention, executor, order_documents, schedule, xla_flags

MODES = ("forward", "forward_backward")
DEFAULT_FLAGS = {
    "xla_gpu_collective_permute_mode": "COLLECTIVES_PRIVATE_MEMORY",
    "xla_gpu_experimental_parallel_collective_overlap_limit": "1",
}
STRATEGIES = tuple(name for name in schedule.STRATEGIES if name not in ("auto", "hybrid"))  # those over one axis
ULYSSES_CUDNN = "ulysses_cudnn"
UNORDERED = "balanced_unordered"
VARIANTS = ("balanced_without_messages", "balanced_default_flags", UNORDERED)
TORCH = "torch_cp"
NAMES = (*STRATEGIES, *VARIANTS, ULYSSES_CUDNN, TORCH)
CAUSAL_ALONE = ("zigzag", ULYSSES_CUDNN, TORCH)  # these take no other mask


def can_take(name: str, case: Case) -> bool:
    """Whether something can be measured in a case, and is not the same as something else there."""
    if name == UNORDERED:
        return bool(case.documents)
    return name not in CAUSAL_ALONE or (case.window is None and not case.documents)


def document_ids(case: Case, num_workers: int, name: str) -> np.ndarray | None:
    """The number of each token's document [B, T], from 1; None where there is but one."""
    if not case.documents:
        return None
    lengths = np.array(case.documents)
    if name != UNORDERED:
        (order,) = order_documents([case.documents], schedule.balanced(num_workers), seq_len=case.T)
        lengths = lengths[order]
    numbers = np.repeat(np.arange(1, len(lengths) + 1, dtype=np.int32), lengths)
    return np.broadcast_to(numbers, (case.B, case.T))


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


def make_call(case: Case, num_workers: int, name: str, mode: str) -> tuple[jax.stages.Lowered, tuple[Any, ...]]:
    """(a lowered program, its inputs: documents' numbers, and random bfloat16 ones that lie on the workers already)."""
    mesh = jax.make_mesh((num_workers,), ("seq",), axis_types=(AxisType.Auto,), devices=jax.devices()[:num_workers])
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(case.B, case.T, heads, case.H) for heads in (case.N, case.K, case.K, case.N)]
    place = lambda key, shape: jax.device_put(
        jax.random.normal(key, shape, jnp.bfloat16), NamedSharding(mesh, P(None, "seq"))
    )
    ids = document_ids(case, num_workers, name)
    ids = None if ids is None else jax.device_put(ids, NamedSharding(mesh, P()))
    inputs = (ids, *tuple(map(place, keys, shapes))[: 3 if mode == "forward" else 4])

    def forward(ids: Array | None, q: Array, k: Array, v: Array) -> Array:
        if name == ULYSSES_CUDNN:
            cudnn = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
            return ulysses(mesh, cudnn)(q, k, v)
        strategy: Any = name if name in STRATEGIES else "balanced"
        mask = {"causal": case.is_causal, "window": case.window, "segment_ids": ids}
        return distflash_attention(q, k, v, mesh=mesh, strategy=strategy, **mask)

    def both(ids: Array | None, q: Array, k: Array, v: Array, dout: Array) -> tuple[Array, ...]:
        return jax.vjp(functools.partial(forward, ids), q, k, v)[1](dout)

    options = DEFAULT_FLAGS if name == "balanced_default_flags" else None
    program = jax.jit(forward if mode == "forward" else both, compiler_options=options)
    with without_messages(name == "balanced_without_messages"):
        return program.lower(*inputs), inputs


def measure(case: Case, mode: str, names: Sequence[str], torch: Quantiles | None) -> list[dict[str, object]]:
    """A row for ours on one GPU, and for each of these names on all of them."""
    num_workers = jax.device_count()
    labels = {"one": "balanced"} | {name: name for name in names if name != TORCH and can_take(name, case)}
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
    parser.add_argument("--cases", nargs="*", choices=ATTENTION, default=list(ATTENTION_DEFAULT))
    parser.add_argument("--modes", nargs="*", choices=MODES, default=list(MODES))
    parser.add_argument("--names", nargs="*", choices=NAMES, default=list(NAMES))
    parser.add_argument("--out", type=Path, default=RESULTS / "attention.csv")
    arguments = parser.parse_args()
    xla_flags.apply(xla_flags.choose())
    cases = [ATTENTION[name] for name in arguments.cases]
    with_torch = [case for case in cases if can_take(TORCH, case)] if TORCH in arguments.names else []
    torch = peers.time_torch(with_torch, arguments.modes) if with_torch else {}
    for case in cases:
        for mode in arguments.modes:
            write_rows(arguments.out, measure(case, mode, arguments.names, torch.get((case.name, mode))))


if __name__ == "__main__":
    main()
