"""What compares kernels with those of another checkout, and shares cases among GPUs."""

import argparse
import importlib
import shutil
import sys
from pathlib import Path

import pytest

from benchmarks import before, harness, kernel
from benchmarks.cases import Case, select
from pallas_kernels import Mask, xla

ROOT = Path(__file__).parent.parent


def test_kernels_of_another_checkout_are_timed_beside_those_here(tmp_path):
    shutil.copytree(ROOT / "pallas_kernels", tmp_path / "pallas_kernels")
    path = tmp_path / "pallas_kernels/xla.py"
    path.write_text(path.read_text() + "\nATTENTION = BlockAttention(lambda *arguments: arguments, backward)\n")
    found = before.load(tmp_path, kernel.IMPLEMENTATIONS)
    assert found.keys() == {name + before.SUFFIX for name in kernel.IMPLEMENTATIONS}
    case = Case(24, 4, 2, 64, is_causal=True)
    inputs = kernel.random_inputs(case)
    operands = kernel.operands(case, inputs, inputs.q)
    queries, _, mask, scale = found["xla_before"].forward(*operands, 0.1)
    assert (queries.box, mask.is_causal, scale) == (operands[0].box, True, 0.1)
    assert type(mask).__name__ == "Mask" and type(mask) is not Mask
    assert importlib.import_module("pallas_kernels.xla") is xla and str(tmp_path) not in sys.path
    with pytest.raises(ValueError, match="must be a checkout with pallas_kernels/"):
        before.load(tmp_path / "nowhere", [])
    with pytest.raises(ValueError, match=r"has no implementation 'newer', only \['hopper', 'triton', 'xla'\]"):
        before.load(tmp_path, ["newer"])


@pytest.mark.parametrize("visible, count", [("", 0), ("1", 1), ("0,3", 2)])
def test_only_gpus_that_are_visible_are_counted(visible, count, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert harness.count_gpus() == count


def test_parts_of_the_cases_are_all_of_them():
    cases = select(["*_d64_*"])
    parts = [kernel.Part.parse(f"{i}/3").of(cases) for i in range(3)]
    assert sorted(case.name for part in parts for case in part) == sorted(case.name for case in cases)
    with pytest.raises(argparse.ArgumentTypeError, match=r"3/3: must be I/N with I below N"):
        kernel.Part.parse("3/3")
