"""Tile sizes of our kernels, measured on the GPU at hand: `python -m benchmarks.tune --out block_sizes.json`.

Those of the kernels that run there, or of --implementation. For each direction, head dim and, on Hopper, kind of mask,
the candidates run in turns beside the entry of the table. A line shows their TFLOP/s on visible scores, each named by
what it changes in the entry; * marks the choice: the fastest, or the entry unless another is 2 % faster. What does not
compile or fit is named in one line and left out.

The environment variable DISTFLASH_BLOCK_SIZES=block_sizes.json makes the kernels use the choices; with it,
`pytest --platform cuda -m gpu tests/test_gpu_kernels.py` checks what they compute.
"""

import argparse
import functools
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.cases import DOCUMENTS, Case
from benchmarks.harness import time_in_turns
from benchmarks.kernel import WORK, Function, block_functions, compile_all, random_inputs
from benchmarks.peers import one_line
from distflash_jax import which_implementation
from pallas_kernels import IMPLEMENTATIONS, block_sizes, triton_blocks
from pallas_kernels.block_sizes import ALL_KINDS, SHORT, SHORT_KEYS

GAIN = 1.02  # how much faster than the entry of the table its successor is, at least
Key = tuple[Any, ...]
TABLES: Mapping[str, tuple[Mapping[Any, Any], Mapping[tuple[str, int], tuple[Any, ...]]]] = {
    "hopper": (block_sizes.TABLE, block_sizes.CANDIDATES),
    "triton": (triton_blocks.TABLE, triton_blocks.CANDIDATES),
}


def find_keys(implementation: str, dtype: str, compute_capability: str) -> list[Key]:
    """The entries of a table that have candidates, for this dtype and GPU."""
    table, candidates = TABLES[implementation]
    places = {(dtype, kind) for kind in ALL_KINDS}
    places |= {(jnp.dtype(dtype).itemsize * 8, triton_blocks.kind_of(compute_capability))}
    return [key for key in table if key[:2] in candidates and key[2:] in places]


def make_case(key: Key, tokens: int, heads: int) -> Case:
    """A call for which this entry is looked up: a window of a quarter of the tokens, documents until they are full.

    The short kind is causal and has few tokens; no other kind is it from 16K tokens of 16 heads on.
    """
    _, head_dim, _, kind = key
    tokens = min(tokens, SHORT_KEYS) if kind == SHORT else tokens
    window = tokens // 4 if kind == "window" else None
    ends = itertools.accumulate(itertools.cycle(DOCUMENTS))
    lengths = np.diff([*itertools.takewhile(lambda end: end < tokens, ends), tokens], prepend=0).tolist()
    documents = tuple(lengths) if kind == "segments" else ()
    return Case(tokens, heads, heads, head_dim, kind != "full", window=window, documents=documents)


def mode_of(direction: str) -> str:
    return "backward" if direction in ("keys_backward", "rows_backward") else direction


def make_functions(case: Case, key: Key, implementation: str) -> dict[Any, Function]:
    """The kernels with the entry of the table, and with each candidate."""
    table, candidates = TABLES[implementation]
    direction, mode = key[0], mode_of(key[0])
    which = "forward" if mode == "forward" else "backward"
    kernel = IMPLEMENTATIONS[implementation]
    functions = {}
    for blocks in (table[key], *candidates[key[:2]]):
        given = {direction: blocks} if (implementation, which) == ("triton", "backward") else blocks
        with_blocks = functools.partial(getattr(kernel, which), blocks=given)
        functions[blocks] = block_functions(case, replace(kernel, **{which: with_blocks}))[mode]
    return functions


def measure(case: Case, key: Key, implementation: str, dtype: str) -> dict[Any, float]:
    """Seconds of the entry and of each candidate, less what fails, which is printed."""
    inputs = random_inputs(case, dtype)
    if mode_of(key[0]) != "forward":
        inputs = inputs.given(*jax.jit(block_functions(case, IMPLEMENTATIONS[implementation])["forward"])(inputs))
    functions = make_functions(case, key, implementation)
    programs, errors = compile_all({blocks: (function, inputs) for blocks, function in functions.items()})
    entry = TABLES[implementation][0][key]
    for blocks, error in errors.items():
        print(f"{title(key)}  {label(blocks, entry)} left out, {one_line(error)}", flush=True)
    if not programs:
        return {}
    quantiles = time_in_turns({blocks: functools.partial(run, inputs) for blocks, run in programs.items()})
    return {blocks: x.p50 for blocks, x in quantiles.items()}


def winner(entry: Any, seconds: Mapping[Any, float]) -> Any:
    """The fastest; the entry, if it was measured, unless another is faster by GAIN."""
    fastest = min(seconds, key=seconds.__getitem__)
    return entry if entry in seconds and seconds[entry] < GAIN * seconds[fastest] else fastest


def title(key: Key) -> str:
    return f"{block_sizes.name(key):30}"


def label(blocks: Any, entry: Any) -> str:
    """The fields in which blocks differ from the entry of the table."""
    fields = asdict(entry)
    return " ".join(f"{name}={x}" for name, x in asdict(blocks).items() if x != fields[name]) or "table"


def tune(
    keys: Iterable[Key], tokens: int, heads: int, out: Path | None, implementation: str, dtype: str = "bfloat16"
) -> None:
    """Prints a line for each key, and writes the file anew after it: what was measured stays if a later one fails."""
    entries, table = {}, TABLES[implementation][0]
    for key in keys:
        case = make_case(key, tokens, heads)
        seconds = measure(case, key, implementation, dtype)
        if not seconds:
            continue
        entries[key] = winner(table[key], seconds)
        flops = WORK[mode_of(key[0])] * case.forward_flops
        rates = (
            f"{flops / x / 1e12:4.0f}{'*' if blocks == entries[key] else ' '} {label(blocks, table[key])}"
            for blocks, x in seconds.items()
        )
        print(f"{title(key)}  {'  '.join(rates)}", flush=True)
        if out is not None:
            block_sizes.write(out, implementation, entries)
    if out is not None and entries:
        print(f"{out}: used where the environment has {block_sizes.FILE_VARIABLE}={out.resolve()}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--implementation", choices=TABLES, help="default: the one that distflash_attention takes here")
    parser.add_argument("--directions", nargs="*", help="default: all, such as forward and backward")
    parser.add_argument("--head-dims", nargs="*", type=int, help="default: all")
    parser.add_argument("--kinds", nargs="*", choices=ALL_KINDS, default=ALL_KINDS, help="of mask")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--out", type=Path, help="where the choices are written")
    arguments = parser.parse_args()
    try:
        implementation = which_implementation(arguments.implementation, dtype=arguments.dtype).name
        if implementation not in TABLES:
            raise ValueError(f"{implementation} has no tile sizes; it runs here as {which_implementation().reason}")
    except ValueError as error:
        parser.error(str(error))
    capability = getattr(jax.devices()[0], "compute_capability", "")
    keys = [
        key
        for key in find_keys(implementation, arguments.dtype, capability)
        if key[0] in (arguments.directions or key)
        and key[1] in (arguments.head_dims or key)
        and (implementation == "triton" or key[3] in arguments.kinds)
    ]
    tune(keys, arguments.tokens, arguments.heads, arguments.out, implementation, arguments.dtype)


if __name__ == "__main__":
    main()
