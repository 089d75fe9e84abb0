"""train.checks: what a run says of numbers that are wrong, and when it ends."""

import pytest

from train.checks import BadSteps
from train.exits import Exit, Stop

GOOD = {"is_finite": True, "loss": 2.0, "grad_norm": 1.0}
BAD = {"is_finite": False, "loss": float("nan"), "grad_norm": float("inf")}


def test_bad_steps_name_their_batch_and_end_the_run_only_in_a_row(capsys):
    steps = BadSteps(3)
    for number, metrics in enumerate([BAD, BAD, GOOD, BAD, BAD], start=1):
        steps.check(number, metrics, "rows 7, 3 of a.txt")
    said = capsys.readouterr().err.splitlines()
    assert [line.split()[:3] for line in said] == [["warning", "step", str(step)] for step in (1, 2, 4, 5)]
    assert said[0].endswith("changed nothing; its batch: rows 7, 3 of a.txt")
    with pytest.raises(
        Stop, match=r"step 6 has the loss nan .* norm inf, .* rows 5 of b; that makes 3 in a row"
    ) as stop:
        steps.check(6, BAD, "rows 5 of b")
    assert stop.value.code == Exit.NOT_FINITE
