"""train.saving: when a run saves, that a failure is known after the next step, and that no end is lost in silence."""

import os
import signal
import time

import jax.numpy as jnp
import numpy as np
import pytest

from train import distributed, saving
from train.checkpoint import Checkpoints
from train.exits import Exit, Stop
from train.flags import SaveEvery, without
from train.interrupt import Interrupt
from train.report import Clock, Pace
from train.saving import Saver


@pytest.fixture
def said(monkeypatch):
    lines = []
    monkeypatch.setattr(saving, "say", lines.append)
    return lines


@pytest.fixture
def break_disk(monkeypatch):
    """Makes every save fail, or none."""
    return lambda is_broken: monkeypatch.setenv("FAULT", "save,raise" if is_broken else "")


@pytest.fixture
def run(tmp_path, said):
    """Makes (saver, step: takes one more), whose checkpoints are in `tmp_path`."""
    disk = Checkpoints(tmp_path / "checkpoints", keep=2)
    with Interrupt(lambda: None, tmp_path / "SAVE") as interrupt:

        def make(every, start=0):
            saver = Saver(disk, SaveEvery.parse(every), interrupt, Pace(Clock()), step=start)
            return saver, lambda step: saver.after_step(step, {"x": jnp.arange(4.0) + step}, {"next": step})

        make.disk = disk
        yield make


def wait(disk):
    if disk.pending:
        disk.pending.exception()


def steps(tmp_path):
    return sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir())


def test_it_saves_every_so_many_steps_and_tells_the_checksum_of_what_is_whole(run, said, tmp_path):
    saver, after = run("2")
    for step in range(6):
        assert not after(step)
        wait(run.disk)
    assert steps(tmp_path) == [2, 4]
    assert [line.split(":")[0] for line in said] == ["checkpoint 2", "checkpoint 4"]
    saver.finish(5, {"x": jnp.arange(4.0) + 5}, {"next": 5})
    assert steps(tmp_path) == [4, 5], "two are kept"
    assert said[-1].startswith("checkpoint 5: state ") and len(said[-1].split()[-1]) == 16


def test_it_saves_after_a_time_whatever_the_steps(run, monkeypatch, tmp_path):
    now = time.monotonic()
    monkeypatch.setattr(saving.time, "monotonic", lambda: now)
    _, after = run("1m")
    for step in range(1, 8):
        after(step)
        wait(run.disk)
        now += 25
    assert steps(tmp_path) == [4, 7]


@pytest.mark.parametrize("how", ["signal", "file"])
def test_who_asks_gets_a_checkpoint_after_this_step_and_no_more(run, how, tmp_path):
    _, after = run("1h")
    after(1)
    assert not (tmp_path / "checkpoints").exists()
    if how == "file":
        (tmp_path / "SAVE").touch()
    else:
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.1)
    for step in (2, 3):
        assert not after(step)
        wait(run.disk)
    assert steps(tmp_path) == [2] and not (tmp_path / "SAVE").exists()


def test_a_failure_is_told_after_the_next_step_and_the_next_save_tries_again(run, said, break_disk):
    _, after = run("2")
    break_disk(True)
    after(2)
    wait(run.disk)
    after(3)
    assert len(said) == 1 and "checkpoint 2 was not saved (FaultError: asked for by FAULT)" in said[0]
    break_disk(False)
    after(4)
    wait(run.disk)
    after(5)
    assert said[-1].startswith("checkpoint 4: state")


def test_three_failures_in_a_row_end_the_run_with_a_code_of_their_own(run, said, break_disk):
    _, after = run("1")
    break_disk(True)
    with pytest.raises(Stop, match=r"checkpoint 3 was not saved .*, nor were the 2 before it") as stop:
        for step in range(1, 9):
            after(step)
            wait(run.disk)
    assert stop.value.code == Exit.SAVE_FAILED
    assert len(said) == 2


def test_the_end_is_tried_again_and_never_lost_in_silence(run, said, break_disk, monkeypatch):
    saver, after = run("2")
    break_disk(True)
    after(4)
    with pytest.raises(Stop, match="checkpoint 4 was not saved"):
        saver.finish(4, {"x": jnp.arange(4.0)}, {})
    saver, _ = run("2")
    monkeypatch.setattr(saving, "say", lambda line: break_disk(False))
    saver.finish(4, {"x": jnp.arange(4.0)}, {})


def test_a_save_is_over_for_no_process_before_it_is_for_all(run, said, monkeypatch):
    """Who is done earlier would not take part where the other one waits for the end of its save."""
    _, after = run("2")
    is_going_on_elsewhere = True

    def of_all(*own):
        stop, due, failed, _, seconds = own
        return np.array([own, [stop, due, failed, is_going_on_elsewhere, seconds]], np.float32)

    monkeypatch.setattr(distributed, "of_all", of_all)
    after(2)
    wait(run.disk)
    after(3)
    assert run.disk.pending is not None and said == []
    is_going_on_elsewhere = False
    after(3)
    assert run.disk.pending is None and len(said) == 1 and said[0].startswith("checkpoint 2: state ")


def test_nothing_new_is_nothing_to_save(run, tmp_path):
    saver, _ = run("2", start=3)
    saver.finish(3, {"x": jnp.arange(4.0)}, {})
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize("text, seconds", [("90s", 90), ("10m", 600), ("1h", 3600)])
def test_a_time_is_read(text, seconds):
    assert SaveEvery.parse(text) == SaveEvery(seconds=seconds)
    assert SaveEvery.parse(str(SaveEvery.parse(text))) == SaveEvery(seconds=seconds)
    assert str(SaveEvery.parse("500")) == "500"


def test_the_command_that_resumes_does_not_go_back_again():
    words = ["a", "--checkpoint", "4", "--steps", "5", "--checkpoint=4"]
    assert without(words, "--checkpoint") == ["a", "--steps", "5"]
