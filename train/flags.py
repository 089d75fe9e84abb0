"""Flags: the values of the command line that have a form of their own, and how one word becomes each of them."""

import collections
import contextlib
import dataclasses
import difflib
import io
import re
from collections.abc import Callable, Iterable, Sequence, Set
from pathlib import Path
from typing import Any

import tyro


class InputError(Exception):
    """What the user gave cannot work; the message is one line: argument, value and what is allowed."""


def perhaps(word: str, choices: Iterable[str], opening: str = ", perhaps ") -> str:
    """The end of a message: the choice that a wrong word was most likely meant to be, or nothing where none is near."""
    close = difflib.get_close_matches(word, list(choices), n=1)
    return f"{opening}{close[0]}" if close else ""


def perhaps_beside(path: Path) -> str:
    """As `perhaps`, of a path that does not exist and the names in its folder."""
    try:
        return perhaps(path.name, (other.name for other in path.parent.iterdir()))
    except OSError:
        return ""


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """Devices per axis: `data` splits the batch, `seq` each sequence, `tensor` the heads and the MLP's width.

    num_nodes: parts of the seq axis, slowest along the sequence, written seq=2x4.
    """

    data: int = 1
    seq: int = 1
    tensor: int = 1
    num_nodes: int = 1

    @property
    def num_devices(self) -> int:
        return self.data * self.seq * self.tensor

    def __str__(self) -> str:
        tensor = f",tensor={self.tensor}" if self.tensor > 1 else ""
        nodes = f"{self.num_nodes}x" if self.num_nodes > 1 else ""
        return f"data={self.data},seq={nodes}{self.seq // self.num_nodes}{tensor}"

    @classmethod
    def parse(cls, text: str) -> "MeshShape":
        form = re.compile(r"(data|seq|tensor)=(?:(?<=seq=)([1-9]\d*)x)?([1-9]\d*)")
        pairs = [form.fullmatch(part) for part in text.split(",")]
        sizes = {pair[1]: int(pair[2] or 1) * int(pair[3]) for pair in pairs if pair}
        if len(sizes) < len(pairs):
            axes = ("data", "seq", "tensor")
            unknown = next((axis for axis in re.findall(r"[^,=]+(?==)", text) if axis not in axes), "")
            raise InputError(
                f"--mesh {text}: axes data, seq and tensor, once and at least 1 each, such as data=2,seq=4"
                f"{perhaps(unknown, axes)}"
            )
        return cls(**sizes, num_nodes=next((int(pair[2]) for pair in pairs if pair and pair[2]), 1))


@dataclasses.dataclass(frozen=True)
class StepRange:
    """Steps `first` to `last`, both included, counted from 1 as the progress line counts them."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first}:{self.last}"

    def __contains__(self, step: int) -> bool:
        return self.first <= step <= self.last

    @classmethod
    def parse(cls, text: str) -> "StepRange":
        numbers = re.fullmatch(r"([1-9]\d*):(\d+)", text)
        if numbers is None or int(numbers[1]) > int(numbers[2]):
            raise InputError(f"--profile-steps {text}: FIRST:LAST with 1 <= FIRST <= LAST, such as 3:5")
        return cls(int(numbers[1]), int(numbers[2]))


@dataclasses.dataclass(frozen=True)
class SaveEvery:
    """Steps, or else seconds, between two checkpoints."""

    steps: int | None = None
    seconds: int | None = None

    def __str__(self) -> str:
        return f"{self.steps}" if self.steps else f"{self.seconds}s"

    @classmethod
    def parse(cls, text: str) -> "SaveEvery":
        found = re.fullmatch(r"([1-9]\d{0,8})([smh]?)", text)
        if found is None:
            raise InputError(f"--save-every {text}: steps such as 500, or a time such as 90s, 10m or 1h")
        if not found[2]:
            return cls(steps=int(found[1]))
        return cls(seconds=int(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]])


@dataclasses.dataclass(frozen=True)
class Source:
    """A file or folder of training data, and its share of the samples relative to the other sources."""

    path: Path
    weight: float = 1.0

    def __str__(self) -> str:
        return f"{self.path}:{self.weight:g}"

    @classmethod
    def parse(cls, text: str) -> "Source":
        whole = usable_path(text)
        path, _, weight = text.rpartition(":")
        with contextlib.suppress(ValueError):
            if path and not whole.exists() and 0 < float(weight) < float("inf"):
                return cls(Path(path), float(weight))
        return cls(whole)


def cli[Settings](
    kind: type[Settings], arguments: Sequence[str], prog: str, *nested: type, repeatable: Set[str] = frozenset()
) -> Settings:
    """Returns the settings that a command line describes; the fields of `nested` are flags too.

    Raises:
      InputError: a flag or its value is not allowed, or a flag is given twice that is not repeatable.
    """
    for flag, count in collections.Counter(given(arguments)).items():
        if count > 1 and flag not in repeatable:
            alone = f"; {', '.join(sorted(repeatable))} alone may be repeated" if repeatable else ""
            raise InputError(f"{flag}: once, found {count} times{alone}")
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            settings, unknown = tyro.cli(kind, args=arguments, prog=prog, return_unknown_args=True)
    except SystemExit as stop:
        if stop.code == 0:
            raise
        raise InputError(_message_in(complaint.getvalue())) from None
    if unknown:
        names = [flag_name(field.name) for part in (kind, *nested) for field in dataclasses.fields(part)]  # pyright: ignore
        near = perhaps(unknown[0].partition("=")[0], names)
        raise InputError(f"{unknown[0]}: a flag of this command{near or ', see --help'}")
    return settings


def without(arguments: Sequence[str], *flags: str) -> list[str]:
    """A command line without these flags, of which each has a value."""
    pairs = zip(["", *arguments], arguments, strict=False)
    return [word for before, word in pairs if before not in flags and word.partition("=")[0] not in flags]


def given(arguments: Sequence[str]) -> list[str]:
    """The flags of a command line."""
    return [flag_name(word[2:].partition("=")[0]) for word in arguments if word.startswith("--")]


def flag_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def _message_in(box: str) -> str:
    """What one of tyro's boxes says, as one line that begins with the flag."""
    rows = (row.strip(" │|╭╮╰╯+") for row in re.sub(r"\x1b\[[0-9;]*m", "", box).splitlines())
    text = " ".join(row for row in rows if row)
    if found := re.search(r"Error parsing (--[\w-]+): (.*?) [─-]{9}", text):
        return f"{found[1]} {found[2]}"
    if found := re.search(r"Missing value for argument '(--[\w-]+)'", text):
        return f"{found[1]}: a value after the flag"
    if found := re.search(r"Missing from [^:]+: ([A-Z_]+) ", text):
        return f"{found[1]}: to be given, see --help"
    return text


def parsed(parse: Callable[[str], Any], metavar: str):
    """A flag of one word: says to tyro how it becomes a value."""
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: parse(words[0]),
        is_instance=lambda _: True,
        str_from_instance=lambda value: [str(value)],
    )


def number(kind: type[int] | type[float], metavar: str, allowed: str, is_allowed: Callable[[Any], bool]):
    def parse(word: str) -> int | float:
        with contextlib.suppress(ValueError):
            if is_allowed(value := kind(word)):
                return value
        raise ValueError(f"{word}: {allowed}")

    return parsed(parse, metavar)


def choice(*choices: str):
    def parse(word: str) -> str:
        if word in choices:
            return word
        raise ValueError(f"{word}: one of {', '.join(choices)}{perhaps(word, choices, '; perhaps ')}")

    return parsed(parse, "|".join(choices))


def usable_path(word: str) -> Path:
    """A path of which can be told whether it exists."""
    if not word:
        raise ValueError("'': a path that is not empty")
    try:
        Path(word).exists()
    except OSError as error:  # too long, or in a folder that must not be looked into
        raise ValueError(f"{word}: a path that can be looked up ({error.strerror})") from None
    return Path(word)


def path(metavar: str):
    return parsed(usable_path, metavar)


def boolean(word: str) -> bool:
    if word not in ("true", "false"):
        raise ValueError(f"{word}: true or false")
    return word == "true"


def num_bytes(word: str) -> int:
    size = re.fullmatch(r"(\d+(?:\.\d+)?)(GiB|GB)", word)
    if size is None or float(size[1]) == 0:
        raise ValueError(f"{word}: a size in GiB or GB, such as 140GiB")
    return int(float(size[1]) * {"GiB": 2**30, "GB": 10**9}[size[2]])


def address(word: str) -> str:
    host, _, port = word.rpartition(":")
    if not host or not re.fullmatch(r"[1-9]\d{0,4}", port) or int(port) > 65535:
        raise ValueError(f"{word}: HOST:PORT with a port from 1 to 65535, such as 10.0.0.1:1234")
    return word


whole = number(int, "N", "a whole number from 1 to 2147483647", lambda n: 1 <= n < 2**31)
whole_or_zero = number(int, "N", "a whole number from 0 to 2147483647", lambda n: 0 <= n < 2**31)
positive = number(float, "X", "a finite number above 0", lambda x: 0 < x < float("inf"))
fraction = number(float, "X", "a number between 0 and 1", lambda x: 0 < x < 1)
at_least_zero = number(float, "X", "a finite number of at least 0", lambda x: 0 <= x < float("inf"))
