"""train.watchdog: what is stuck ends, and what is merely long does not."""

import time

import pytest

from train.exits import Exit
from train.report import Clock
from train.watchdog import Watchdog


@pytest.fixture
def watched(capfd):
    """Runs something under a watchdog of 0.1 s with 50 ticks in it; returns what that ended with, if anything."""

    def run(action, clock=None, seconds=0.1):
        clock = clock or Clock()
        ended = []
        with Watchdog(clock, seconds, tick=0.002, end=ended.append):
            action(clock)
        return ended

    return run


@pytest.fixture
def stuck_in(capfd):
    """Stays in a phase, after a step, until the watchdog ends it; returns what it ended with."""

    def run(phase):
        clock, ended = Clock(), []
        wait(clock, "step", 0)
        with Watchdog(clock, 0.1, tick=0.002, end=ended.append), clock.phase(phase):
            for _ in range(3000):
                if ended:
                    return ended[0]
                time.sleep(0.01)
        raise AssertionError(phase)

    return run


def wait(clock, phase, seconds):
    with clock.phase(phase):
        time.sleep(seconds)


def test_a_step_that_never_ends_is_ended_with_the_stacks_of_all_threads(stuck_in, capfd):
    stop = stuck_in("step")
    assert stop.code == Exit.STUCK
    assert "in the phase step" in str(stop) and "--stuck-after" in str(stop)
    stacks = capfd.readouterr().err
    assert "in _watch" in stacks and "in run" in stacks


def test_waiting_for_data_or_others_is_limited_as_a_step_is(stuck_in):
    for phase in ("data", "wait", "other"):
        assert f"in the phase {phase}" in str(stuck_in(phase))


def test_compilations_saves_and_the_first_step_may_take_longer(watched):
    for phase in ("compile", "restore", "save", "evaluate", "step"):
        assert not watched(lambda clock, phase=phase: wait(clock, phase, 0.3)), phase


def test_phases_that_change_are_no_standstill_and_zero_watches_nothing(watched):
    clock = Clock()
    wait(clock, "step", 0)

    def many(clock):
        for _ in range(20):
            wait(clock, "step", 0.02)

    assert not watched(many, clock)
    assert not watched(lambda clock: wait(clock, "step", 0.3), clock, seconds=0)


def test_the_limit_follows_the_last_steps():
    now = [0]
    clock = Clock(now=lambda: now[0])
    watchdog = Watchdog(clock, 60)
    assert watchdog.limit("step") == 3600 and watchdog.limit("compile") == 3600 and watchdog.limit("save") == 1800
    for seconds in (1, 1, 1):
        with clock.phase("step"):
            now[0] += seconds * 10**9
    assert watchdog.limit("step") == 60
    for _ in range(20):
        with clock.phase("step"):
            now[0] += 100 * 10**9
    assert watchdog.limit("step") == watchdog.limit("data") == 500
