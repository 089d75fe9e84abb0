"""Pictures of the newest rows, in docs/: `python -m benchmarks.plot`.

kernel_tflops.png has TFLOP/s of the block kernels and their peers against the number of tokens; attention.png has what
share of half of our kernel's time on one GPU attention on two takes.
"""

import argparse
import statistics
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.cases import GQA, KERNEL, LENGTHS, MHA, TOKENS
from benchmarks.harness import RESULTS, newest_rows
from benchmarks.peers import LABELS

HEAD_DIMS = (64, 128, 256)
KINDS = tuple((visible, mode) for visible in ("causal", "full") for mode in ("forward", "backward"))
# Okabe and Ito's colours, which every kind of colour vision tells apart; the marks say the same.
STYLES = {
    "hopper": {"color": "#D55E00", "marker": "o", "linewidth": 2.2, "zorder": 3},
    "cudnn": {"color": "#0072B2", "marker": "s"},
    "tokamax": {"color": "#009E73", "marker": "^"},
    "in_tree": {"color": "#CC79A7", "marker": "D"},
}


ATTENTION_STYLES = {
    "balanced": STYLES["hopper"],
    "balanced_unsplit": {"color": "#E69F00", "marker": "v", "label": "paper's table"},
    "ring": {"color": "#56B4E9", "marker": "P"},
    "all_gather": {"color": "#009E73", "marker": "^", "label": "all-gather"},
    "ulysses": {"color": "#CC79A7", "marker": "D", "label": "Ulysses"},
    "zigzag": {"color": "#F0E442", "marker": "*"},
    "ulysses_cudnn": {"color": "#0072B2", "marker": "s", "label": "Ulysses, cuDNN"},
    "torch_cp": {"color": "0.3", "marker": "x", "label": "PyTorch, cuDNN"},
}
Rows = dict[tuple[str, str, str], dict[str, str]]


def draw_kernels(rows: Rows) -> Figure:
    """Of the cases with as many key/value heads as query heads, a panel for each mask, mode and head dim."""
    figure = Figure(figsize=(9, 8), layout="constrained")
    panels = figure.subplots(len(KINDS), len(HEAD_DIMS), sharex=True, sharey=True)
    handles = {}
    for (visible, mode), line in zip(KINDS, panels, strict=True):
        line[0].set_ylabel(f"{visible}, {mode}\nTFLOP/s", fontsize=9)
        for H, axes in zip(HEAD_DIMS, line, strict=True):
            cases = {name: case.T for name, case in KERNEL.items() if name.endswith(f"_d{H}_mha_{visible}")}
            drawn = []
            for name, style in STYLES.items():
                points = {T: rows[case, name, mode] for case, T in cases.items() if (case, name, mode) in rows}
                if points:
                    rates = [float(row["p50"]) for row in points.values()]
                    (handles[LABELS[name]],) = axes.plot(
                        list(points), rates, **{"linewidth": 1.4, "markersize": 4} | style
                    )
                    drawn += points.values()
            if drawn:
                bound = statistics.median(float(row["bound"]) for row in drawn)
                handles["matrix product"] = axes.axhline(bound, color="0.4", linestyle="--", linewidth=1)
            axes.grid(color="0.9")
            axes.tick_params(labelsize=8)
    for H, axes in zip(HEAD_DIMS, panels[0], strict=True):
        axes.set_title(f"head dim {H}", fontsize=9)
    for axes in panels[-1]:
        axes.set_xlabel("tokens", fontsize=9)
    axes = panels[0, 0]
    axes.set_xscale("log", base=2)
    axes.set_xlim(TOKENS[0] / 1.3, TOKENS[-1] * 1.3)
    axes.set_xticks(TOKENS, [f"{T // 1024}K" for T in TOKENS])
    axes.set_ylim(bottom=0)
    figure.legend(handles.values(), handles, loc="outside upper center", ncols=5, frameon=False, fontsize=9)
    return figure


def draw_attention(rows: Rows) -> Figure:
    """A panel for each mode and number of key/value heads; the bound is that of a row's own run."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True, sharey=True)
    handles = {}
    for mode, line in zip(("forward", "forward_backward"), panels, strict=True):
        line[0].set_ylabel(f"{mode.replace('_', ' and ')}\nefficiency", fontsize=9)
        for cases, axes in zip((MHA, GQA), line, strict=True):
            for name, style in ATTENTION_STYLES.items():
                found = {case.T: rows[case.name, name, mode] for case in cases if (case.name, name, mode) in rows}
                shares = [float(row["bound"]) / float(row["p50"]) for row in found.values()]
                if shares:
                    options = {"linewidth": 1.4, "markersize": 5, "label": name} | style
                    (handles[options["label"]],) = axes.plot(list(found), shares, **options)
            axes.axhline(1, color="0.4", linestyle="--", linewidth=1)
            axes.grid(color="0.9")
            axes.tick_params(labelsize=8)
    for title, axes in zip(("32 heads", "32 heads, 8 of keys and values"), panels[0], strict=True):
        axes.set_title(title, fontsize=9)
    for axes in panels[-1]:
        axes.set_xlabel("tokens on two GPUs", fontsize=9)
    axes = panels[0, 0]
    axes.set_xscale("log", base=2)
    axes.set_xticks([1024 * tokens for tokens in LENGTHS], [f"{tokens}K" for tokens in LENGTHS])
    axes.set_ylim(0.5, 1.05)
    figure.legend(handles.values(), handles, loc="outside upper center", ncols=4, frameon=False, fontsize=9)
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=RESULTS, help="folder of kernel.csv and attention.csv")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "docs", help="folder")
    arguments = parser.parse_args()
    pictures = {
        "kernel_tflops.png": draw_kernels(newest_rows(arguments.rows / "kernel.csv")),
        "attention.png": draw_attention(newest_rows(arguments.rows / "attention.csv", num_workers=2)),
    }
    for name, figure in pictures.items():
        figure.savefig(arguments.out / name, dpi=180)
        print(arguments.out / name)


if __name__ == "__main__":
    main()
