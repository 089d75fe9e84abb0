"""The paper's tables beside ours, docs/paper.md and paper.png, without a GPU: `python -m benchmarks.paper --write`.

Seconds and bytes of each system on the paper's own clusters, from the timeline of attention, FLOPs, and bytes; and
what was measured on two H200s, from the rows in benchmarks/results, so that newer rows appear by themselves.

Source of all published numbers: DISTFLASHATTN, arXiv 2310.03294 v2.
"""

import csv
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

from benchmarks.harness import RESULTS
from benchmarks.paper_model import (
    A100,
    MEGATRON_COLLECTIVES,
    PRODUCTS,
    longest,
    memory_bytes,
    parts,
    step_seconds,
    timeline,
    whole_seconds,
)
from benchmarks.tables import command, markdown
from distflash_jax.cost import Cost, Shape
from distflash_jax.schedule import balanced, ring
from distflash_jax.table import BOTH
from distflash_jax.timeline import simulate
from models.config import PRESETS, LlamaConfig

DOCUMENT = Path(__file__).parent.parent / "docs" / "paper.md"
PICTURE = DOCUMENT.with_suffix(".png")

MODELS = {"7B": "llama-7b", "GQA": "llama-gqa", "33H": "llama-33h"} | {f"{n}H": f"llama-{n}h" for n in (16, 8, 4, 2)}
# Table 1: (GPUs, tokens in thousands): seconds of Megatron, and of the paper's system, for 7B, GQA and 33H.
STEPS = {
    (8, 64): ((6.81, 6.60, 8.37), (5.98, 5.61, 6.08)),
    (8, 128): ((20.93, 20.53, 25.75), (17.26, 16.86, 17.77)),
    (8, 256): ((72.75, 71.93, 90.21), (58.46, 57.01, 59.96)),
    (16, 128): ((14.26, 14.21, 20.63), (12.75, 9.74, 13.12)),
    (16, 256): ((43.44, 43.20, 62.78), (30.21, 28.49, 31.33)),
    (16, 512): ((147.06, 146.38, 216.70), (106.37, 102.34, 107.76)),
}
# Table 2: thousands of tokens that fit 16 A100-40GB: Megatron with data parallelism, with pipelines, the paper's.
LONGEST = {"16H": (512, 512, 512), "8H": (256, 256, 512), "4H": (128, 256, 512), "2H": (64, 128, 512)}
# Table 3, LLaMA-7B: (GPUs, tokens in thousands): seconds of RSA, of the paper's system.
RSA = {(8, 32): (14.10, 2.50), (16, 64): (30.49, 6.85)}
RSA_LONGEST = {8: 32, 16: 64}
# Table 4: (model, tokens in thousands) on 16 GPUs: seconds of Ulysses, of the paper's system.
ULYSSES = {("7B", 256): (37.53, 30.21), ("7B", 512): (134.09, 106.37), ("33H", 256): (56.63, 31.33),
           ("33H", 512): (202.89, 107.76)}  # fmt: skip
# Table 5, LLaMA-7B on 8 GPUs: thousands of tokens a GPU: seconds with checkpoints at layer borders, and of the paper.
CHECKPOINTS = {1: (0.84, 0.84), 2: (1.29, 1.36), 4: (2.64, 2.50), 8: (6.93, 5.98), 16: (21.44, 17.26),
               32: (76.38, 58.46)}  # fmt: skip
# Table 6: GB on a GPU of each of 8 stages of two GPUs, Megatron's pipeline, 2H, 128K tokens; their mean.
STAGES = (31.45, 28.7, 26.0, 24.6, 21.8, 20.5, 17.85, 32.05)
# The figure of balance, 8 GPUs: attention's speed-up over one.
SPEEDUPS = {"ring": 4.5, "balanced_unsplit": 7.5}
# The figure of a layer's forward: thousands of tokens: milliseconds of attention, and of the rest.
LAYER = {8: (12.94, 10.5), 16: (27.08, 23.66), 32: (74.35, 47.22), 64: (233.87, 95.78)}


class Cell(NamedTuple):
    """A number of the paper and ours beside it."""

    table: str
    system: str
    case: str
    published: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


def model_of(name: str) -> LlamaConfig:
    return PRESETS[MODELS[name]]


def step_cells() -> list[Cell]:
    """Table 1."""
    return [
        Cell("1", system, f"{name}, {P} GPUs, {n}K", published, step_seconds(ours, model_of(name), P, 1024 * n))
        for (P, n), pair in STEPS.items()
        for system, ours, values in zip(("Megatron", "DFA"), ("megatron", "balanced_unsplit"), pair, strict=True)
        for name, published in zip(("7B", "GQA", "33H"), values, strict=True)
    ]


def rival_cells() -> list[Cell]:
    """Tables 3 and 4."""
    cells = []
    for (P, n), pair in RSA.items():
        for system, ours, published in zip(("RSA", "DFA"), ("rsa", "balanced_unsplit"), pair, strict=True):
            predicted = step_seconds(ours, model_of("7B"), P, 1024 * n)
            cells.append(Cell("3", system, f"7B, {P} GPUs, {n}K", published, predicted))
    for (name, n), (published, _) in ULYSSES.items():
        predicted = step_seconds("ulysses", model_of(name), 16, 1024 * n)
        cells.append(Cell("4", "Ulysses", f"{name}, 16 GPUs, {n}K", published, predicted))
    return cells


def checkpoint_cells() -> list[Cell]:
    """Table 5."""
    return [
        Cell("5", system, f"7B, 8 GPUs, {n}K a GPU", published, step_seconds(ours, model_of("7B"), 8, 8 * 1024 * n))
        for n, pair in CHECKPOINTS.items()
        for system, ours, published in zip(("layer borders", "DFA"), ("layer", "balanced_unsplit"), pair, strict=True)
    ]


def stage_cells() -> list[Cell]:
    """Table 6, GB."""
    model = model_of("2H")
    return [
        Cell("6", "Megatron", f"stage {number}", published, memory_bytes(model, part) / 1e9)
        for number, (published, part) in enumerate(zip(STAGES, parts("megatron-pp", model, 16, 131072), strict=True))
    ]


def make_cells(cells: Iterable[Cell], unit: str = "s") -> str:
    lines = [
        [cell.case, cell.system, f"{cell.published:.2f}", f"{cell.predicted:.2f}", f"{cell.error:+.0%}"]
        for cell in cells
    ]
    return markdown(["case", "system", f"published, {unit}", f"predicted, {unit}", "error"], lines, 2)


def make_ratios() -> str:
    """Seconds of the others over those of the paper's system, published and predicted, and over ours."""
    lines = []

    def add(system: str, ours: str, name: str, P: int, n: int, theirs: float, published: float) -> None:
        model, T = model_of(name), 1024 * n
        other, table, split = (step_seconds(x, model, P, T) for x in (ours, "balanced_unsplit", "balanced"))
        ratios = (theirs / published, other / table, other / split, step_seconds(ours, model, P, T, BOTH) / split)
        lines.append([system, f"{name}, {P} GPUs, {n}K", *map(_ratio, ratios), f"{split:.2f}"])

    for (P, n), (megatron, dfa) in STEPS.items():
        for name, theirs, published in zip(("7B", "GQA", "33H"), megatron, dfa, strict=True):
            add("Megatron", "megatron", name, P, n, theirs, published)
    for (P, n), (theirs, published) in RSA.items():
        add("RSA", "rsa", "7B", P, n, theirs, published)
    for (name, n), (theirs, published) in ULYSSES.items():
        add("Ulysses", "ulysses", name, 16, n, theirs, published)
    for P, n in STEPS:
        for system in ("ring", "burst"):
            add(f"`{system}`", system, "7B", P, n, math.nan, math.nan)
    header = ["", "case", "published", "predicted", "over `balanced`", "with outputs kept too", "`balanced`, s"]
    return markdown(header, lines, 2)


def make_longest() -> str:
    lines = []
    for name, published in LONGEST.items():
        found = [longest(x, model_of(name), 16, 40e9) for x in ("megatron-dp", "megatron-pp", "balanced")]
        lines.append([name, *(f"{a}K / {b}K" for a, b in zip(published, found, strict=True))])
    for P, n in RSA_LONGEST.items():
        ours, rsa = (longest(x, model_of("7B"), P, 80e9) for x in ("balanced", "rsa"))
        lines.append([f"7B, {P} GPUs of 80 GB", "–", "–", f"> {8 * n}K / {ours}K; RSA {n}K / {rsa}K"])
    return markdown(["", "Megatron, TP + DP", "Megatron, TP + PP", "DFA"], lines, 1)


def make_balance() -> str:
    """Attention alone on 8 GPUs, forward, with 32K tokens each."""
    shape, P = Shape(8 * 32768), 8
    one = simulate(ring(1), shape, A100).makespan
    tables = {"ring": ring(P), "balanced_unsplit": balanced(P, cut=None), "balanced": balanced(P)}
    lines = [
        [
            f"`{name}`",
            f"{SPEEDUPS[name]:.1f}" if name in SPEEDUPS else "–",
            f"{one / simulate(x, shape, A100).makespan:.2f}",
        ]
        for name, x in tables.items()
    ]
    split = simulate(tables["ring"], shape, A100).makespan / simulate(tables["balanced_unsplit"], shape, A100).makespan
    lines.append(
        ["`balanced_unsplit` over `ring`", f"{SPEEDUPS['balanced_unsplit'] / SPEEDUPS['ring']:.2f}", f"{split:.2f}"]
    )
    return markdown(["", "published speed-up", "predicted"], lines, 1)


def layer_cells() -> list[Cell]:
    """The forward of a layer on one GPU, ms: attention with its projections, and the MLP."""
    model, cells = model_of("7B"), []
    for n, (attention, rest) in LAYER.items():
        T = 1024 * n
        scores = whole_seconds(model, model.num_attention_heads, T, ("forward",)) / model.num_hidden_layers
        of_weights = lambda count, T=T: 2 * T * model.hidden_size * count / PRODUCTS
        projected = scores + of_weights(4 * model.num_attention_heads * model.head_dim)
        mlp = of_weights(3 * model.intermediate_size)
        cells += [
            Cell("", "attention", f"{n}K", attention, 1e3 * projected),
            Cell("", "rest", f"{n}K", rest, 1e3 * mlp),
        ]
    return cells


def make_volume() -> str:
    """Elements that a GPU receives for attention of 32/32 heads, and for a layer of Megatron, per token and width."""
    lines = []
    for P in (2, 4, 8, 16, 64):
        cost = Cost(balanced(P), Shape(P * 4096))
        ours = [float(cost.elements(direction)) / (P * 4096 * 32 * 128) for direction in BOTH]
        megatron = [count * (P - 1) / P for count in (11, MEGATRON_COLLECTIVES)]
        lines.append([str(P), *(f"{x:.2f}" for x in (*ours, sum(ours), *megatron))])
    header = [
        "GPUs",
        "`balanced`, forward",
        "backward",
        "both (the paper: 3)",
        "`megatron` here",
        "Megatron, as the paper counts",
    ]
    return markdown(header, lines, 1)


def make_overlap() -> str:
    """How long GPUs wait for messages of attention on 16 GPUs, forward and backward, as a share of computing."""

    def share(name: str, n: int) -> float:
        found = timeline("balanced_unsplit", model_of(name), 16, 1024 * n)
        return sum(found.exposed) / sum(found.busy)

    lines = [[f"{n}K", *(f"{share(name, n):.0%}" for name in ("7B", "GQA"))] for n in (128, 256, 512)]
    return markdown(["tokens", "7B: exposed", "GQA: exposed"], lines, 1)


class Measured(NamedTuple):
    case: str
    strategy: str
    remat: str
    workers: int


def newest(path: Path, metrics: Sequence[str]) -> dict[Measured, dict[str, float]]:
    """Medians of the newest rows by metric."""
    found: dict[Measured, dict[str, float]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["metric"] in metrics:
                key = Measured(row["case"], row["implementation"], row["mode"], int(row["workers"]))
                found.setdefault(key, {})[row["metric"]] = float(row["p50"])
    return found


def make_measured() -> str:
    """Whole steps on H200s, and the time of each over that of `balanced` with the same model and tokens."""
    rows = newest(RESULTS / "train_step.csv", ("seconds", "utilisation", "memory"))
    lines = []
    for key in sorted(rows, key=lambda key: (key.case.split("_")[0], _thousands(key.case), key)):
        values = rows[key]
        if "seconds" not in values:
            continue
        best = rows.get(key._replace(strategy="balanced", remat="attention"), {}).get("seconds", math.nan)
        memory = f"{values['memory']:.1f}" if "memory" in values else ""
        numbers = [f"{values['seconds']:.2f}", _ratio(values["seconds"] / best), f"{values['utilisation']:.2f}", memory]
        lines.append([key.case, f"`{key.strategy}`", key.remat, str(key.workers), *numbers])
    header = ["case", "strategy", "remat", "GPUs", "seconds", "over `balanced`, attention", "utilisation", "GiB"]
    return markdown(header, lines, 3)


def make_attention() -> str:
    """Attention alone on two H200s, forward and backward."""
    rows = newest(RESULTS / "attention.csv", ("seconds",))
    rows = {key: row["seconds"] for key, row in rows.items() if key.workers == 2 and key.remat == "forward_backward"}
    names = [name for name in dict.fromkeys(key.strategy for key in rows) if "_without_" not in name]
    lines = []
    for case in sorted({key.case for key in rows}, key=lambda case: (_thousands(case), case)):
        at = lambda name, case=case: rows.get(Measured(case, name, "forward_backward", 2), math.nan)
        if not math.isnan(at("balanced")):
            ratios = [_ratio(at(name) / at("balanced")) for name in names if name != "balanced"]
            lines.append([case, f"{1e3 * at('balanced'):.1f}", *ratios])
    return markdown(["case", "`balanced`, ms", *(f"`{x}`" for x in names if x != "balanced")], lines, 1)


def _thousands(case: str) -> int:
    return int(next(word[:-1] for word in case.split("_") if word.endswith("k") and word[:-1].isdigit()))


def _ratio(ratio: float) -> str:
    return "–" if math.isnan(ratio) else f"{ratio:.2f}"


def make_tables() -> dict[str, str]:
    """All tables of docs/paper.md, by the names that mark them there."""
    return {
        "table 1": make_cells(step_cells()),
        "ratios": make_ratios(),
        "table 2": make_longest(),
        "tables 3 and 4": make_cells(rival_cells()),
        "table 5": make_cells(checkpoint_cells()),
        "table 6": make_cells(stage_cells(), "GB"),
        "layer": make_cells(layer_cells(), "ms"),
        "balance": make_balance(),
        "volume": make_volume(),
        "overlap": make_overlap(),
        "measured steps": make_measured(),
        "measured attention": make_attention(),
    }


def draw() -> Figure:
    """Every predicted time against the published one."""
    figure = Figure(figsize=(9, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    cells = step_cells() + rival_cells() + checkpoint_cells()
    styles = {"DFA": ("#D55E00", "o"), "Megatron": ("#0072B2", "s"), "Ulysses": ("#CC79A7", "D"), "RSA": ("0.3", "x"),
              "layer borders": ("#009E73", "^")}  # fmt: skip
    for system, (color, marker) in styles.items():
        own = [cell for cell in cells if cell.system == system]
        published = [cell.published for cell in own]
        left.plot(published, [x.predicted for x in own], marker, color=color, label=system, alpha=0.8, markersize=5)
        right.plot(published, [100 * x.error for x in own], marker, color=color, alpha=0.8, markersize=5)
    left.plot((0.5, 300), (0.5, 300), color="0.6", linewidth=1)
    left.set(xscale="log", yscale="log", xlabel="published, seconds a step", ylabel="predicted, seconds a step")
    left.legend(frameon=False)
    right.axhline(0, color="0.6", linewidth=1)
    right.set(xscale="log", xlabel="published, seconds a step", ylabel="predicted over published, %")
    figure.suptitle("DISTFLASHATTN's tables 1, 3, 4 and 5: steps on 8 and 16 A100, predicted from a few constants")
    return figure


if __name__ == "__main__" and command(__doc__, DOCUMENT, make_tables):
    draw().savefig(PICTURE, dpi=150)
