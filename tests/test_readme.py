"""What README.md says is so: its snippets run, its table is the schedule's, its map is the tree."""

import csv
import re
from pathlib import Path

from distflash_jax.schedule import balanced

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_snippets_run_in_their_order():
    namespace: dict[str, object] = {}
    for snippet in re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL):
        exec(snippet, namespace)
    assert namespace["out"].shape == namespace["gradient"].shape == namespace["q"].shape
    assert namespace["y"].shape == namespace["z"].shape == namespace["x"].shape


def test_the_table_is_the_schedules():
    assert re.search(r"<!-- balanced\(8\) -->\n```\n(.*?)\n```", README, flags=re.DOTALL)[1] == str(balanced(8))


def test_the_map_names_every_module_and_nothing_else():
    rows = README[README.index("## Map") : README.index("## Limits")]
    named = {name for name in re.findall(r"`([\w/]+\.py)`", rows) if "/" in name}
    for room in ("models", "train"):
        line = next(line for line in rows.splitlines() if line.startswith(f"| `{room}/`"))
        named |= {f"{room}/{name}" for name in re.findall(r"`(\w+\.py)`", line)}
    rooms = ("distflash_jax", "pallas_kernels", "models", "train")
    files = {str(path.relative_to(ROOT)) for room in rooms for path in (ROOT / room).glob("*.py")}
    assert named == {name for name in files if not name.endswith("__init__.py")}


def test_the_numbers_of_the_kernel_table_have_their_rows():
    with (ROOT / "benchmarks/results/kernel.csv").open() as file:
        rows = {(r["case"], r["mode"], r["implementation"]): float(r["p50"]) for r in csv.DictReader(file)}
    table = README[README.index("<!-- kernel.csv -->") :].split("\n\n")[0].splitlines()[3:]
    columns = [("forward", "hopper"), ("forward", "cudnn"), ("backward", "hopper"), ("backward", "cudnn")]
    for line in table:
        case, *numbers = (cell.strip() for cell in line.strip("|").split("|"))
        assert [int(number) for number in numbers] == [round(rows[case, *column]) for column in columns], case
