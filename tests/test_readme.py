"""What README.md says is so: its snippets run, its table is the schedule's, its map is the tree."""

import re
from pathlib import Path

from benchmarks.cases import KERNEL
from benchmarks.harness import newest_rows
from benchmarks.kernel import make_table
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


def test_the_kernel_table_is_that_of_the_newest_rows():
    rows = newest_rows(ROOT / "benchmarks/results/kernel.csv")
    table = README[README.index("<!-- kernel.csv -->") :].split("\n\n")[0].partition("\n")[2]
    names = re.findall(r"^\| (\d+k_\w+) \|", table, flags=re.MULTILINE)
    assert names and table == make_table(rows, [KERNEL[name] for name in names])
