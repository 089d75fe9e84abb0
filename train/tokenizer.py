"""Tokens of documents: one a byte, or those of a tokenizer.json and of the chat template beside it."""

import codecs
import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers

from train.chat import ChatTemplate
from train.flags import InputError
from train.sources import BadLines, Conversation, Document

SEPARATOR = 256
"""Token between two documents of byte-level text; bytes are the tokens 0 to 255."""

_PIECE = 2**20
_AT_ONCE = 2**24


class Encoded(NamedTuple):
    """Tokens, of which ~t, below 0, is a token t that is read but not learned; the bytes of the file that they come
    from; and whether a document begins with them.
    """

    values: np.ndarray
    size: float
    is_start: bool = True


class ByteTokenizer:
    """One token a byte, and SEPARATOR between documents; attributes and methods as those of a FileTokenizer."""

    def __init__(self) -> None:
        self.fingerprint = "bytes"
        self.vocab_size = SEPARATOR + 1
        self.start: frozenset[int] = frozenset()
        self.end = frozenset({SEPARATOR})
        self.num_bytes = (np.arange(SEPARATOR + 1) < SEPARATOR).astype(np.int32)

    def encode(self, documents: Iterable[Document], bad: BadLines | None = None) -> Iterator[Encoded]:
        """Yields the bytes of one document after the other; refuses conversations."""
        following = iter(documents)
        document = next(following, None)
        while document is not None:
            content = document.content
            if isinstance(content, Conversation):
                raise InputError(f"{document.where}: a conversation needs a chat template, --tokenizer FOLDER")
            if isinstance(content, str):
                content = content.encode("utf-8", "surrogatepass")
            size, document = document.size, next(following, None)
            values = np.full(len(content) + (document is not None), SEPARATOR, np.uint16)
            values[: len(content)] = np.frombuffer(content, np.uint8)
            yield Encoded(values, size)

    def prompt(self, text: str) -> np.ndarray:
        return np.array([SEPARATOR, *text.encode("utf-8", "surrogatepass")], np.int32)

    def stream(self) -> Callable[[int], str]:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return lambda token: decoder.decode(bytes([token])) if token < SEPARATOR else ""


class FileTokenizer:
    """A tokenizer.json, with the special tokens and the chat template that lie beside it.

    A text gets the tokens before and after it that the tokenizer's post-processor adds, and what
    tokenizer_config.json says of bos_token (where it has add_bos_token) and eos_token. A conversation gets what
    its template writes.

    Attributes:
      fingerprint: tells it from another one.
      vocab_size: the largest token + 1.
      num_bytes: of text, for each token, or None where the kind of the tokenizer does not tell.
      start: the token that begins a text, if there is one.
      end: the tokens of which any ends a text; where nothing follows a text, those that begin the next.

    Raises:
      InputError: files that cannot be read, or nothing that ends or begins a document.
    """

    def __init__(self, path: Path) -> None:
        file = path / "tokenizer.json" if path.is_dir() else path
        texts = _Texts.read(path, file)
        self.fingerprint = hashlib.sha256(repr(texts).encode()).hexdigest()
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(texts.tokenizer)
        # The library raises no narrower class.
        except Exception as error:
            raise InputError(
                f"--tokenizer {file}: a tokenizer.json of the tokenizers library ({str(error)[:200]})"
            ) from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._set_borders(path, texts.config)
        # Its work is done by _set_borders, and it moves the ends of tokens off their white space.
        self._tokenizer.post_processor = None  # pyright: ignore[reportAttributeAccessIssue]
        vocabulary = self._tokenizer.get_vocab()
        self.vocab_size = max(vocabulary.values()) + 1
        self.num_bytes: np.ndarray | None = _bytes_of_tokens(json.loads(texts.tokenizer), vocabulary)
        self._path, self._config, self._template_text = path, texts.config, texts.template
        self._template: ChatTemplate | None = None
        self._may_cut_lines = self._tokenizer.pre_tokenizer is not None and (
            self._ids("x\ny") == self._ids("x\n") + self._ids("y")
        )

    def encode(self, documents: Iterable[Document], bad: BadLines | None = None) -> Iterator[Encoded]:
        """Yields the tokens of documents, of long ones in parts.

        Raises:
          InputError: no UTF-8, or a conversation that the template has no place for, in more than the bad lines.
        """
        for parts in _groups(self._all_parts(documents, bad or BadLines())):
            encodings = self._tokenizer.encode_batch([part.text for part in parts], add_special_tokens=False)
            for part, encoding in zip(parts, encodings, strict=True):
                ids = np.asarray(encoding.ids, np.int32)
                if part.spans is not None:
                    ids = np.where(_is_inside(encoding, part.spans), ids, ~ids)
                yield Encoded(np.concatenate([part.before, ids, part.after]), part.size, part.is_start)

    def prompt(self, text: str) -> np.ndarray:
        """The tokens of a text that goes on: those before a text, and its own."""
        return np.concatenate([self._before, np.asarray(self._ids(text), np.int32)])

    def stream(self) -> Callable[[int], str]:
        """(the next token) -> the text that it completes, "" while a character is not whole; no special tokens."""
        decoder = tokenizers.decoders.DecodeStream(skip_special_tokens=True)
        return lambda token: decoder.step(self._tokenizer, token) or ""

    def _all_parts(self, documents: Iterable[Document], bad: BadLines) -> Iterator["_Part"]:
        for document in documents:
            try:
                parts = list(self._parts(document))
            except InputError as error:
                bad.skip(error)
                continue
            yield from parts

    def _parts(self, document: Document) -> Iterator["_Part"]:
        text, spans = self._text(document)
        if spans is not None:
            yield _Part(text, document.size, spans=spans)
            return
        pieces = self._pieces(text)
        for number, piece in enumerate(pieces, start=1):
            yield _Part(
                piece,
                document.size * len(piece) / len(text),
                is_start=number == 1,
                before=self._before if number == 1 else _NONE,
                after=self._after if number == len(pieces) else _NONE,
            )

    def _text(self, document: Document) -> tuple[str, list[tuple[int, int]] | None]:
        """The text and, in a conversation, the spans to learn."""
        content = document.content
        try:
            if isinstance(content, Conversation):
                text, spans = self._chat_template().render(content)
            else:
                text, spans = content if isinstance(content, str) else content.decode(), None
            text.encode()
        except UnicodeError as error:
            raise InputError(f"{document.where}: text in UTF-8, as --tokenizer needs it ({error})") from None
        except ValueError as error:
            raise InputError(f"{document.where}: with --tokenizer {self._path} {error}") from None
        return text, spans

    def _chat_template(self) -> ChatTemplate:
        if self._template is None:
            if self._template_text is None:
                raise ValueError("a chat template, in tokenizer_config.json or chat_template.jinja beside it")
            names = (name for name in self._config if name.endswith("_token"))
            constants = {name: text for name in names if (text := _content(self._config[name])) is not None}
            self._template = ChatTemplate(self._template_text, constants)
        return self._template

    def _pieces(self, text: str) -> list[str]:
        """A long text cut after ends of lines, if no token crosses them: an encoding is large and takes one core."""
        if len(text) <= _PIECE or not self._may_cut_lines:
            return [text]
        pieces, start = [], 0
        for cut in re.finditer(r"\n(?=[^\W_])", text):
            if cut.end() - start >= _PIECE:
                pieces.append(text[start : cut.end()])
                start = cut.end()
        return [*pieces, text[start:]]

    def _ids(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def _set_borders(self, path: Path, config: dict[str, Any]) -> None:
        plain, whole = self._ids("a"), self._ids("a", add_special_tokens=True)
        start = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), None)
        if start is None:
            raise InputError(f"--tokenizer {path}: a post-processor that adds tokens before and after a text only")
        before, after = whole[:start], whole[start + len(plain) :]
        bos, eos = (self._special(path, config, name) for name in ("bos_token", "eos_token"))
        if (adds_bos := config.get("add_bos_token")) is not None and bos is not None:
            before = [bos] if adds_bos else []
        if eos is not None:
            after = [eos]
        if not before and not after:
            raise InputError(f"--tokenizer {path}: an eos_token in tokenizer_config.json beside tokenizer.json")
        self._before, self._after = np.asarray(before, np.int32), np.asarray(after, np.int32)
        self.start, self.end = frozenset(before[:1]), frozenset(after or before)

    def _special(self, path: Path, config: dict[str, Any], name: str) -> int | None:
        text = _content(config.get(name))
        token = None if text is None else self._tokenizer.token_to_id(text)
        if text is not None and token is None:
            raise InputError(f"--tokenizer {path}: a vocabulary that holds the {name} {text}")
        return token


_NONE = np.zeros(0, np.int32)


@dataclasses.dataclass(frozen=True)
class _Part:
    """A text to encode at once: `size` bytes of a file, whether it begins a document, spans to learn in a conversation,
    tokens around it.
    """

    text: str
    size: float
    is_start: bool = True
    spans: Sequence[tuple[int, int]] | None = None
    before: np.ndarray = dataclasses.field(default_factory=lambda: _NONE)
    after: np.ndarray = dataclasses.field(default_factory=lambda: _NONE)


def _groups(parts: Iterable[_Part]) -> Iterator[list[_Part]]:
    """As many parts at a time as give every core work, and their encodings still room in memory."""
    group: list[_Part] = []
    length = 0
    for part in parts:
        group.append(part)
        length += len(part.text)
        if length >= _AT_ONCE:
            yield group
            group, length = [], 0
    if group:
        yield group


@dataclasses.dataclass(frozen=True)
class _Texts:
    """What the files of a tokenizer hold."""

    tokenizer: str
    config: dict[str, Any]
    template: str | None

    @classmethod
    def read(cls, path: Path, file: Path) -> "_Texts":
        config_file, template_file = (file.with_name(name) for name in ("tokenizer_config.json", "chat_template.jinja"))
        try:
            if not file.is_file():
                raise ValueError("there is none")
            config = dict(json.loads(config_file.read_text("utf-8"))) if config_file.exists() else {}
            template = template_file.read_text("utf-8") if template_file.exists() else config.get("chat_template")
            if isinstance(template, list):
                template = {entry["name"]: entry["template"] for entry in template}.get("default")
            if template is not None and not isinstance(template, str):
                raise ValueError("chat_template is no text")
            return cls(file.read_text("utf-8"), config, template)
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise InputError(
                f"--tokenizer {path}: a tokenizer.json, or a folder that holds one; its tokenizer_config.json and "
                f"chat_template.jinja readable ({error})"
            ) from None


def _content(token: Any) -> str | None:
    """The text of a special token, which is written plainly or with its properties."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _is_inside(encoding: tokenizers.Encoding, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """Which tokens have a character inside a span."""
    starts, ends = np.asarray(encoding.offsets, np.int64).reshape(-1, 2).T
    is_inside = np.zeros(len(starts), bool)
    for start, end in spans:
        is_inside |= (starts < end) & (ends > start)
    return is_inside


def _bytes_of_tokens(description: dict[str, Any], vocabulary: dict[str, int]) -> np.ndarray | None:
    """Bytes of text that each token stands for, 0 for special ones; None for other models than byte-level ones."""
    decoder = description.get("decoder") or {}
    parts = [decoder, *decoder.get("decoders", [])]
    is_byte_level = any(part.get("type") == "ByteLevel" for part in parts)
    if not is_byte_level and not any(part.get("type") == "ByteFallback" for part in parts):
        return None
    num_bytes = np.zeros(max(vocabulary.values()) + 1, np.int32)
    for text, token in vocabulary.items():
        if is_byte_level:
            num_bytes[token] = len(text)
        else:
            num_bytes[token] = 1 if re.fullmatch("<0x[0-9A-F]{2}>", text) else len(text.replace("▁", " ").encode())
    for added in description.get("added_tokens", []):
        num_bytes[added["id"]] = 0 if added["special"] else len(added["content"].encode())
    return num_bytes


Tokenizer = ByteTokenizer | FileTokenizer


def load_tokenizer(path: Path | None) -> Tokenizer:
    """The tokenizer of --tokenizer, or bytes for None."""
    return ByteTokenizer() if path is None else FileTokenizer(path)
