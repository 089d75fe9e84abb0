"""docs/tour.ipynb: a notebook whose cells run in their order, and whose table is the schedule's."""

import json
import os
import subprocess
import sys
from pathlib import Path

from distflash_jax.schedule import balanced

ROOT = Path(__file__).parent.parent
NOTEBOOK = json.loads((ROOT / "docs" / "tour.ipynb").read_text())
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_it_is_a_notebook_whose_cells_were_run_in_their_order():
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in NOTEBOOK["cells"]]
    assert len(set(ids)) == len(ids)
    assert [cell["execution_count"] for cell in CODE] == list(range(1, len(CODE) + 1))
    assert not any(output["output_type"] == "error" for cell in CODE for output in cell["outputs"])
    shown = "".join(text for cell in CODE for output in cell["outputs"] for text in output.get("text", []))
    assert str(balanced(8)) in shown


def test_the_cells_run():
    script = "\n\n".join("".join(cell["source"]) for cell in CODE)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "error", "-c", script]
    said = subprocess.run(command, env=environment, cwd=ROOT / "docs", capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    assert "step 5: loss" in said.stdout
    assert "8 workers" in said.stdout
