"""Tile sizes of the Hopper kernels, measured on the GPU at hand: `python -m benchmarks.tune --out block_sizes.json`.

For each direction, head dim and kind of mask, the candidates run in turns beside the entry of the table. A line shows
their TFLOP/s on visible scores, each named by what it changes in the entry; * marks the choice: the fastest, or the
entry unless another is 2 % faster. What does not compile or fit is named in one line and left out.

The environment variable DISTFLASH_BLOCK_SIZES=block_sizes.json makes the kernels use the choices; with it,
`pytest --platform cuda -m gpu tests/test_gpu_kernels.py` checks what they compute.
"""

import argparse
import functools
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

import jax
import numpy as np

from benchmarks.cases import DOCUMENTS, Case
from benchmarks.harness import time_in_turns
from benchmarks.kernel import OURS, WORK, Function, block_functions, compile_all, random_inputs
from benchmarks.peers import one_line
from distflash_jax import which_implementation
from pallas_kernels import IMPLEMENTATIONS, block_sizes
from pallas_kernels.block_sizes import CANDIDATES, HEAD_DIMS, KINDS, TABLE, Blocks, Key

DIRECTIONS = ("forward", "backward")
GAIN = 1.02  # how much faster than the entry of the table its successor is, at least


def make_case(key: Key, tokens: int, heads: int) -> Case:
    """A call for which this entry is looked up: a window of a quarter of the tokens, documents until they are full."""
    _, head_dim, _, kind = key
    window = tokens // 4 if kind == "window" else None
    ends = itertools.accumulate(itertools.cycle(DOCUMENTS))
    lengths = np.diff([*itertools.takewhile(lambda end: end < tokens, ends), tokens], prepend=0).tolist()
    documents = tuple(lengths) if kind == "segments" else ()
    return Case(tokens, heads, heads, head_dim, kind != "full", window=window, documents=documents)


def make_functions(case: Case, key: Key) -> dict[Blocks, Function]:
    """The kernel with the entry of the table, and with each candidate."""
    direction, head_dim, *_ = key
    kernel = IMPLEMENTATIONS[OURS]
    functions = {}
    for blocks in (TABLE[key], *CANDIDATES[direction, head_dim]):
        with_blocks = functools.partial(getattr(kernel, direction), blocks=blocks)
        functions[blocks] = block_functions(case, replace(kernel, **{direction: with_blocks}))[direction]
    return functions


def measure(case: Case, key: Key) -> dict[Blocks, float]:
    """Seconds of the entry and of each candidate, less what fails, which is printed."""
    direction, _, dtype, _ = key
    inputs = random_inputs(case, dtype)
    if direction == "backward":
        inputs = inputs.given(*jax.jit(block_functions(case, IMPLEMENTATIONS[OURS])["forward"])(inputs))
    functions = make_functions(case, key)
    programs, errors = compile_all({blocks: (function, inputs) for blocks, function in functions.items()})
    for blocks, error in errors.items():
        print(f"{title(key)}  {label(blocks, TABLE[key])} left out, {one_line(error)}", flush=True)
    if not programs:
        return {}
    quantiles = time_in_turns({blocks: functools.partial(run, inputs) for blocks, run in programs.items()})
    return {blocks: x.p50 for blocks, x in quantiles.items()}


def winner(entry: Blocks, seconds: Mapping[Blocks, float]) -> Blocks:
    """The fastest; the entry, if it was measured, unless another is faster by GAIN."""
    fastest = min(seconds, key=seconds.__getitem__)
    return entry if entry in seconds and seconds[entry] < GAIN * seconds[fastest] else fastest


def title(key: Key) -> str:
    return f"{' '.join(map(str, key)):30}"


def label(blocks: Blocks, entry: Blocks) -> str:
    """The fields in which blocks differ from the entry of the table."""
    fields = asdict(entry)
    return " ".join(f"{name}={x}" for name, x in asdict(blocks).items() if x != fields[name]) or "table"


def tune(keys: Iterable[Key], tokens: int, heads: int, out: Path | None) -> None:
    """Prints a line for each key, and writes the file anew after it: what was measured stays if a later one fails."""
    entries = {}
    for key in keys:
        case = make_case(key, tokens, heads)
        seconds = measure(case, key)
        if not seconds:
            continue
        entries[key] = winner(TABLE[key], seconds)
        flops = WORK[key[0]] * case.forward_flops
        rates = (
            f"{flops / x / 1e12:4.0f}{'*' if blocks == entries[key] else ' '} {label(blocks, TABLE[key])}"
            for blocks, x in seconds.items()
        )
        print(f"{title(key)}  {'  '.join(rates)}", flush=True)
        if out is not None:
            block_sizes.write(out, entries)
    if out is not None and entries:
        print(f"{out}: used where the environment has {block_sizes.FILE_VARIABLE}={out.resolve()}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directions", nargs="*", choices=DIRECTIONS, default=DIRECTIONS)
    parser.add_argument("--head-dims", nargs="*", type=int, choices=HEAD_DIMS, default=HEAD_DIMS)
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=KINDS, help="of mask")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--out", type=Path, help="where the choices are written")
    arguments = parser.parse_args()
    try:
        which_implementation(OURS, dtype=arguments.dtype, head_dim=max(HEAD_DIMS))
    except ValueError as error:
        parser.error(str(error))
    keys = itertools.product(arguments.directions, arguments.head_dims, (arguments.dtype,), arguments.kinds)
    tune(keys, arguments.tokens, arguments.heads, arguments.out)


if __name__ == "__main__":
    main()
