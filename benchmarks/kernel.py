"""Block kernels on one GPU beside their peers, in turns in one process: `python -m benchmarks.kernel`.

Modes: forward; backward, given what the forward returned; both, in one program; deterministic, a backward of ours alone
that repeats bit by bit. A peer has no backward alone: its backward is both minus forward. --implementations names
block kernels of ours (hopper is the default, triton another). `torch`, PyTorch's FlashAttention-2, is measured before
the others. The bound of a row is the rate of a bfloat16 matrix product of 8192 x 8192 in the same run. What cannot run
is named in one line and left out.
`--before DIR` also times the kernels of another checkout; its numbers are printed, and no rows are written of them.
`--part 0/2`, and 1/2 beside it, share the cases among GPUs that CUDA_VISIBLE_DEVICES tells apart.
`--table` measures nothing and prints the newest rows; `--write` puts them into the documents.
"""

import argparse
import functools
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from benchmarks import before, tables
from benchmarks.cases import KERNEL, KERNEL_DEFAULT, Case, select
from benchmarks.harness import RESULTS, Quantiles, newest_rows, time_in_turns, write_rows
from benchmarks.peers import LABELS, PEERS, TORCH, TRITON_LABELS, Peer, available, one_line, time_torch
from distflash_jax import cost
from pallas_kernels import IMPLEMENTATIONS, BlockAttention, Box, Mask, Operand

ROOT = Path(__file__).parent.parent
OURS = "hopper"
# Of each mode, in units of the forward's operations; deterministic counts what it must do, not what it does twice.
WORK = cost.WORK | {"both": sum(cost.WORK.values()), "deterministic": cost.WORK["backward"]}


class Part(NamedTuple):
    """Every count-th case, from the index-th on."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> "Part":
        found = re.fullmatch(r"(\d+)/(\d+)", text)
        if found is None or int(found[1]) >= int(found[2]):
            raise argparse.ArgumentTypeError(f"{text}: must be I/N with I below N, such as 0/2")
        return cls(int(found[1]), int(found[2]))

    def of(self, cases: list[Case]) -> list[Case]:
        return cases[self.index :: self.count]


class Key(NamedTuple):
    implementation: str
    mode: str


class Inputs(NamedTuple):
    """What the functions take. documents: the number of each row's document, from 1; None where there is but one."""

    q: Float[Array, "B T N H"]
    k: Float[Array, "B T K H"]
    v: Float[Array, "B T K H"]
    dout: Float[Array, "B T N H"]
    lse: Float[Array, "B T N"]
    delta: Float[Array, "B T N"]
    documents: Int[Array, "B T"] | None

    def given(self, out: Float[Array, "B T N H"], lse: Float[Array, "B T N"]) -> "Inputs":
        """The inputs with what the backward needs of a forward."""
        delta = jnp.sum(self.dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
        return self._replace(lse=lse, delta=jax.lax.optimization_barrier(delta))  # as attention has it

    def of(self, peer: Peer) -> "Inputs":
        """The inputs as this peer takes them."""
        q = self.q if peer.has_scale else self.q * self.q.shape[-1] ** -0.5
        q, k, v, dout = (x.astype(peer.dtype) for x in (q, self.k, self.v, self.dout))
        return self._replace(q=q, k=k, v=v, dout=dout)


Function = Callable[[Inputs], Any]


def random_inputs(case: Case, dtype: DTypeLike = jnp.bfloat16) -> Inputs:
    """Normal inputs, with zeros for lse and delta."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(case.B, case.T, heads, case.H) for heads in (case.N, case.K, case.K, case.N)]
    q, k, v, dout = (jax.random.normal(key, x, dtype) for key, x in zip(keys, shapes, strict=True))
    zeros = jnp.zeros(q.shape[:3], jnp.float32)
    numbers = np.repeat(np.arange(1, len(case.documents) + 1, dtype=np.int32), case.documents)
    documents = jnp.broadcast_to(numbers, (case.B, case.T)) if case.documents else None
    return Inputs(q, k, v, dout, zeros, zeros, documents)


def operands(case: Case, x: Inputs, *queries: Array) -> tuple[Operand, Operand, Mask]:
    """The first arguments of our kernels: queries, keys, and what is visible."""
    side = lambda arrays: Operand(arrays, Box(0, case.T, 0, arrays[0].shape[2]), None, jnp.array(False))
    segment_ids = None if x.documents is None else (x.documents, x.documents)
    mask = Mask(jnp.int32(0), jnp.int32(0), jnp.int32(case.T), case.is_causal, case.window, segment_ids)
    return side(queries), side((x.k, x.v)), mask


def block_functions(case: Case, kernel: BlockAttention) -> dict[str, Function]:
    """A block kernel's function of each mode; they return what peers return, in the dtype of the inputs."""
    scale = case.H**-0.5
    forward = lambda x: kernel.forward(*operands(case, x, x.q), scale, None, x.q.dtype)
    backward = lambda x, **options: kernel.backward(
        *operands(case, x, x.q, x.dout, x.lse, x.delta), scale, None, x.q.dtype, **options
    )
    return {
        "forward": forward,
        "backward": backward,
        "both": lambda x: backward(x.given(*forward(x))),
        "deterministic": lambda x: backward(x, deterministic=True),
    }


def make_functions(
    case: Case, peers: dict[str, Peer], modes: Collection[str], kernels: Mapping[str, BlockAttention]
) -> dict[Key, Function]:
    """What has to be measured for these modes; always the forward, without which there is nothing to go back from."""
    functions = {
        Key(name, mode): function
        for name, kernel in kernels.items()
        for mode, function in block_functions(case, kernel).items()
        if mode in ("forward", *modes)
    }
    for name, peer in peers.items():
        attention = functools.partial(peer.attention, case)
        functions[Key(name, "forward")] = lambda x, attention=attention: attention(x.q, x.k, x.v)
        if set(modes) != {"forward"}:
            functions[Key(name, "both")] = lambda x, attention=attention: jax.vjp(attention, x.q, x.k, x.v)[1](x.dout)
    return functions


def compile_all[Name: Hashable](
    calls: Mapping[Name, tuple[Function, Inputs]],
) -> tuple[dict[Name, Function], dict[Name, Exception]]:
    """(the functions, compiled and run once on their inputs; what those that failed raised)."""
    programs: dict[Name, Function] = {}
    futures, errors = {}, {}
    # One thread lowers, since Mosaic GPU keeps state in globals; compiling takes longer, and runs beside it.
    with ThreadPoolExecutor(len(calls)) as pool:
        for name, (function, inputs) in calls.items():
            try:
                futures[name] = pool.submit(jax.jit(function).lower(inputs).compile)
            except Exception as error:
                errors[name] = error
    for name, future in futures.items():
        try:
            program = future.result()
            jax.block_until_ready(program(calls[name][1]))
            programs[name] = program
        except Exception as error:
            errors[name] = error
    return programs, errors


def make_programs(case: Case, functions: dict[Key, Function], inputs: dict[str, Inputs]) -> dict[Key, Function]:
    """The functions that compile and run; an implementation's first failure is printed."""
    programs, errors = compile_all({key: (function, inputs[key.implementation]) for key, function in functions.items()})
    first: dict[str, Key] = {}
    for key in errors:
        first.setdefault(key.implementation, key)
    for key in first.values():
        print(f"{case.name:24} {key.mode:8}  {key.implementation} left out, {one_line(errors[key])}", flush=True)
    return {key: program for key, program in programs.items() if key._replace(mode="forward") in programs}


def measure(
    case: Case,
    peers: dict[str, Peer],
    modes: Collection[str],
    bound: float,
    kernels: Mapping[str, BlockAttention],
    measured: Mapping[Key, Quantiles] = {},
) -> list[dict[str, Any]]:
    """The rows of a case, and of what was measured before in other processes."""
    ours = random_inputs(case)
    inputs = dict.fromkeys(kernels, ours) | {name: ours.of(peer) for name, peer in peers.items()}
    programs = make_programs(case, make_functions(case, peers, modes, kernels), inputs)
    if not programs:
        return []
    for name in kernels:
        if Key(name, "forward") in programs:
            inputs[name] = ours.given(*programs[Key(name, "forward")](ours))
    seconds = time_in_turns({key: functools.partial(run, inputs[key.implementation]) for key, run in programs.items()})
    return make_rows(case, seconds | dict(measured), modes, bound)


def make_rows(case: Case, seconds: dict[Key, Quantiles], modes: Collection[str], bound: float) -> list[dict[str, Any]]:
    """A row for each of these modes that was measured, or of which the parts were."""
    seconds = dict(seconds)
    for name, mode in list(seconds):
        if mode == "both" and Key(name, "backward") not in seconds:
            forward = seconds[Key(name, "forward")].p50
            seconds[Key(name, "backward")] = Quantiles(*(x - forward for x in seconds[Key(name, "both")]))
    rows = []
    for (name, mode), quantiles in seconds.items():
        p80, p50, p20 = (WORK[mode] * case.forward_flops / x / 1e12 for x in quantiles)
        row = {"benchmark": "kernel", "case": case.name, "implementation": name, "workers": 1, "mode": mode}
        row |= {"metric": "tflops", "unit": "TFLOP/s", "p20": p20, "p50": p50, "p80": p80, "bound": bound}
        rows.append(row)
    return [row for mode in modes for row in rows if row["mode"] == mode]


def matmul_tflops() -> float:
    a = jax.random.normal(jax.random.key(0), (8192, 8192), jnp.bfloat16)
    return 2 * 8192**3 / time_in_turns({"": functools.partial(jax.jit(jnp.dot), a, a)})[""].p50 / 1e12


def make_table(
    rows: dict[tuple[str, str, str], dict[str, str]], cases: Iterable[Case], labels: Mapping[str, str] = LABELS
) -> str:
    """Markdown: TFLOP/s by case, and ours, the first label, as a multiple of the second; cases without a row of ours
    are left out.
    """
    ours, other, *_ = labels
    lines = []
    for name in (case.name for case in cases if any((case.name, ours, mode) in rows for mode in WORK)):
        cells = [name]
        for mode in ("forward", "backward"):
            rates = {x: float(rows[name, x, mode]["p50"]) for x in labels if (name, x, mode) in rows}
            cells += [f"{rates[x]:.0f}" if x in rates else "–" for x in labels]
            cells += [f"{rates[ours] / rates[other]:.2f}" if {ours, other} <= rates.keys() else "–"]
        lines.append(cells)
    header = ["case"]
    for mode in ("forward", "backward"):
        header += [f"{mode}: {labels[ours]}", *list(labels.values())[1:], f"{labels[ours]} / {labels[other]}"]
    return tables.markdown(header, lines, num_words=1)


def write_tables() -> None:
    """The tables of the newest rows, in the documents: README.md keeps its cases, docs/speed.md has all."""
    rows = newest_rows(RESULTS / "kernel.csv")
    for path in (ROOT / "README.md", ROOT / "docs/speed.md"):
        text = path.read_text()
        names = set(re.findall(r"^\| (\d+k_\w+) \|", text, flags=re.MULTILINE))
        cases = [case for name, case in KERNEL.items() if name in names or path.stem == "speed"]
        path.write_text(tables.update(text, {"kernel.csv": make_table(rows, cases)}))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=KERNEL_DEFAULT, help="names or patterns such as '*_d128_*'")
    parser.add_argument("--modes", nargs="*", choices=WORK, default=list(WORK))
    parser.add_argument("--implementations", nargs="*", choices=IMPLEMENTATIONS, default=[OURS])
    parser.add_argument("--before", type=Path, metavar="DIR", help="a checkout whose kernels are timed too")
    parser.add_argument(
        "--part", type=Part.parse, default=Part(0, 1), metavar="I/N", help="every Nth case, from the Ith"
    )
    parser.add_argument("--peers", nargs="*", choices=[*PEERS, TORCH], default=list(LABELS)[1:])
    parser.add_argument("--out", type=Path, default=RESULTS / "kernel.csv", help="where rows are added, or read from")
    parser.add_argument("--table", action="store_true", help="print the newest rows of the cases as Markdown")
    parser.add_argument("--write", action="store_true", help="put them into README.md and docs/speed.md")
    arguments = parser.parse_args()
    if arguments.write:
        write_tables()
        return
    kernels = {name: IMPLEMENTATIONS[name] for name in arguments.implementations}
    try:
        cases = arguments.part.of(select(arguments.cases))
        if arguments.before is not None:
            kernels |= before.load(arguments.before, kernels)
    except ValueError as error:
        parser.error(str(error))
    if arguments.table:
        labels = LABELS if OURS in arguments.implementations else TRITON_LABELS
        print(make_table(newest_rows(arguments.out), cases, labels))
        return
    torch = {}
    if TORCH in arguments.peers:
        torch = time_torch([case for case in cases if not case.documents and case.window is None], ("forward", "both"))
    peers = available(name for name in arguments.peers if name != TORCH)
    bound = matmul_tflops()
    print(f"matrix product {bound:.0f} TFLOP/s", flush=True)
    for case in cases:
        measured = {Key(TORCH, mode): x for (name, mode), x in torch.items() if name == case.name}
        rows = measure(case, peers, arguments.modes, bound, kernels, measured)
        write_rows(arguments.out, [row for row in rows if not row["implementation"].endswith(before.SUFFIX)])
        for mode in arguments.modes:
            rates = (f"{row['implementation']} {row['p50']:4.0f}" for row in rows if row["mode"] == mode)
            print(f"{case.name:24} {mode:8}  {'  '.join(rates)}", flush=True)


if __name__ == "__main__":
    main()
