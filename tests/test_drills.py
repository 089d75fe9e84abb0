"""The quick ones of tests/drills.py, and its report."""

import pytest
from drills import DRILLS, perform

from tests.lab import ROOT
from train.exits import Exit


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.mark.timeout(300)
@pytest.mark.parametrize("drill", [drill for drill in DRILLS if drill.is_quick], ids=lambda drill: drill.name)
def test_the_drill_holds(drill, shared):
    perform(drill, shared)


REPORT = (ROOT / "docs" / "reliability.md").read_text().splitlines()


def test_the_report_has_every_drill():
    rows = REPORT[REPORT.index("| drill | what was done | what happened |") + 2 :]
    assert [row.split(" | ")[0] for row in rows] == [f"| {drill.name}" for drill in DRILLS]


def test_the_report_has_every_exit_code():
    first = REPORT.index("| exit code | name | what it was | what to do |") + 2
    rows = REPORT[first : REPORT.index("", first)]
    assert [row.split(" | ")[:2] for row in rows] == [[f"| {code}", code.name] for code in Exit]
