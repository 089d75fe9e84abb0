"""Documents of text, .jsonl and .parquet files and folders of them, and arrays of token files."""

import dataclasses
import itertools
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from train.flags import InputError

_TOKEN_SUFFIXES = (".npy", ".bin")
# Of bytes: a longer one would need many times its size in memory once it is read.
_LONGEST_LINE = 2**26
_FORMS = 'a string "text", a list "messages" of objects with a "role", or strings "prompt" and "completion"'


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Messages, of which those of the assistant are learned, and the tools that the template is told of."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None


@dataclasses.dataclass(frozen=True)
class Document:
    """What is read as one piece; `where` names its place for an error, `size` is its part of the file in bytes."""

    content: str | bytes | Conversation
    where: str
    size: int


class BadLines:
    """Skips lines, and rows of a table, that are no document, and tells of them, up to so many."""

    def __init__(self, most: int = 0) -> None:
        self.most = most
        self.skipped: list[str] = []

    def skip(self, error: InputError) -> None:
        """Counts one.

        Raises:
          InputError: there are too many.
        """
        if len(self.skipped) == self.most:
            raise InputError(f"{error}; --max-bad-lines, which is {self.most}, skips so many") from None
        self.skipped.append(str(error))


def is_token_file(path: Path) -> bool:
    """Whether a source holds tokens rather than documents."""
    return path.suffix in _TOKEN_SUFFIXES and not path.is_dir()


def files_of(path: Path | None) -> list[Path]:
    """The files of a source in their order; of Python's standard library, without its tests, for None.

    Raises:
      InputError: a folder holds a token file.
    """
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
        return [file for file in sorted(root.rglob("*.py")) if skipped.isdisjoint(file.relative_to(root).parts)]
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    for file in files:
        if path.is_dir() and file.suffix in _TOKEN_SUFFIXES:
            raise InputError(f"{path}: a folder of text files; pass the token file {file} by itself")
    return files


def documents(file: Path, bad: BadLines) -> Iterator[Document]:
    """Yields a text file as one document, and each line of a .jsonl or row of a .parquet but the bad ones.

    Raises:
      InputError: unreadable or malformed, in one line that begins with the file.
    """
    try:
        if file.suffix == ".jsonl":
            yield from _lines(file, bad)
        elif file.suffix == ".parquet":
            yield from _rows(file, bad)
        else:
            content = file.read_bytes()
            yield Document(content, str(file), len(content))
    except OSError as error:
        reason = error.strerror or str(error).partition("\n")[0]
        raise InputError(f"{file}: a readable file ({reason})") from None


def map_tokens(path: Path) -> np.ndarray:
    """The tokens of a .npy of one dimension and any integer type, or of a .bin of little-endian uint16, mapped.

    Raises:
      InputError: unreadable, another shape or type, or a negative token.
    """
    try:
        if path.suffix == ".npy":
            values = np.load(path, mmap_mode="r", allow_pickle=False)
        elif path.stat().st_size % 2 != 0:
            raise ValueError("its size is odd")
        else:
            values = np.memmap(path, "<u2", mode="r") if path.stat().st_size else np.zeros(0, np.uint16)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{path}: a readable file of tokens, .npy or .bin of little-endian uint16 ({error})") from None
    if values.ndim != 1 or not np.issubdtype(values.dtype, np.integer):
        raise InputError(f"{path}: one dimension of integers, found {values.dtype}{list(values.shape)}")
    return values


def _lines(file: Path, bad: BadLines) -> Iterator[Document]:
    with file.open("rb") as lines:
        for number in itertools.count(1):
            line = lines.readline(_LONGEST_LINE)
            if not line:
                return
            is_whole = len(line) < _LONGEST_LINE or line.endswith(b"\n")
            rest = line
            while not is_whole and rest and not rest.endswith(b"\n"):
                rest = lines.readline(_LONGEST_LINE)
            where = f"{file}: line {number}"
            try:
                if not is_whole:
                    raise InputError(f"{where} is longer than {_LONGEST_LINE:,} bytes")
                if line.strip():
                    yield _document(_parsed(line, where), where, f"{where} is a JSON object", len(line))
            except InputError as error:
                bad.skip(error)


def _parsed(line: bytes, where: str) -> Any:
    try:
        return json.loads(line)
    # The decoder of deep nesting runs out of stack, that of bytes finds no UTF-8.
    except (ValueError, RecursionError):
        raise InputError(f"{where} is a JSON object with {_FORMS}") from None


def _rows(file: Path, bad: BadLines) -> Iterator[Document]:
    try:
        import pyarrow  # pyright: ignore[reportMissingImports]
        import pyarrow.parquet  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise InputError(f"{file}: a .parquet needs pyarrow, pip install 'distflash_jax[parquet]'") from None
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            names = [name for name in table.schema_arrow.names if name in _KEYS]
            size = file.stat().st_size // max(table.metadata.num_rows, 1)
            batches = table.iter_batches(batch_size=1024, columns=names)
            for number, row in enumerate((row for batch in batches for row in batch.to_pylist()), start=1):
                where = f"{file}: row {number}"
                try:
                    yield _document(_without_nulls(row), where, f"{where} is one", size)
                except InputError as error:
                    bad.skip(error)
    except pyarrow.ArrowException as error:
        reason = str(error).partition("\n")[0]
        raise InputError(f"{file}: a readable .parquet ({reason})") from None


def _without_nulls(value: Any) -> Any:
    """Leaves out what a row lacks: a table gives each of its rows every column and field, as None."""
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


_KEYS = {"text", "messages", "prompt", "completion", "tools"}


def _document(row: Any, where: str, subject: str, size: int) -> Document:
    """The document of a line or row, whatever other fields it has; two forms at once are refused."""
    found = {name for name in _KEYS - {"tools"} if isinstance(row, dict) and name in row}
    # A prompt beside messages, as many data sets have it, is the beginning of these.
    if "messages" in found and "completion" not in found:
        found.discard("prompt")
    if len(found) > 1 and found != {"prompt", "completion"}:
        raise InputError(f"{where} has one form of content, found {', '.join(sorted(found))}")
    if found == {"text"} and isinstance(row["text"], str):
        return Document(row["text"], where, size)
    if found == {"messages"} and _are_messages(row["messages"]):
        return Document(Conversation(row["messages"], row.get("tools")), where, size)
    if found == {"prompt", "completion"} and isinstance(row["prompt"], str) and isinstance(row["completion"], str):
        turns = {"user": row["prompt"], "assistant": row["completion"]}
        messages = [{"role": role, "content": content} for role, content in turns.items()]
        return Document(Conversation(messages, row.get("tools")), where, size)
    raise InputError(f"{subject} with {_FORMS}")


def _are_messages(messages: Any) -> bool:
    return (
        isinstance(messages, list)
        and len(messages) > 0
        and all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages)
    )
