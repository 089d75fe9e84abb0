"""One stream of tokens from a source: made of its documents and kept in a folder, or mapped as they are in a file."""

import contextlib
import dataclasses
import hashlib
import os
import time
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from train.flags import InputError
from train.report import say
from train.sources import BadLines, documents, files_of, is_token_file, map_tokens
from train.tokenizer import ByteTokenizer, Encoded, Tokenizer

_CHECKED_AT_ONCE = 2**24
_SECONDS_BETWEEN_NOTES = 5
# Counts the changes of what `load` makes of the same files and tokenizer.
_CACHE_VERSION = 2
_BYTES = ByteTokenizer()


@dataclasses.dataclass(frozen=True)
class Tokens:
    """One stream of tokens, where it comes from, and a checksum that tells it from another.

    A value ~t, which is below 0, is the token t that is read but not learned. starts: where documents begin, in order;
    None where nobody knows.
    """

    values: np.ndarray
    source: str
    checksum: int
    starts: np.ndarray | None = None

    @property
    def fingerprint(self) -> str:
        """Tells it from another stream, and a reader how."""
        documents = "" if self.starts is None else f" in {len(self.starts):,} documents"
        borders = 0 if self.starts is None else zlib.crc32(np.asarray(self.starts, "<i8").tobytes())
        return f"{len(self.values):,} tokens{documents}, {self.checksum:08x}-{borders:08x}"


def load(
    path: Path | None,
    vocab_size: int,
    *,
    tokenizer: Tokenizer = _BYTES,
    cache: Path | None = None,
    flag: str = "--data",
    max_bad_lines: int = 0,
) -> Tokens:
    """Returns the tokens of a file or folder, or of Python's own source text where `path` is None.

    Documents follow each other with the borders of the tokenizer. Token files are mapped as they are. Every
    token is looked at once.

    Args:
      cache: folder in which the tokens of a tokenizer.json are kept, so that only the first call makes them;
        without it, and for bytes, they are in memory.
      flag: begins the message of an error.
      max_bad_lines: that are no document and are skipped, which is told.

    Raises:
      InputError: unreadable, empty, malformed, or a token outside the vocabulary.
    """
    source = "the source files of Python's standard library" if path is None else str(path)
    smallest, bad = -vocab_size, BadLines(max_bad_lines)
    try:
        if path is not None and is_token_file(path):
            values, starts, smallest = map_tokens(path), None, 0
        else:
            values, starts = _encode(files_of(path), source, tokenizer, cache, bad)
    except InputError as error:
        raise InputError(f"{flag} {error}") from None
    if bad.skipped:
        say(f"warning   {len(bad.skipped)} lines of {source} are skipped, of which the first: {bad.skipped[0]}")
    if len(values) < 2:
        raise InputError(f"{flag} {source}: at least 2 tokens, found {len(values)}")
    return Tokens(values, source, _checksum(values, f"{flag} {source}", smallest, vocab_size), starts)


def starts_of(tokens: Tokens, tokenizer: Tokenizer | None) -> np.ndarray:
    """Where the documents of a stream begin; in a token file, at what begins a text, or behind what ends one.

    Raises:
      InputError: nobody knows.
    """
    if tokens.starts is not None:
        return tokens.starts
    if tokenizer is None:
        raise InputError(f"--packing: --tokenizer, which tells what ends a document in {tokens.source}")
    borders = list(tokenizer.start or tokenizer.end)
    found = [
        start + np.flatnonzero(np.isin(tokens.values[start : start + _CHECKED_AT_ONCE], borders))
        for start in range(0, len(tokens.values), _CHECKED_AT_ONCE)
    ]
    return np.concatenate(found) + (0 if tokenizer.start else 1)


def _encode(
    files: list[Path], source: str, tokenizer: Tokenizer, cache: Path | None, bad: BadLines
) -> tuple[np.ndarray, np.ndarray]:
    """(the tokens of all documents, one after the other; where each begins); from the cache where they are kept."""
    filled = (document for file in files for document in documents(file, bad) if document.content)
    if cache is None or isinstance(tokenizer, ByteTokenizer):
        made = list(tokenizer.encode(filled, bad))
        values = np.concatenate([np.zeros(0, np.uint16), *(piece.values for piece in made)])
        return values, _starts((len(piece.values), piece.is_start) for piece in made)
    kept = cache / f"{_fingerprint(files, f'{tokenizer.fingerprint} {bad.most}')}.int32"
    starts = kept.with_suffix(".starts.npy")
    if not (kept.exists() and starts.exists()):
        total = sum(file.stat().st_size for file in files)
        sizes: list[tuple[int, bool]] = []
        with _written(kept, ".partial") as partial, partial.open("wb") as file:
            for piece in _with_notes(tokenizer.encode(filled, bad), source, total):
                sizes.append((len(piece.values), piece.is_start))
                file.write(piece.values.astype("<i4", copy=False).tobytes())
        with _written(starts, ".npy") as partial:
            np.save(partial, _starts(sizes))
    return np.memmap(kept, "<i4", mode="r") if kept.stat().st_size else np.zeros(0, np.int32), np.load(starts)


def _starts(pieces: Iterable[tuple[int, bool]]) -> np.ndarray:
    """Where documents begin, from the number of tokens of each piece and whether it begins one."""
    offset, starts = 0, []
    for size, is_start in pieces:
        starts += [offset] * is_start
        offset += size
    return np.array(starts, np.int64)


def _fingerprint(files: list[Path], tokenizer: str) -> str:
    """Tells files apart without reading them whole: by name, size, time of the last change, beginning and end."""
    digest = hashlib.sha256(f"{_CACHE_VERSION} {tokenizer}".encode())
    for path in files:
        try:
            with path.open("rb") as file:
                stat = os.fstat(file.fileno())
                digest.update(f"\n{path.name} {stat.st_size} {stat.st_mtime_ns} ".encode("utf-8", "surrogateescape"))
                digest.update(file.read(2**16))
                file.seek(max(stat.st_size - 2**16, 0))
                digest.update(file.read(2**16))
        except OSError as error:
            raise InputError(f"{path}: a readable file ({error.strerror})") from None
    return digest.hexdigest()[:32]


@contextlib.contextmanager
def _written(path: Path, suffix: str) -> Iterator[Path]:
    """A path to write to that is this process's own, and takes the name of the given one once it is whole."""
    partial = path.with_suffix(f".{os.getpid()}{suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        partial.replace(path)
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"tokens are kept in {path.parent}: a folder that can be written ({reason})") from None
    finally:
        # Not after the rename, only where something went wrong before it.
        with contextlib.suppress(OSError):
            partial.unlink()


def _with_notes(pieces: Iterable[Encoded], source: str, total: int) -> Iterator[Encoded]:
    """The pieces, with a line to the user every few seconds."""
    done, told = 0.0, time.monotonic()
    for piece in pieces:
        yield piece
        done += piece.size
        if time.monotonic() - told > _SECONDS_BETWEEN_NOTES:
            told = time.monotonic()
            say(f"tokenizing {source}: {done / 2**20:,.0f} of {total / 2**20:,.0f} MiB")


def _checksum(values: np.ndarray, source: str, smallest: int, vocab_size: int) -> int:
    """CRC-32 of the tokens; refuses those outside the vocabulary on the way."""
    checksum = zlib.crc32(str(values.dtype).encode())
    for start in range(0, len(values), _CHECKED_AT_ONCE):
        piece = np.ascontiguousarray(values[start : start + _CHECKED_AT_ONCE])
        outside = (piece < smallest) | (piece >= vocab_size)
        if outside.any():
            index = int(outside.argmax())
            raise InputError(
                f"{source}: tokens from 0 to {vocab_size - 1} (--vocab-size {vocab_size}), "
                f"found {piece[index]} at position {start + index}"
            )
        checksum = zlib.crc32(piece.view(np.uint8), checksum)
    return checksum
