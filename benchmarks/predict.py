"""The tables of docs/predictions.md, without a GPU: `python -m benchmarks.predict`; --write puts them there.

Predicted time and efficiency for machines that were not measured, from how many tokens on messages are hidden, and
predictions beside the rows of benchmarks.attention.
"""

import bisect
import csv
import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, cast

from benchmarks.cases import ATTENTION
from benchmarks.harness import RESULTS
from benchmarks.tables import command, markdown
from distflash_jax import schedule
from distflash_jax.cost import MACHINES, Machine, Shape
from distflash_jax.spread import Spread
from distflash_jax.table import BOTH, Direction
from distflash_jax.timeline import Timeline, simulate, simulate_strategy

MODES: dict[str, tuple[Direction, ...]] = {
    "forward": ("forward",),
    "forward_backward": BOTH,
}
FLAT = ("h200-nvlink", "h200-400g")  # machines whose links are all alike
WORKERS = (2, 4, 8, 16, 64)
TOKENS = (8192, 16384, 32768)  # of one GPU
KV_HEADS = (32, 8)
VOLUME: tuple[tuple[schedule.Strategy, tuple[int, ...]], ...] = (
    *((name, (8,)) for name in ("balanced", "ring", "burst", "zigzag", "all_gather", "ulysses", "rsa")),
    ("burst", (2, 4)),
    ("hybrid", (2, 4)),
)
SCALING_WORKERS = (8, 64, 256, 1024)
SCALING = ("balanced", "burst", "hybrid")  # the latter two over nodes and the GPUs of each
# Of cases with documents the predictions know nothing, and rows of a window are of its own table.
UNMASKED = {name for name, case in ATTENTION.items() if case.window is None and not case.documents}
SINCE = "32ef19e"  # commit of the first rows of the kernels whose rates MACHINES has
HIDDEN = 0.01  # share of the time that waiting for messages may take
DOCUMENT = Path(__file__).parent.parent / "docs" / "predictions.md"
SILENT = "_without_messages"


def predict(
    machine: Machine, num_workers: int, tokens: int, kv_heads: int, mode: str, strategy: schedule.Table = "balanced"
) -> Timeline:
    """Causal attention of 32 heads of dim 128 over so many tokens on all workers."""
    table = schedule.choose(strategy, num_workers, kv_heads=kv_heads)
    return simulate(table, Shape(tokens, K=kv_heads), machine, MODES[mode])


def make_predictions(machine: Machine) -> str:
    """Markdown: milliseconds, and in brackets the efficiency, by tokens of a GPU, heads and workers."""
    lines = []
    for kv_heads in KV_HEADS:
        for mode in MODES:
            for tokens in TOKENS:
                found = [predict(machine, P, P * tokens, kv_heads, mode) for P in WORKERS]
                cells = [f"{1e3 * x.makespan:.1f} ({x.efficiency:.2f})" for x in found]
                lines.append([f"{tokens // 1024}K", f"32/{kv_heads}", _words(mode), *cells])
    return markdown(["tokens a GPU", "heads", "", *(f"{P} GPUs" for P in WORKERS)], lines, 3)


def make_scaling(workers: Sequence[int] = SCALING_WORKERS) -> str:
    """Markdown: speed as a share of one node's (`balanced`) times nodes, and of one GPU's times GPUs; waiting."""
    machine, lines = MACHINES["h200-nodes"], []
    size, directions = cast(int, machine.workers_per_node), MODES["forward_backward"]
    for kv_heads in KV_HEADS:
        for tokens in (4096, *TOKENS):
            node = predict(machine, size, size * tokens, kv_heads, "forward_backward")
            for strategy in SCALING:
                cells = []
                for P in workers:
                    sizes = (P,) if strategy == "balanced" else (P // size, size)
                    spread = Spread(strategy, Shape(P * tokens, K=kv_heads), sizes)
                    found = simulate_strategy(spread, machine, directions)
                    waits = max(found.exposed) / found.makespan
                    linear = found.efficiency / node.efficiency
                    cells.append(f"{linear:.2f} ({found.efficiency:.2f}, {100 * waits:.0f}%)")
                lines.append([f"{tokens // 1024}K", f"32/{kv_heads}", f"`{strategy}`", *cells])
    return markdown(["tokens a GPU", "heads", "", *(f"{P} GPUs" for P in workers)], lines, 3)


def make_volume() -> str:
    """Markdown: elements that a worker receives, in Nd: tokens of all workers times width of the model."""
    lines = []
    for strategy, sizes in VOLUME:
        cells = []
        for kv_heads in KV_HEADS:
            shape = Shape(8 * 4096, K=kv_heads)
            spread = Spread(strategy, shape, sizes)
            counts = [float(spread.traffic(x).elements) / (shape.T * shape.N * shape.H) for x in BOTH]
            cells += [f"{x:.2f}" for x in (*counts, sum(counts))]
        lines.append([f"`{strategy}`" + f", {sizes[0]} x {sizes[-1]}" * (len(sizes) == 2), *cells])
    header = [f"{heads}, {words}" for heads in ("32/32", "32/8") for words in ("forward", "backward", "both")]
    return markdown(["8 GPUs", *header], lines, 1)


def hidden_from(machine: Machine, num_workers: int, kv_heads: int, mode: str) -> int:
    """The least thousands of tokens on a GPU with which no worker waits for messages more than HIDDEN, by bisection."""

    def is_hidden(thousands: int) -> bool:
        timeline = predict(machine, num_workers, num_workers * 1024 * thousands, kv_heads, mode)
        return max(timeline.exposed) <= HIDDEN * timeline.makespan

    return bisect.bisect_left(range(129), True, lo=1, key=is_hidden)


def make_hidden() -> str:
    """Markdown: hidden_from of each machine."""
    workers = WORKERS[:3]
    lines = [
        [name, f"32/{kv_heads}", _words(mode)] + [f"{hidden_from(machine, P, kv_heads, mode)}K" for P in workers]
        for name, machine in ((name, MACHINES[name]) for name in FLAT)
        for kv_heads in KV_HEADS
        for mode in MODES
    ]
    return markdown(["", "heads", "", *(f"{P} GPUs" for P in workers)], lines, 3)


class Row(NamedTuple):
    """What tells a row of benchmarks.attention from others."""

    case: str
    implementation: str
    workers: int
    mode: str


def measured_rows(path: Path = RESULTS / "attention.csv") -> dict[Row, float]:
    """Seconds of the newest rows on several GPUs of the present kernels, causal alone."""
    with path.open(newline="") as file:
        rows = itertools.dropwhile(lambda row: row["commit"] != SINCE, csv.DictReader(file))
        return {
            Row(row["case"], row["implementation"], int(row["workers"]), row["mode"]): float(row["p50"])
            for row in rows
            if row["case"] in UNMASKED and row["workers"] != "1"
        }


def validate() -> dict[Row, tuple[float, float]]:
    """(measured seconds, predicted) of the rows of our tables."""
    is_table = lambda row: row.implementation.removesuffix(SILENT) in schedule.TABLES
    measured = {row: seconds for row, seconds in measured_rows().items() if is_table(row)}
    nvlink = MACHINES["h200-nvlink"]
    silent = dataclasses.replace(nvlink, link=math.inf, latency=0.0)
    found = {}
    for row, seconds in measured.items():
        case, machine = ATTENTION[row.case], silent if row.implementation.endswith(SILENT) else nvlink
        strategy = cast(schedule.Table, row.implementation.removesuffix(SILENT))
        found[row] = seconds, predict(machine, row.workers, case.T, case.K, row.mode, strategy).makespan
    return found


def make_validation() -> str:
    """Markdown: predictions beside measurements, in milliseconds."""
    lines = [
        [
            row.case,
            f"`{row.implementation}`",
            str(row.workers),
            _words(row.mode),
            *_compared(1e3 * seconds, 1e3 * predicted),
        ]
        for row, (seconds, predicted) in validate().items()
    ]
    return markdown(["case", "", "GPUs", "", "measured", "predicted", "difference"], lines, 4)


def _compared(measured: float, predicted: float) -> tuple[str, str, str]:
    return f"{measured:.1f}", f"{predicted:.1f}", f"{100 * (predicted / measured - 1):+.1f}%"


def make_tables() -> dict[str, str]:
    """All tables of docs/predictions.md, by the names that mark them there."""
    tables = {
        f"predictions {name}": make_predictions(machine) for name, machine in ((name, MACHINES[name]) for name in FLAT)
    }
    tables |= {"scaling": make_scaling(), "volume": make_volume()}
    return tables | {"hidden": make_hidden(), "validation": make_validation()}


def _words(mode: str) -> str:
    return mode.replace("_", " + ")


if __name__ == "__main__":
    command(__doc__, DOCUMENT, make_tables)
