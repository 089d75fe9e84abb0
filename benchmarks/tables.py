"""Tables of Markdown, and documents that hold them behind marks such as <!-- scaling -->."""

import argparse
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]], num_words: int) -> str:
    """A table of which so many columns are words and the others numbers."""
    rule = ["---"] * num_words + ["--:"] * (len(header) - num_words)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *lines))


def update(document: str, tables: Mapping[str, str]) -> str:
    """The document with these tables behind the marks of their names.

    Raises:
        ValueError: a mark is missing, or there more than once.
    """
    for name, table in tables.items():
        document, count = re.subn(rf"(<!-- {name} -->\n)(\|.*\n)*", rf"\1{table}\n", document)
        if count != 1:
            raise ValueError(f"<!-- {name} -->: must be in the document once, found {count} times")
    return document


def command(description: str | None, path: Path, make_tables: Callable[[], Mapping[str, str]]) -> bool:
    """Prints the tables, or with --write puts them into the document; whether it wrote."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"put them into docs/{path.name}")
    is_written, tables = parser.parse_args().write, make_tables()
    if is_written:
        path.write_text(update(path.read_text(), tables))
    else:
        print("\n\n".join(f"<!-- {name} -->\n{table}" for name, table in tables.items()))
    return is_written
