"""The quick ones of tests/drills.py, and its report."""

import pytest
from drills import DRILLS, ROOT, perform


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.mark.timeout(300)
@pytest.mark.parametrize("drill", [drill for drill in DRILLS if drill.is_quick], ids=lambda drill: drill.name)
def test_the_drill_holds(drill, shared):
    perform(drill, shared)


def test_the_report_has_every_drill():
    rows = (ROOT / "docs" / "reliability.md").read_text().splitlines()
    assert [row for row in rows if row.startswith("| ")][1:] == [
        f"| {drill.name} | {drill.done} | {drill.happened} |" for drill in DRILLS
    ]
