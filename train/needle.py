"""Needles: `python -m train.needle RUN_DIR` tells how well a model finds a fact at any depth of texts of any length.

A fact, such as "The secret number of Tamoke is 51903.", is put into a text of the run's data, or of Python's standard
library, and asked for at its end. The table has for each depth (0 is the beginning) and length the share of facts that
greedy decoding writes exactly, and the mean loss of their tokens in nats; the last row is of texts without the fact.
"""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import numpy as np
import tyro

from train import flags
from train.config import Platform
from train.flags import InputError, MeshShape

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ONE_DEVICE = MeshShape()
_SYLLABLES = ("ta", "mo", "ke", "ri", "su", "na", "lo", "vi")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Ask a model for facts hidden in long texts, by depth and length."""

    run_dir: Annotated[tyro.conf.Positional[Path], flags.parsed(Path, "RUN_DIR")]
    """Folder of a training run, or of a Hugging Face model with its tokenizer.json."""
    lengths: tuple[int, ...] = (1024, 4096)
    """Tokens of a text, with the fact and the question."""
    depths: tuple[float, ...] = (0, 0.25, 0.5, 0.75, 1)
    """Where the fact is: 0 at the beginning, 1 right before the question."""
    repeats: Annotated[int, flags.whole] = 4
    """Facts and texts of each depth and length."""
    out: Annotated[Path | None, flags.parsed(Path, "PNG")] = None
    """Picture of the table, with the extra `plot`."""
    seed: Annotated[int, flags.whole_or_zero] = 0
    """Decides facts and texts, which are the same at each depth."""
    mesh: Annotated[MeshShape, flags.parsed(MeshShape.parse, "data=N,seq=N,tensor=N")] = _ONE_DEVICE
    """Devices per axis; need not be those of the training."""
    platform: Annotated[Platform, flags.choice(*get_args(Platform))] = "auto"
    """As of the training."""

    def __post_init__(self) -> None:
        for length in self.lengths:
            if length % self.mesh.seq:
                raise InputError(f"--lengths {length}: a multiple of the seq axis of --mesh {self.mesh}")
        for depth in self.depths:
            if not 0 <= depth <= 1:
                raise InputError(f"--depths {depth:g}: numbers from 0 to 1")
        if self.repeats % self.mesh.data:
            raise InputError(f"--repeats {self.repeats}: a multiple of the data axis of --mesh {self.mesh}")
        if self.out is not None and self.out.suffix != ".png":
            raise InputError(f"--out {self.out}: a name that ends in .png")


@dataclasses.dataclass(frozen=True)
class Found:
    """Of the facts at a depth of texts of a length: the share written exactly, and the nats a token of them."""

    recalled: float
    loss: float

    def __str__(self) -> str:
        return f"{self.recalled:.0%} {self.loss:.2f}"


def main(arguments: Sequence[str]) -> int:
    """Prints the table and returns the exit code."""
    try:
        settings = flags.cli(Settings, arguments, "python -m train.needle")
        table = measure(settings)
        print(format_table(table))
        if settings.out is not None:
            draw(table).savefig(settings.out, dpi=150)
            print(settings.out)
    except (InputError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def hide(
    encode: Callable[[str], np.ndarray], haystack: np.ndarray, length: int, depth: float | None, number: int
) -> tuple[np.ndarray, int]:
    """Returns (tokens [T], tokens of the answer at their end); the number decides the fact, None hides none.

    Raises:
      InputError: the length has no room.
    """
    random = np.random.default_rng(number)
    name = "".join(random.choice(_SYLLABLES, 3)).capitalize()
    asked, answer = f"\nThe secret number of {name} is", f" {random.integers(10_000, 100_000)}"
    fact, question, value = encode(f"{asked}{answer}.\n"), encode(asked), encode(answer)
    room = length - len(fact) - len(question) - len(value)
    if room < 0:
        raise InputError(f"--lengths {length}: at least {length - room} tokens, for fact and question")
    start = int(random.integers(max(len(haystack) - length, 1)))
    text = np.resize(haystack[start:], length - len(question) - len(value))
    if depth is not None:
        before = round(depth * room)
        text = np.concatenate([text[:before], fact, text[before:room]])
    return np.concatenate([text, question, value]).astype(np.int32), len(value)


def measure(settings: Settings) -> dict[tuple[float | None, int], Found]:
    """What is found by (depth, length); depth None is of texts without the fact.

    Raises:
      InputError: RUN_DIR holds no model, or the mesh does not fit it.
    """
    # Not above, so that a wrong argument need not wait for JAX.
    from train.decode import Choice, Decoder, restore
    from train.report import say
    from train.tokens import load

    model = restore(settings.run_dir, settings.mesh, settings.platform)
    say(f"model     {model.origin}, {model.llama.num_parameters:,} parameters")
    tokenizer, source = model.tokenizer, next(iter(model.data), None)
    haystack = load(source, model.llama.vocab_size, tokenizer=tokenizer)
    say(f"texts     {haystack.source}")
    values = np.where(haystack.values < 0, ~haystack.values, haystack.values)
    encode = lambda text: tokenizer.prompt(text)[len(tokenizer.prompt("")) :]
    decoder = Decoder(model.create_model, model.mesh, Choice(temperature=0))
    table = {}
    for length in settings.lengths:
        for depth in (*settings.depths, None):
            made = [hide(encode, values, length, depth, settings.seed + i) for i in range(settings.repeats)]
            is_recalled = [
                list(decoder(model.params, row[:-count], count)) == row[-count:].tolist() for row, count in made
            ]
            num_rows = settings.mesh.data
            groups = [made[i : i + num_rows] for i in range(0, len(made), num_rows)]
            loss = sum(model.token_losses(_batch(group)).sum() for group in groups)
            table[depth, length] = Found(float(np.mean(is_recalled)), float(loss / sum(count for _, count in made)))
    return table


def _batch(made: list[tuple[np.ndarray, int]]) -> dict[str, np.ndarray]:
    """Rows of which the answers alone have labels."""
    from train.loss import IGNORED

    tokens = np.stack([row for row, _ in made])
    labels = np.full_like(tokens, IGNORED)
    for label, (row, count) in zip(labels, made, strict=True):
        label[-count - 1 : -1] = row[-count:]
    return {"tokens": tokens, "labels": labels}


def format_table(table: dict[tuple[float | None, int], Found]) -> str:
    """A line for each depth, a column for each length."""
    depths, lengths = (list(dict.fromkeys(keys)) for keys in zip(*table, strict=True))
    lines = ["depth " + "".join(f"{length:>12,}" for length in lengths)]
    lines += [f"{_name(depth):<6}" + "".join(f"{table[depth, length]!s:>12}" for length in lengths) for depth in depths]
    return "\n".join(lines)


def draw(table: dict[tuple[float | None, int], Found]) -> "Figure":
    """The loss of the answers as colours, with what the table says in each field.

    Raises:
      InputError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise InputError("--out: matplotlib, pip install 'distflash_jax[plot]'") from None
    depths, lengths = (list(dict.fromkeys(keys)) for keys in zip(*table, strict=True))
    figure = Figure(figsize=(2 + 1.2 * len(lengths), 1 + 0.5 * len(depths)), layout="constrained")
    axes = figure.subplots()
    losses = [[table[depth, length].loss for length in lengths] for depth in depths]
    figure.colorbar(axes.imshow(losses, cmap="viridis_r", vmin=0, aspect="auto"), label="nats a token of the answer")
    for (depth, length), found in table.items():
        place = lengths.index(length), depths.index(depth)
        axes.text(*place, str(found), ha="center", va="center", fontsize=8, backgroundcolor=(1, 1, 1, 0.6))
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_yticks(range(len(depths)), [_name(depth) for depth in depths])
    axes.set_xlabel("tokens")
    axes.set_ylabel("depth of the fact")
    return figure


def _name(depth: float | None) -> str:
    return "none" if depth is None else f"{depth:g}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
