"""Training steps of Llamas, their sequence over all GPUs of this machine: `python -m benchmarks.train_step`.

A case is a model, its tokens, how attention is scheduled and what is kept for the backward. Its rows: seconds (bound:
what `--dry-run` predicts); utilisation, of FLOPs without what is done twice (bound: what it would be had the prediction
come true); loss of the last step, which has to be the same for all ways to compute it; and the most GiB that were
allocated (bound: what the compiler said), where they are more than those of the cases before.
"""

import argparse
import itertools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.harness import RESULTS, count_gpus, quantiles, write_rows
from distflash_jax import xla_flags
from train.config import Config, ModelOverrides
from train.cost import step_flops, step_seconds
from train.flags import MeshShape
from train.mesh import make_mesh, peak_memory
from train.plan import bytes_of, ideal_seconds, lower_step
from train.program import build_program

_GIB = 2**30


class Case(NamedTuple):
    """layers: of the model, where memory or time does not suffice for all of them."""

    model: str
    seq_len: int
    strategy: Any = "balanced"
    remat: Any = "attention"
    layers: int | None = None

    @property
    def shape(self) -> str:
        """The model, such as llama-7b or, cut to 8 layers, llama-7b@8."""
        return self.model if self.layers is None else f"{self.model}@{self.layers}"

    @property
    def name(self) -> str:
        return f"{self.shape}_{self.seq_len // 1024}k"

    def config(self, num_workers: int) -> Config:
        return Config(
            mesh=MeshShape(seq=num_workers), model=self.model, seq_len=self.seq_len, batch_size=1, lr=3e-4,
            strategy=self.strategy, remat=self.remat, dtype="bfloat16", platform="cuda", warmup_steps=0,
            overrides=ModelOverrides(num_hidden_layers=self.layers),
        )  # fmt: skip

    @classmethod
    def parse(cls, text: str) -> "Case":
        """MODEL[@LAYERS]:TOKENS[:STRATEGY[:REMAT]], tokens in thousands (of 1024) for all GPUs together."""
        shape, tokens, *others = text.split(":")
        model, _, layers = shape.partition("@")
        strategy, remat, *_ = [*others, *("balanced", "attention")[len(others) :]]
        return cls(model, 1024 * int(tokens), strategy, remat, int(layers) if layers else None)


SETS = {
    # The systems of the paper on one model; the paper's Megatron keeps no attention outputs.
    "strategies": (
        *(
            Case("llama-7b", 65536, strategy)
            for strategy in ("balanced", "balanced_unsplit", "ring", "zigzag", "burst")
        ),
        *(Case("llama-7b", 65536, strategy) for strategy in ("ulysses", "all_gather", "megatron")),
        Case("llama-7b", 65536, "megatron", "layer"),
    ),
    # The paper's models, all of their layers, of which there are 1024 / heads.
    "shapes": tuple(
        Case(f"llama-{shape}", 65536, strategy)
        for shape in ("gqa", "33h", "16h", "8h", "4h", "2h")
        for strategy in ("balanced", "megatron")
    ),
    # Against checkpoints at the borders of layers.
    "remat": tuple(
        Case("llama-7b", n * 1024, remat=remat) for n in (8, 16, 32, 64) for remat in ("attention", "layer")
    ),
    "long": (
        *(Case("llama-7b", 131072, remat=remat) for remat in ("attention", "offload")),
        Case("llama-7b", 262144, remat="offload-all"),
        Case("llama-gqa", 131072),
        Case("llama-gqa", 262144, remat="offload-all"),
        Case("qwen3-8b", 131072, remat="offload"),
    ),
    "small": (Case("llama-100m", 32768),),
}


def compile_all(cases: Sequence[Case], configs: Sequence[Config], mesh: jax.sharding.Mesh) -> list[Any]:
    """(program, compiled step) of each case, or what it raised."""

    def attempt(future):
        try:
            return future.result()
        except Exception as error:
            return error

    programs = [build_program(config, mesh) for config in configs]
    with ThreadPoolExecutor(len(cases)) as pool:
        # Lowered in turn, since Mosaic GPU keeps state in globals.
        futures = [
            pool.submit(lower_step(program, batch_size=1, seq_len=case.seq_len).compile)
            for case, program in zip(cases, programs, strict=True)
        ]
        return [(program, attempt(future)) for program, future in zip(programs, futures, strict=True)]


def measure(
    case: Case, config: Config, compiled: Any, state: Any, batch: Any, mesh: jax.sharding.Mesh, num_steps: int
) -> list[dict[str, Any]]:
    """The rows of a case; the first step is not timed. The state is used up."""
    seconds, before = [], peak_memory(mesh) or 0
    loss = float("nan")
    for number in range(num_steps + 1):
        start = time.perf_counter()
        state, metrics = compiled(state, batch)
        loss = float(metrics["loss"])
        if number:
            seconds.append(time.perf_counter() - start)
    kind = mesh.devices.flat[0].device_kind
    flops = step_flops(config.llama, batch_size=1, seq_len=case.seq_len)
    predicted = step_seconds(*flops, remat=case.remat, num_devices=mesh.size, device_kind=kind)
    share = lambda seconds: (ideal_seconds(config, mesh) or float("nan")) / seconds
    times = quantiles(seconds)
    common = {"benchmark": "train_step", "case": case.name, "implementation": case.strategy, "workers": mesh.size}
    common |= {"mode": case.remat}

    def row(metric: str, unit: str, p20: float, p50: float, p80: float, bound: float) -> dict[str, Any]:
        return common | {"metric": metric, "unit": unit, "p20": p20, "p50": p50, "p80": p80, "bound": bound}

    rows = [
        row("seconds", "s", *times, predicted),
        row("utilisation", "1", share(times.p80), share(times.p50), share(times.p20), share(predicted)),
        row("loss", "nats", loss, loss, loss, loss),
    ]
    peak = (peak_memory(mesh) or 0) / _GIB
    if peak > before / _GIB:
        rows.append(row("memory", "GiB", peak, peak, peak, bytes_of(compiled) / _GIB))
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", type=Case.parse, default=[], help=Case.parse.__doc__)
    parser.add_argument("--sets", nargs="*", choices=SETS, default=[], help="of cases; all, where none are named")
    parser.add_argument("--workers", type=int, help="GPUs; all of this machine where it is not given")
    parser.add_argument("--steps", type=int, default=3, help="that are timed")
    parser.add_argument("--out", type=Path, default=RESULTS / "train_step.csv")
    arguments = parser.parse_args()
    xla_flags.apply(xla_flags.choose())
    num_workers = arguments.workers or count_gpus()
    sets = arguments.sets or (() if arguments.cases else SETS)
    # Once each, and those of a model together, whose states are made alike.
    chosen = dict.fromkeys((*arguments.cases, *(case for name in sets for case in SETS[name])))
    cases = sorted(chosen, key=lambda case: case.shape)
    mesh = make_mesh(MeshShape(seq=num_workers), "cuda")
    configs = {case: case.config(num_workers) for case in cases}
    start = time.perf_counter()
    found = dict(zip(configs, compile_all(list(configs), list(configs.values()), mesh), strict=True))
    print(f"{len(found)} steps compiled in {time.perf_counter() - start:.0f} s", flush=True)
    for _, group in itertools.groupby(cases, key=lambda case: case.shape):
        runnable = [case for case in group if not isinstance(found[case][1], Exception)]
        # The least memory first: the allocator tells the most that there was so far.
        runnable.sort(key=lambda case: bytes_of(found[case][1]))
        init: dict[bool, Any] = {}  # of parameters that lie as Megatron has them, and of others: compiled once each
        for case in runnable:
            program, compiled = found[case]
            make_state = init.setdefault(case.strategy == "megatron", program.init)
            # The same tokens for all cases of a length, over and over.
            ids = np.random.default_rng(0).integers(0, configs[case].llama.vocab_size, (1, case.seq_len + 1), np.int32)
            batch = jax.device_put({"tokens": ids[:, :-1], "labels": ids[:, 1:]}, program.batch_sharding)
            try:
                rows = measure(case, configs[case], compiled, make_state(), batch, mesh, arguments.steps)
            except jax.errors.JaxRuntimeError as error:
                print(f"{case}: left out, {str(error)[:200]}", flush=True)
                continue
            write_rows(arguments.out, rows)
            print(
                f"{case.name:16} {case.strategy:16} {case.remat:12}",
                *(f"{row['metric']} {row['p50']:.4g} ({row['bound']:.4g})" for row in rows),
                flush=True,
            )
    for case, (_, error) in found.items():
        if isinstance(error, Exception):
            print(f"{case}: left out, {str(error)[:200]}")


if __name__ == "__main__":
    main()
