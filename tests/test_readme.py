"""What README.md and docs/ say is so: snippets run, tables are current, the map is the tree, links lead somewhere."""

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cases import KERNEL
from benchmarks.harness import newest_rows
from benchmarks.kernel import make_table
from distflash_jax.schedule import balanced

ROOT = Path(__file__).parent.parent
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]}
README, SPEED = PAGES["README.md"], PAGES["docs/speed.md"]


def run_snippets(page: str) -> dict[str, Any]:
    """What the snippets of a page leave behind, run one after the other."""
    namespace: dict[str, Any] = {}
    for snippet in re.findall(r"```python\n(.*?)```", PAGES[page], flags=re.DOTALL):
        exec(snippet, namespace)
    return namespace


def test_the_readmes_snippets_run_in_their_order():
    names = run_snippets("README.md")
    assert {names[x].shape for x in ("out", "packed", "composed", "gradient")} == {names["q"].shape}
    assert names["y"].shape == names["z"].shape == names["x"].shape


def test_the_strategies_snippets_run_in_their_order():
    names = run_snippets("docs/strategies.md")
    assert names["out"].shape == names["q"].shape


def test_no_other_page_has_snippets():
    assert {page for page, text in PAGES.items() if "```python" in text} == {"README.md", "docs/strategies.md"}


def test_the_table_is_the_schedules():
    assert re.search(r"<!-- balanced\(8\) -->\n```\n(.*?)\n```", README, flags=re.DOTALL)[1] == str(balanced(8))


def test_the_map_names_every_module_and_nothing_else():
    rows = PAGES["docs/map.md"]
    named = {name for name in re.findall(r"`([\w/]+\.py)`", rows) if "/" in name}
    for room in ("models", "train"):
        line = next(line for line in rows.splitlines() if line.startswith(f"| `{room}/`"))
        named |= {f"{room}/{name}" for name in re.findall(r"`(\w+\.py)`", line)}
    rooms = ("distflash_jax", "pallas_kernels", "models", "train")
    files = {str(path.relative_to(ROOT)) for room in rooms for path in (ROOT / room).glob("*.py")}
    assert named == {name for name in files if not name.endswith("__init__.py")}


def kernel_table(text: str) -> str:
    return text[text.index("<!-- kernel.csv -->") :].split("\n\n")[0].partition("\n")[2]


def test_the_kernel_tables_are_those_of_the_newest_rows():
    rows = newest_rows(ROOT / "benchmarks/results/kernel.csv")
    names = re.findall(r"^\| (\d+k_\w+) \|", kernel_table(README), flags=re.MULTILINE)
    assert names and kernel_table(README) == make_table(rows, [KERNEL[name] for name in names])
    assert kernel_table(SPEED) == make_table(rows, KERNEL.values())


def test_the_pitch_quotes_the_kernel_table():
    cells = re.search(r"^\| 64k_d128_mha_causal \|(.*)$", kernel_table(README), flags=re.MULTILINE)[1].split("|")
    pitch = re.search(r"(\d+) TFLOP/s forward and (\d+) backward, where cuDNN reaches (\d+) and (\d+)", README)
    assert pitch and pitch.groups() == tuple(cells[i].strip() for i in (0, 5, 1, 6))


def anchors(text: str) -> set[str]:
    """What GitHub calls the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_lead_to_a_file_and_a_heading(page):
    links = re.findall(r"\]\(([^)\s]+)\)", PAGES[page])
    for link in (link for link in links if not re.match(r"\w+:", link)):
        path, _, anchor = link.partition("#")
        target = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link
