"""Batches of rows of real text, {"tokens", "labels"}, in an order that a seed decides and that resumes."""

import dataclasses
import zlib
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any, cast

import grain
import numpy as np

from distflash_jax import order_documents
from distflash_jax.table import Schedule
from train.config import Config
from train.distributed import WHOLE, Part
from train.flags import InputError
from train.loss import IGNORED
from train.sources import is_token_file
from train.tokenizer import Tokenizer, load_tokenizer
from train.tokens import Tokens, load, starts_of

# First batches whose numbers of rows tell one order from another.
_COMPARED = 4


@dataclasses.dataclass(frozen=True)
class Rows:
    """The stream cut into rows of `seq_len`; labels are the tokens shifted left by one within the row.

    The last position of a row has no label, nor has one whose next token is only read. A short last row is
    padded with token 0 and without labels. With `chosen`, the rows of these numbers only. With `starts`, where
    documents begin in the stream, the documents of a row are numbered from 1 as its segment_ids, 0 being padding, and
    nothing is learned across their borders.
    """

    values: np.ndarray
    seq_len: int
    chosen: np.ndarray | None = None
    starts: np.ndarray | None = None

    def __len__(self) -> int:
        if self.chosen is not None:
            return len(self.chosen)
        whole, rest = divmod(len(self.values), self.seq_len)
        return whole + (rest > 1)

    def _start(self, index: int) -> int:
        """Of a row in the stream."""
        return self.number(index) * self.seq_len

    def _borders(self, index: int) -> np.ndarray:
        """Where documents begin inside a row, but at its start."""
        assert self.starts is not None
        start = self._start(index)
        first, last = np.searchsorted(self.starts, [start + 1, min(start + self.seq_len, len(self.values))])
        return self.starts[first:last] - start

    def lengths(self, index: int) -> np.ndarray:
        """Those of the documents of a row."""
        end = min(self.seq_len, len(self.values) - self._start(index))
        return np.diff(self._borders(index), prepend=0, append=end)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        start = self._start(index)
        piece = np.asarray(self.values[start : start + self.seq_len], np.int32)
        is_read_only = piece < 0
        tokens = np.zeros(self.seq_len, np.int32)
        labels = np.full(self.seq_len, IGNORED, np.int32)
        tokens[: len(piece)] = np.where(is_read_only, ~piece, piece)
        labels[: len(piece) - 1] = np.where(is_read_only, IGNORED, piece)[1:]
        row = {"tokens": tokens, "labels": labels}
        if self.starts is not None:
            inside = self._borders(index)
            labels[inside - 1] = IGNORED
            begins = np.zeros(len(piece), np.int32)
            begins[inside] = 1
            row["segment_ids"] = np.zeros(self.seq_len, np.int32)
            row["segment_ids"][: len(piece)] = 1 + np.cumsum(begins)
        return row

    def number(self, index: int) -> int:
        """Where a row stands in the stream, from 0."""
        return int(index if self.chosen is None else self.chosen[index])

    def split(self, fraction: float, seed: int) -> tuple["Rows", "Rows"]:
        """Returns (kept, held out): the seed and a row's number alone decide where it belongs.

        Raises:
          ValueError: fewer than two rows.
        """
        if len(self) < 2:
            raise ValueError(f"at least 2 rows of {self.seq_len} tokens, found {len(self)}")
        count = min(max(round(fraction * len(self)), 1), len(self) - 1)
        held_out = np.sort(np.argsort(_mix_bits(len(self), seed), kind="stable")[:count])
        kept = np.delete(np.arange(len(self)), held_out)
        return dataclasses.replace(self, chosen=kept), dataclasses.replace(self, chosen=held_out)


@dataclasses.dataclass(frozen=True)
class Share:
    """Rows of a source, and how many samples are drawn from them relative to the other sources."""

    tokens: Tokens
    rows: Rows
    weight: float = 1.0


@dataclasses.dataclass(frozen=True)
class Spread:
    """An order of the rows of a batch, and of the packed documents of each, that keeps workers evenly busy.

    table: of the workers of a group, each of which has so many rows, in micro-batches of every `accumulate`-th.
    """

    table: Schedule
    num_rows: int
    accumulate: int = 1

    def deal(self, lengths: Sequence[np.ndarray]) -> np.ndarray:
        """The numbers of a batch's rows, group after group: the groups' rows of each place have about as much to do."""
        scores = np.array([np.sum(x.astype(np.int64) * (x + 1)) for x in lengths])
        places = np.argsort(-scores, kind="stable").reshape(self.num_rows, -1)
        places[1::2] = places[1::2, ::-1]
        return places.T.reshape(-1)

    def __call__(self, rows: list[dict[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
        """The rows of one or several such groups."""
        rows = list(rows)
        for group in range(0, len(rows), self.num_rows):
            for first in range(group, group + self.accumulate):
                places = range(first, group + self.num_rows, self.accumulate)
                lengths = [np.bincount(rows[i]["segment_ids"])[1:] for i in places]
                orders = order_documents(lengths, self.table, seq_len=len(rows[first]["tokens"]))
                for i, order in zip(places, orders, strict=True):
                    rows[i] = reorder(rows[i], order)
        return rows


def reorder(row: dict[str, np.ndarray], order: np.ndarray) -> dict[str, np.ndarray]:
    """The row with its documents, numbered from 0, in this order; then they are segments 1, 2, .. again."""
    number = np.zeros(len(order) + 1, np.int32)  # in the new order
    number[order + 1] = np.arange(1, len(order) + 1)
    ids = number[row["segment_ids"]]
    index = np.argsort(np.where(ids == 0, len(number), ids), kind="stable")  # padding stays behind them
    return {name: x[index] for name, x in (row | {"segment_ids": ids}).items()}


class Batches:
    """Endless batches of rows; `position` is where it stands, as JSON.

    Each source is shuffled anew whenever all its rows were drawn; sources take turns in proportion to their
    weights.

    Args:
      part: rows and columns of each batch that are read and given, those of this process; its order and
        position are those of whole batches.
      tokenizer: the fingerprint of what made the tokens.
      spread: in which order rows, and the documents of a row, come.
    """

    def __init__(
        self,
        shares: Sequence[Share],
        *,
        batch_size: int,
        seed: int,
        part: Part = WHOLE,
        tokenizer: str | None = None,
        spread: Spread | None = None,
    ) -> None:
        self._shares = shares
        self._part = part
        self._spread = spread
        numbers = [_numbers(i, len(share.rows), seed + i) for i, share in enumerate(shares)]
        batches = _mix(shares, numbers).batch(batch_size, drop_remainder=True)
        first = b"".join(np.asarray(batches[i], "<i8").tobytes() for i in range(_COMPARED))
        self._fingerprint = {
            "sources": [share.tokens.fingerprint for share in shares],
            "tokenizer": tokenizer,
            "order": zlib.crc32(first),
        }
        batches = batches.map(self._read)
        self._iterator = iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)))

    def _read(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """This process's part of the batch of these (source, row) pairs."""
        rows, columns = self._part
        if self._spread is not None:
            numbers = numbers[self._spread.deal([self._shares[source].rows.lengths(row) for source, row in numbers])]
        read = [self._shares[source].rows[row] for source, row in numbers[rows]]
        read = read if self._spread is None else self._spread(read)
        return {name: np.stack([row[name][columns] for row in read]) for name in read[0]} | {"numbers": numbers}

    def __next__(self) -> dict[str, np.ndarray]:
        batch = next(self._iterator)
        self._numbers = batch.pop("numbers")
        return batch

    @property
    def last(self) -> str:
        """The rows of the batch that was given last, in the parts of all processes, by number and source."""
        rows = [[share.rows.number(row) for i, row in self._numbers if i == j] for j, share in enumerate(self._shares)]
        named = [(share.tokens.source, numbers) for share, numbers in zip(self._shares, rows, strict=True) if numbers]
        return " and ".join(f"rows {', '.join(map(str, numbers))} of {source}" for source, numbers in named)

    @property
    def position(self) -> dict[str, Any]:
        """Where it stands, and in what."""
        return self._fingerprint | {"iterator": self._iterator.get_state()}

    def seek(self, position: dict[str, Any], *, accepted: Container[str] = ()) -> None:
        """Goes to a position, in the data and the order of which it is.

        Args:
          accepted: of `data` and `tokenizer`, what may have changed.

        Raises:
          InputError: something else has changed.
        """
        ours, theirs = self._fingerprint, position
        if ours["tokenizer"] != theirs["tokenizer"] and not ("tokenizer" in accepted or "data" in accepted):
            raise InputError(
                "--tokenizer: that of the checkpoint, but its content has changed since; --accept tokenizer goes on so"
            )
        if "data" not in accepted:
            for share, kept in zip(self._shares, theirs["sources"], strict=True):
                if (found := share.tokens.fingerprint) != kept:
                    raise InputError(
                        f"--data {share.tokens.source}: the data of the checkpoint, but its content has changed since "
                        f"({found} instead of {kept}); --accept data goes on so"
                    )
            if ours["order"] != theirs["order"]:
                raise InputError(
                    "--data: rows in the order of the checkpoint, which another version of grain, or a setting that "
                    "was accepted, has changed; --accept data goes on so"
                )
        self._iterator.set_state(position["iterator"])


@dataclasses.dataclass(frozen=True)
class Data:
    """What a run trains on, what it evaluates, if anything, and, if known, the bytes of text of each token and what
    made the tokens.
    """

    training: list[Share]
    held_out: list[Share]
    num_bytes: np.ndarray | None
    tokenizer: Tokenizer | None


def open_data(config: Config, cache: Path) -> Data:
    """Reads all data of a configuration; `cache` is the folder in which their tokens are kept.

    Raises:
      InputError: as `load`, or a tokenizer or a share to hold out that the model or the data have no room for.
    """
    folder, vocab_size = _tokenizer_of(config), config.llama.vocab_size
    tokenizer = load_tokenizer(folder)
    if folder is not None and tokenizer.vocab_size > vocab_size:
        raise InputError(f"--vocab-size {vocab_size}: at least {tokenizer.vocab_size}, for --tokenizer {folder}")

    def read(flag: str, path: Path | None, weight: float = 1.0) -> Share:
        bad = config.max_bad_lines
        tokens = load(path, vocab_size, tokenizer=tokenizer, cache=cache, flag=flag, max_bad_lines=bad)
        starts = starts_of(tokens, folder and tokenizer) if config.packing else None
        return Share(tokens, Rows(tokens.values, config.seq_len, starts=starts), weight)

    training = [read("--data", source.path, source.weight) for source in config.data] or [read("--data", None)]
    held_out = [read("--eval-data", config.eval_data)] if config.eval_data else []
    if (fraction := config.eval_fraction) is not None:
        for i, share in enumerate(training):
            try:
                kept, others = share.rows.split(fraction, config.seed)
            except ValueError as error:
                raise InputError(f"--eval-fraction {fraction:g}: {error} in {share.tokens.source}") from None
            training[i] = dataclasses.replace(share, rows=kept)
            held_out.append(dataclasses.replace(share, rows=others))
    evaluated = [config.eval_data] if config.eval_data else [source.path for source in config.data]
    # Without --tokenizer, nobody knows what the numbers of a token file stand for.
    is_unknown = folder is None and any(map(is_token_file, evaluated))
    if is_unknown or tokenizer.num_bytes is None:
        return Data(training, held_out, None, None if is_unknown else tokenizer)
    num_bytes = np.pad(tokenizer.num_bytes, (0, max(vocab_size - tokenizer.vocab_size, 0)))
    return Data(training, held_out, num_bytes, tokenizer)


def _tokenizer_of(config: Config) -> Path | None:
    """Where the tokenizer is: that of --init-from, if text is read and no other is given; None for bytes."""
    paths = [source.path for source in config.data] + ([config.eval_data] if config.eval_data else [])
    if config.tokenizer or config.init_from is None or (config.data and all(map(is_token_file, paths))):
        return config.tokenizer
    if not (config.init_from / "tokenizer.json").exists():
        raise InputError(f"--init-from {config.init_from}: tokenizer.json in it, or --tokenizer, to read text")
    return config.init_from


def sample(shares: Sequence[Share], seed: int) -> Sequence[dict[str, np.ndarray]]:
    """The rows in a fixed order in which sources take turns as in `Batches`, until one has no more."""
    rows = _mix(
        shares, [grain.MapDataset.source(share.rows).seed(seed + i).shuffle() for i, share in enumerate(shares)]
    )
    return cast(Sequence[dict[str, np.ndarray]], rows)


def _numbers(source: int, num_rows: int, seed: int) -> grain.MapDataset:
    """(source, row) of a source's rows, without end."""
    shuffled = grain.MapDataset.range(num_rows).seed(seed).shuffle().repeat()
    return shuffled.map(lambda row: np.array([source, row]))


def _mix(shares: Sequence[Share], rows: list[grain.MapDataset]) -> grain.MapDataset:
    return rows[0] if len(rows) == 1 else grain.MapDataset.mix(rows, [share.weight for share in shares])


def _mix_bits(count: int, seed: int) -> np.ndarray:
    """A hash of (seed, i) for each i below `count`; NumPy promises no order of its generators for the years.

    Source: the finaliser of splitmix64, Steele, Lea and Flood, 2014, applied twice.
    """
    bits = np.arange(count, dtype=np.uint64) + (np.uint64(seed) << np.uint64(32))
    for _ in range(2):
        bits = bits + np.uint64(0x9E3779B97F4A7C15)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        bits ^= bits >> np.uint64(31)
    return bits
