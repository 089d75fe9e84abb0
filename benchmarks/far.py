"""Does a small model learn to look far? `python -m benchmarks.far` trains two on this machine, in minutes on a CPU.

Each is the tiny preset, trained by the real command and judged by its loss on rows that it has not seen: with all of a
row before a token, and cut to an eighth of the row (train/evaluation.py). `text` reads the source files of Python's
standard library. `code` reads rows of them whose first eighth says one of 64 codes instead, again and again; every
other eighth asks for it once. Whoever sees that eighth alone can at best guess, which costs ln 64 = 4.16 nats.
Writes rows to results/far.csv and the picture docs/far.png.
"""

import argparse
import dataclasses
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from benchmarks.harness import RESULTS, quantiles, write_rows
from train import data
from train.config import parse
from train.evaluation import PIECES, Batch, cut_losses, is_cut, piece_size
from train.flags import MeshShape
from train.loss import IGNORED
from train.tokenizer import SEPARATOR

LENGTH, NUM_ROWS, NUM_EVALUATED = 512, 4000, 400
SIZE = piece_size(LENGTH)
QUESTION, FIRST_CODE, NUM_CODES = SEPARATOR + 1, SEPARATOR + 2, 64
STEPS = {"text": 500, "code": 150}
FLAGS = [
    *("--platform", "cpu", "--mesh", "seq=1", "--seq-len", str(LENGTH), "--batch-size", "8"),
    *("--lr", "4e-3", "--eval-fraction", "0.1", "--eval-batches", "1"),
]
# Okabe and Ito's colours, as in benchmarks/plot.py.
STYLES = {"full": {"color": "#D55E00"}, "cut": {"color": "#0072B2", "linestyle": "--"}}


@dataclasses.dataclass(frozen=True)
class Curves:
    """Losses [rows, T] in nats of the same labels, with all of a row before them and with their eighth of it.

    Attributes:
      is_scored: which labels are of interest.
    """

    full: np.ndarray
    cut: np.ndarray
    is_scored: np.ndarray


def with_codes(tokens: np.ndarray, num_rows: int, seed: int) -> np.ndarray:
    """Rows [num_rows, LENGTH] of tokens from anywhere, with a code in the first eighth and a question in each other.

    The answer follows the question, in the last half of its eighth.
    """
    random = np.random.default_rng(seed)
    rows = np.empty((num_rows, LENGTH), np.uint16)
    for row in rows:
        start = random.integers(len(tokens) - LENGTH)
        row[:] = tokens[start : start + LENGTH]
        row[:SIZE] = code = FIRST_CODE + random.integers(NUM_CODES)
        places = SIZE * np.arange(1, PIECES) + random.integers(SIZE // 2, SIZE - 1, PIECES - 1)
        row[places], row[places + 1] = QUESTION, code
    return rows


def train(name: str, folder: Path) -> Curves:
    """Trains in a process of its own and evaluates rows that were held out."""
    steps = str(STEPS[name])
    flags = [*FLAGS, "--steps", steps, "--decay-steps", steps, "--run-dir", str(folder / name)]
    if name == "code":
        np.save(folder / "code.npy", with_codes(data.load(None, QUESTION).values, NUM_ROWS, seed=0).reshape(-1))
        flags += ["--data", str(folder / "code.npy"), "--vocab-size", str(FIRST_CODE + NUM_CODES)]
    subprocess.run([sys.executable, "-m", "train.llama", *flags], check=True, stdout=subprocess.DEVNULL)
    from train.decode import restore  # not before: the first call of it starts JAX, with the devices of a mesh

    model, config = restore(folder / name, MeshShape(), "cpu"), parse(flags)
    rows = data.sample(data.open_data(config, folder).held_out, config.seed)
    return evaluate(model.token_losses, [rows[i] for i in range(min(len(rows), NUM_EVALUATED))], name)


def evaluate(token_losses: Callable[[Batch], np.ndarray], rows: Iterable[Batch], name: str) -> Curves:
    """The curves of rows of tokens and labels; of codes those of the answers."""
    batches = [{key: values[None] for key, values in row.items()} for row in rows]
    full = np.concatenate([token_losses(batch) for batch in batches])
    cut = np.concatenate([cut_losses(token_losses, batch, num_workers=1) for batch in batches])
    labels = np.concatenate([batch["labels"] for batch in batches])
    is_scored = labels != IGNORED
    if name == "code":
        is_scored &= (labels >= FIRST_CODE) & (np.arange(LENGTH) >= SIZE)
    return Curves(full.astype(np.float64), cut.astype(np.float64), is_scored)


def to_rows(name: str, curves: Curves) -> list[dict]:
    """Quantiles over the evaluated rows of their mean losses where context is cut, and of the difference of the two.

    The bound is what a loss is compared with: that of the whole row with that of the cut one, and this with a guess.
    """
    where = curves.is_scored & is_cut(LENGTH)
    full, cut = (np.where(where, losses, 0).sum(axis=1) / where.sum(axis=1) for losses in (curves.full, curves.cut))
    guess = math.log(NUM_CODES if name == "code" else SEPARATOR)
    case = {"benchmark": "far", "case": f"512_tiny_{name}", "implementation": "balanced", "workers": 1}
    rows = []
    for mode, metric, values, bound in (
        ("full", "loss", full, float(np.median(cut))),
        (f"cut_to_{SIZE}", "loss", cut, guess),
        ("full", "gain", cut - full, 0.0),
    ):
        quantile = quantiles(values.tolist())._asdict()
        rows.append(case | {"mode": mode, "metric": metric, "unit": "nats", "bound": bound} | quantile)
    return rows


def draw(curves: dict[str, Curves]) -> Figure:
    """Mean losses against the place in the row, of text in bins of half an eighth, of answers in eighths."""
    figure = Figure(figsize=(4.5 * len(curves), 3.4), layout="constrained")
    panels = figure.subplots(1, len(curves), squeeze=False)[0]
    labels = {"full": "the whole row before it", "cut": f"at most {SIZE} tokens before it"}
    for (name, of), axes in zip(curves.items(), panels, strict=True):
        size = SIZE if name == "code" else SIZE // 2
        for mode, style in STYLES.items():
            total = np.where(of.is_scored, getattr(of, mode), 0).sum(axis=0).reshape(-1, size).sum(axis=1)
            count = of.is_scored.sum(axis=0).reshape(-1, size).sum(axis=1)
            places = size * np.arange(len(count)) + size / 2
            has_any = count > 0
            means = total[has_any] / count[has_any]
            axes.plot(places[has_any], means, marker="o", markersize=3, label=labels[mode], **style)
        axes.set_title("source files" if name == "text" else "the code of the row, asked for", fontsize=9)
        axes.set_xlabel("position in the row", fontsize=9)
        axes.set_xticks(range(0, LENGTH + 1, SIZE))
        axes.grid(color="0.9")
        axes.tick_params(labelsize=8)
        if name == "code":
            axes.axhline(math.log(NUM_CODES), color="0.4", linestyle=":", linewidth=1, label="a guess")
            axes.set_ylim(bottom=0)
    panels[0].set_ylabel("loss, nats a token", fontsize=9)
    panels[-1].legend(frameon=False, fontsize=8, title="a token sees", title_fontsize=8)
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "far.csv", help="rows")
    parser.add_argument("--picture", type=Path, default=Path(__file__).parent.parent / "docs" / "far.png")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        curves = {name: train(name, Path(folder)) for name in STEPS}
    rows = [row for name, of in curves.items() for row in to_rows(name, of)]
    for row in rows:
        print(f"{row['case']} {row['metric']} {row['mode']}: {row['p20']:.3f} {row['p50']:.3f} {row['p80']:.3f} nats")
    write_rows(arguments.out, rows)
    draw(curves).savefig(arguments.picture, dpi=180)
    print(arguments.picture)


if __name__ == "__main__":
    main()
