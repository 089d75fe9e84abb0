"""Batches of rows of real text, {"tokens", "labels"}, in an order that a seed decides and that resumes."""

import dataclasses
import json
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grain
import numpy as np

from train.config import InputError
from train.loss import IGNORED

SEPARATOR = 256
"""Token between two documents of byte-level text; bytes are the tokens 0 to 255."""

_CHECKED_AT_ONCE = 2**24


@dataclasses.dataclass(frozen=True)
class Tokens:
    """One stream of tokens, where it comes from, and a checksum that tells it from another."""

    values: np.ndarray
    source: str
    checksum: int


def load(path: Path | None, vocab_size: int) -> Tokens:
    """Returns the tokens of a file or folder, or of Python's own source text where `path` is None.

    Text is read as bytes, with the token SEPARATOR between documents; a file is a document, and so is a line
    of a .jsonl. Token files are mapped: .npy of one dimension and any integer type, .bin of little-endian
    uint16. Every token is looked at once.

    Raises:
      InputError: unreadable, empty, malformed, or a token outside the vocabulary.
    """
    if path is None:
        values, source = _concatenate(_standard_library()), "the source files of Python's standard library"
    elif path.suffix in (".npy", ".bin"):
        values, source = _map_tokens(path), str(path)
    else:
        values, source = _concatenate(_documents(path)), str(path)
    if len(values) < 2:
        raise InputError(f"--data {source}: at least 2 tokens, found {len(values)}")
    return Tokens(values, source, _checksum(values, source, vocab_size))


@dataclasses.dataclass(frozen=True)
class Rows:
    """The stream cut into rows of `seq_len`; labels are the tokens shifted left by one within the row.

    The last position of a row has no label. A short last row is padded with token 0 and without labels.
    """

    values: np.ndarray
    seq_len: int

    def __len__(self) -> int:
        whole, rest = divmod(len(self.values), self.seq_len)
        return whole + (rest > 1)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        start = index * self.seq_len
        piece = np.asarray(self.values[start : start + self.seq_len], np.int32)
        tokens = np.zeros(self.seq_len, np.int32)
        labels = np.full(self.seq_len, IGNORED, np.int32)
        tokens[: len(piece)] = piece
        labels[: len(piece) - 1] = piece[1:]
        return {"tokens": tokens, "labels": labels}


class Batches:
    """Endless batches of rows, shuffled anew each epoch; `position` is where it stands, as JSON."""

    def __init__(self, tokens: Tokens, *, seq_len: int, batch_size: int, seed: int) -> None:
        self._tokens = tokens
        rows = (
            grain.MapDataset.source(Rows(tokens.values, seq_len))
            .seed(seed)
            .shuffle()
            .repeat()
            .batch(batch_size, drop_remainder=True)
        )
        self._iterator = iter(rows.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)))

    def __next__(self) -> dict[str, np.ndarray]:
        return next(self._iterator)

    @property
    def position(self) -> dict[str, Any]:
        return {"checksum": self._tokens.checksum, "iterator": self._iterator.get_state()}

    @position.setter
    def position(self, position: dict[str, Any]) -> None:
        if position["checksum"] != self._tokens.checksum:
            raise InputError(
                f"--data {self._tokens.source}: the data of the checkpoint, but its content has changed since"
            )
        self._iterator.set_state(position["iterator"])


def _standard_library() -> Iterator[bytes]:
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    for path in sorted(root.rglob("*.py")):
        if skipped.isdisjoint(path.relative_to(root).parts):
            yield _read(path)


def _documents(path: Path) -> Iterator[bytes]:
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    for file in files:
        if file.suffix in (".npy", ".bin"):
            raise InputError(f"--data {path}: a folder of text files; pass the token file {file} by itself")
        yield from _lines(file) if file.suffix == ".jsonl" else [_read(file)]


def _lines(file: Path) -> Iterator[bytes]:
    for number, line in enumerate(_read(file).splitlines(), start=1):
        if line.strip():
            try:
                yield json.loads(line)["text"].encode("utf-8", "surrogatepass")
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                raise InputError(f'--data {file}: line {number} is a JSON object with a string "text"') from None


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise InputError(f"--data {file}: a readable file ({error.strerror})") from None


def _concatenate(documents: Iterator[bytes]) -> np.ndarray:
    filled: Sequence[bytes] = [document for document in documents if document]
    values = np.full(sum(map(len, filled)) + max(len(filled) - 1, 0), SEPARATOR, np.uint16)
    start = 0
    for document in filled:
        values[start : start + len(document)] = np.frombuffer(document, np.uint8)
        start += len(document) + 1
    return values


def _map_tokens(path: Path) -> np.ndarray:
    try:
        if path.suffix == ".npy":
            values = np.load(path, mmap_mode="r", allow_pickle=False)
        elif path.stat().st_size % 2 != 0:
            raise ValueError("its size is odd")
        else:
            values = np.memmap(path, "<u2", mode="r") if path.stat().st_size else np.zeros(0, np.uint16)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(
            f"--data {path}: a readable file of tokens, .npy or .bin of little-endian uint16 ({error})"
        ) from None
    if values.ndim != 1 or not np.issubdtype(values.dtype, np.integer):
        raise InputError(f"--data {path}: one dimension of integers, found {values.dtype}{list(values.shape)}")
    return values


def _checksum(values: np.ndarray, source: str, vocab_size: int) -> int:
    """CRC-32 of the tokens; refuses those outside the vocabulary on the way."""
    checksum = zlib.crc32(str(values.dtype).encode())
    for start in range(0, len(values), _CHECKED_AT_ONCE):
        piece = np.ascontiguousarray(values[start : start + _CHECKED_AT_ONCE])
        outside = (piece < 0) | (piece >= vocab_size)
        if outside.any():
            index = int(outside.argmax())
            raise InputError(
                f"--data {source}: tokens from 0 to {vocab_size - 1} (--vocab-size {vocab_size}), "
                f"found {piece[index]} at position {start + index}"
            )
        checksum = zlib.crc32(piece.view(np.uint8), checksum)
    return checksum
