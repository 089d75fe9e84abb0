"""The pictures of a timeline, the command's errors, and the tables of docs/predictions.md."""

import json
import re
import sys

import pytest

from benchmarks import predict
from benchmarks.predict import DOCUMENT
from benchmarks.tables import update
from distflash_jax.cost import MACHINES, Shape
from distflash_jax.plot import main, text, trace
from distflash_jax.schedule import STRATEGIES, balanced
from distflash_jax.timeline import simulate

COMMAND = ["--workers", "2", "--tokens", "32768"]


def test_the_command_draws_a_line_of_each_kind_for_each_worker(capsys):
    assert main([*COMMAND, "--strategy", "balanced", "--direction", "forward"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "balanced, 2 workers, 32768 tokens, heads 32/8, forward on h200-nvlink"
    assert re.fullmatch(r"predicted: 7\.\d\d ms, efficiency 0\.9\d\d, .*", lines[1])
    kinds = ["compute", "fetch", "return"]
    assert [line.split()[-2] for line in lines[3:]] == 2 * kinds
    zero, one = lines[3].split()[-1], lines[6].split()[-1]
    assert len(zero) == 100 and re.fullmatch(r"\.{2}\+?0+\+*1+\+*2+\++", zero) and zero == one
    assert re.fullmatch(r"\.{1,2}1+\.+", lines[4].split()[-1])  # the fetch of step 1 begins at once, after the start
    assert re.fullmatch(r"\.+", lines[5].split()[-1])  # worker 0 helps, and nothing returns to it
    assert re.fullmatch(r"\.+1+\.+", lines[8].split()[-1])


def test_a_picture_and_a_trace_are_written(tmp_path, capsys):
    for name, start in (("a.png", b"\x89PNG"), ("a.json", b"{")):
        assert main([*COMMAND, "--out", str(tmp_path / name)]) == 0
        assert (tmp_path / name).read_bytes().startswith(start)
    assert capsys.readouterr().out.count("worker 0") == 2


def test_the_trace_holds_every_event_in_microseconds():
    timeline = simulate(balanced(4), Shape(32768), MACHINES["h200-nvlink"], ("forward", "backward"))
    events = json.loads(json.dumps(trace(timeline)))["traceEvents"]
    drawn = [event for event in events if event["ph"] == "X"]
    assert len(drawn) == len(timeline.events)
    assert max(event["ts"] + event["dur"] for event in drawn) == pytest.approx(1e6 * timeline.makespan)
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in drawn} <= named


@pytest.mark.parametrize(
    "words, message",
    [
        (["--workers", "0", "--tokens", "8"], "--workers 0: must be at least 1"),
        (["--workers", "2"], "the following arguments are required: --tokens"),
        ([*COMMAND, "--kv-heads", "5"], "N=32: must be a multiple of K=5"),
        ([*COMMAND, "--head-dim", "64"], "H=64: the rates of h200-nvlink are those of head dim 128"),
        ([*COMMAND, "--network", "0"], "--network 0.0: must be positive"),
        ([*COMMAND, "--workers-per-node", "1"], "--network: is missing, for 2 workers of which nodes have 1"),
        ([*COMMAND, "--strategy", "hybrid"], "--workers-per-node None: must divide --workers 2 with --strategy hybrid"),
        ([*COMMAND, "--strategy", "rsa", "--window", "9"], "--window: must be left out with --strategy rsa"),
        ([*COMMAND, "--out", "x.svg"], "--out x.svg: must end in .png or .json"),
        ([*COMMAND, "--out", "no/such/folder/x.json"], "No such file or directory: 'no/such/folder/x.json'"),
        ([*COMMAND, "--machine", "abacus"], "argument --machine: invalid choice: 'abacus'"),
    ],
)
def test_an_error_is_one_line_and_exit_code_2(words, message, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_without_matplotlib_the_error_names_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*COMMAND, "--out", "x.png"]) == 2
    assert "pip install 'distflash_jax[plot]'" in capsys.readouterr().err


def test_steps_behind_the_last_digit_begin_anew():
    timeline = simulate(balanced(80), Shape(80 * 16384), MACHINES["h200-nvlink"])
    row = next(line for line in text(timeline, width=400).splitlines() if line.startswith("worker 0"))
    assert re.search(r"y+\+*z+\+*0+", row)


def test_the_tables_of_the_docs_are_what_the_command_prints(monkeypatch):
    """Of the thousand GPUs only the first columns: the others take their time."""
    document, few = DOCUMENT.read_text(), predict.make_scaling((8, 64))
    scaling = document.split("<!-- scaling -->\n")[1].split("\n\n")[0]
    monkeypatch.setattr(predict, "make_scaling", lambda: scaling)
    assert update(document, predict.make_tables()) == document, "run python -m benchmarks.predict --write"
    for ours, theirs in zip(few.splitlines(), scaling.splitlines(), strict=True):
        assert theirs.startswith(ours.removesuffix("|"))


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "auto"])
def test_any_strategy_is_drawn_on_a_machine_that_flags_describe(strategy, tmp_path, capsys):
    flags = ["--machine", "h200-nodes", "--workers-per-node", "2", "--network", "20", "--tflops", "500"]
    words = ["--workers", "4", "--tokens", "65536", "--strategy", strategy, "--direction", "both", *flags]
    assert main([*words, "--out", str(tmp_path / "a.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{strategy}, 4 workers, 65536 tokens, heads 32/8, forward and backward on h200-nodes*"
    assert sum("compute" in line for line in lines) == 4
    assert json.loads((tmp_path / "a.json").read_text())["traceEvents"]


def test_of_many_workers_some_are_drawn(capsys):
    words = ["--workers", "256", "--tokens", str(256 * 16384), "--machine", "h200-nodes", "--strategy", "hybrid"]
    assert main(words) == 0
    shown = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("worker")]
    assert shown == [str(16 * i) for i in range(16)]
