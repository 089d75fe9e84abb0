"""train.report and train.sinks: where the time went, what a step tells, and who else is told."""

import json
import resource
import sys
import types
from importlib.machinery import ModuleSpec

import jax
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from train import distributed, llama, loop, plan, sinks
from train.config import parse
from train.flags import InputError
from train.report import Clock, Pace, Report
from train.sinks import TensorBoard, Tracker

SMALL = [
    *("--mesh", "seq=2", "--seq-len", "32", "--hidden-size", "16", "--intermediate-size", "16", "--head-dim", "8"),
    *("--num-hidden-layers", "1", "--num-attention-heads", "2", "--num-key-value-heads", "1", "--data", "README.md"),
]


class Time:
    """A clock that stands still unless it is told to go on, in nanoseconds."""

    def __init__(self):
        self.now = 7

    def __call__(self):
        return self.now

    def pass_by(self, seconds):
        self.now += int(seconds * 1e9)


class Recorder:
    """A sink."""

    def __init__(self):
        self.calls, self.is_closed = [], False

    def scalars(self, step, values):
        self.calls.append((step, values))

    def close(self):
        self.is_closed = True


def test_a_phase_inside_another_is_no_part_of_it_and_the_rest_is_other():
    time = Time()
    clock = Clock(time)
    time.pass_by(1)
    with clock.phase("evaluate"):
        time.pass_by(2)
        with clock.phase("data"):
            time.pass_by(4)
        time.pass_by(8)
    seconds = {phase: spent / 10**9 for phase, spent in clock.spent.items() if spent}
    assert seconds == {"evaluate": 10, "data": 4, "other": 1}


def test_phases_make_up_the_time_exactly_even_where_one_ends_in_an_error():
    ticks = np.cumsum(np.random.default_rng(0).integers(1, 10**9, 1000)).tolist()
    readings = iter(ticks)
    clock = Clock(lambda: next(readings))
    for phase in ("compile", "step", "save", "step"):
        with pytest.raises(KeyError), clock.phase("data"), clock.phase(phase):
            raise KeyError
    spent = clock.spent
    assert sum(spent.values()) == ticks[ticks.index(next(readings)) - 1] - ticks[0]


def test_the_slowest_process_is_the_one_that_the_others_waited_for(monkeypatch):
    time = Time()
    clock = Clock(time)
    pace = Pace(clock)
    told = []

    def of_all(stop, seconds):
        told.append(seconds)
        time.pass_by(7)  # the others are late
        return np.array([[0, 0.5], [1, 9], [stop, seconds]])

    monkeypatch.setattr(distributed, "of_all", of_all)
    for _ in range(2):
        with clock.phase("data"):
            time.pass_by(2)
        with clock.phase("step"):
            time.pass_by(4)
        assert pace.any_of(False) == [True]
    assert told == [2, 2]
    figures = {"min": 0.5, "median": 2.0, "max": 9.0}
    assert pace.metrics == {f"own_seconds_{name}": value for name, value in figures.items()} | {"slowest_process": 1}


def test_a_step_tells_its_seconds_what_it_waited_and_how_much_of_the_peak_it_used(capsys):
    time, sink = Time(), Recorder()
    clock = Clock(time)
    with Report(clock, [sink], first_step=1, num_steps=3, ideal_seconds=1.0) as report:
        for step in (1, 2):
            with clock.phase("data"):
                time.pass_by(0.5)
            with clock.phase("step"):
                time.pass_by(2)
            report.step(step, {"loss": 3.0, "num_tokens": 100, "peak_memory_gib": 1.5})
            with clock.phase("save"):
                time.pass_by(50)
    assert report.save_seconds == 50, "the last one held up no step"
    assert sink.is_closed
    assert [step for step, _ in sink.calls] == [1, 2]
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    expected = {"step_seconds": 2.0, "data_seconds": 0.5, "tokens_per_second": 40.0, "utilisation": 0.4}
    expected |= {"save_seconds": 50.0}
    assert line == {"step": 2, "loss": 3.0, "num_tokens": 100, "peak_memory_gib": 1.5, "seconds_left": 2.5} | expected
    assert sink.calls[1][1].items() == {k: v for k, v in line.items() if k not in ("step", "seconds_left")}.items()
    assert report.summary == "loss 3.000 -> 3.000 (mean of the last 2 of 2 steps), 40 tokens/s"


def test_no_utilisation_is_told_where_no_peak_is_known(capsys):
    clock = Clock()
    with Report(clock, [], first_step=1, num_steps=1, ideal_seconds=None) as report:
        with clock.phase("step"):
            pass
        report.step(1, {"loss": 3.0, "num_tokens": 100})
    assert "utilisation" not in capsys.readouterr().out


def test_utilisation_is_of_the_models_flops_in_bfloat16():
    config = parse([*SMALL, "--dtype", "bfloat16"])
    assert plan.ideal_seconds(config, mesh_of(2, "cpu")) is None
    ideal = plan.ideal_seconds(config, mesh_of(2, "NVIDIA H200"))
    dense, attention = plan.step_flops(config.llama, batch_size=4, seq_len=32)
    assert ideal * 2 * 989e12 == pytest.approx(dense + attention)
    assert plan.ideal_seconds(parse([*SMALL, "--dtype", "float32"]), mesh_of(2, "NVIDIA H200")) is None


def mesh_of(size, kind):
    device = types.SimpleNamespace(device_kind=kind)
    return types.SimpleNamespace(size=size, devices=np.array([device] * size))


def test_tensorboard_has_the_settings_and_the_schedule_as_text_and_picture(tmp_path):
    config = parse([*SMALL, "--strategy", "ring"])
    board = TensorBoard(tmp_path, first_step=1)
    board.describe({"lr": 0.25}, loop._timeline(config))
    board.scalars(1, {"utilisation": 0.5})
    board.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.value for event in events.Scalars("utilisation")] == [0.5]
    texts = [events.Tensors(f"{name}/text_summary")[0].tensor_proto.string_val[0] for name in ("config", "schedule")]
    assert b'"lr": 0.25' in texts[0]
    assert b"ring, 2 workers, 8192 tokens" in texts[1]
    assert b"    step 0  q0.k0" in texts[1]
    assert loop._timeline(parse([*SMALL, "--strategy", "ulysses"])) is None, "no table to draw"
    assert events.Images("schedule")[0].encoded_image_string.startswith(b"\x89PNG")


def curve(run_dir):
    events = EventAccumulator(str(run_dir))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars("loss")]


def test_curves_are_in_order_and_on_disk_whatever_the_clock_says(tmp_path, monkeypatch):
    for clock, steps in ((2e9, [1, 2, 3]), (1e9, [3, 4]), (1e9, [4, 5])):
        monkeypatch.setattr(sinks.time, "time", lambda clock=clock: clock)
        board = TensorBoard(tmp_path, first_step=steps[0])
        for step in steps:
            board.scalars(step, {"loss": clock})
        assert curve(tmp_path)[-1] == (steps[-1], clock), "before it is closed"
        board.close()
    assert curve(tmp_path) == [(1, 2e9), (2, 2e9), (3, 1e9), (4, 1e9), (5, 1e9)]


def test_curves_go_on_once_a_full_disk_has_room_again(tmp_path, capsys):
    board = TensorBoard(tmp_path, first_step=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for step in range(1, 400):
        resource.setrlimit(resource.RLIMIT_FSIZE, (3001 if 20 < step < 300 else limits[0], limits[1]))
        board.scalars(step, {"loss": step})
    board.close()
    assert [step for step, _ in curve(tmp_path)] == list(range(1, 400))
    assert capsys.readouterr().err == "warning   scalars are missing in TensorBoard's files (File too large)\n"


@pytest.fixture
def stub(monkeypatch):
    """A package of a name that records the calls to it."""

    def install(name):
        module, calls = types.ModuleType(name), []
        module.__spec__ = ModuleSpec(name, None)
        module.init = lambda **given: (print("started"), calls.append(("init", given)))
        module.log = lambda values, step: calls.append(("log", step, values))
        module.finish = lambda: (print("ended"), calls.append(("finish",)))
        monkeypatch.setitem(sys.modules, name, module)
        return module, calls

    return install


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_has_a_run_for_each_session_and_prints_nothing_between_json(stub, tmp_path, name, capsys):
    _, calls = stub(name)
    assert parse(["--log", name]).log == name
    tracker = Tracker(name, tmp_path / "run", first_step=5, settings={"lr": 1})
    tracker.scalars(5, {"loss": 2.0})
    tracker.close()
    (_, given), *rest = calls
    place = {"dir": str(tmp_path / "run")} if name == "wandb" else {}
    named = {"project": "distflash_jax", "group": "run", "name": "run-from-5", "config": {"lr": 1}}
    assert given == named | place
    assert rest == [("log", 5, {"loss": 2.0}), ("finish",)]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_that_is_not_installed_is_refused_with_its_extra(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError, match=rf"--log {name}: an installed package, pip install 'distflash_jax\[{name}\]'"):
        parse(["--log", name])


def test_the_project_of_a_tracker_is_that_of_its_variable(stub, tmp_path, monkeypatch):
    _, calls = stub("wandb")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    Tracker("wandb", tmp_path, first_step=1, settings={})
    assert calls[0][1]["project"] == "mine"


def test_a_run_compiles_once_tells_all_sinks_and_accounts_for_its_time(stub, tmp_path, monkeypatch, capsys, caplog):
    module, calls = stub("trackio")
    monkeypatch.setattr(loop, "make_mesh", lambda shape, _: devices_of(shape))
    monkeypatch.setattr(loop.xla_flags, "apply", lambda flags: None)
    monkeypatch.setattr(loop, "ideal_seconds", lambda config, mesh: 1e-9)
    monkeypatch.setattr(loop, "peak_memory", lambda mesh: 2**29)
    run_dir = tmp_path / "run"
    command = [*SMALL, "--run-dir", str(run_dir), "--eval-fraction", "0.1", "--log", "trackio"]
    with jax.log_compiles():
        assert llama.main([*command, "--steps", "2"]) == 0
    # The initial state, the step, the checksum, and the losses of the evaluation: of whole rows, and of their pieces.
    compiled = [message.split()[1] for message in caplog.messages if message.startswith("Compiling jit(")]
    assert [compiled.count(f"jit({name})") for name in ("init", "step", "sums", "token_losses_of")] == [1, 1, 1, 2]
    out, err = capsys.readouterr()
    lines = [json.loads(line) for line in out.splitlines()]
    logged = {(call[1], name) for call in calls if call[0] == "log" for name in call[2]}
    wanted = ("loss", "utilisation", "step_seconds", "data_seconds", "peak_memory_gib")
    assert {(step, name) for step in (1, 2) for name in wanted} | {(2, "eval_loss")} <= logged
    assert 0 < lines[0]["utilisation"] < 1 and lines[0]["peak_memory_gib"] == 0.5
    times = json.loads((run_dir / "time.jsonl").read_text())
    phases = ("compile", "restore", "data", "step", "save", "evaluate", "wait", "other")
    assert times["total"] == pytest.approx(sum(times[phase] for phase in phases))
    assert min(times[phase] for phase in phases) > 0
    assert f"time      {times['total']:.1f} s: compile {times['compile']:.1f}, restore" in err
    assert times["step"] == pytest.approx(sum(line.get("step_seconds", 0) for line in lines))
    # Nobody is logged in: the next session ends before it compiles.
    monkeypatch.setattr(loop, "_compile", None)
    monkeypatch.setattr(module, "init", lambda **_: 1 / 0)
    assert llama.main([*command, "--steps", "3"]) == 2
    assert capsys.readouterr().err.endswith("error: --log trackio: a trackio that starts (division by zero)\n")


def devices_of(shape):
    sizes = (shape.data, shape.seq, shape.tensor)
    axis_types, devices = (jax.sharding.AxisType.Auto,) * 3, jax.devices()[: shape.num_devices]
    return jax.make_mesh(sizes, ("data", "seq", "tensor"), axis_types=axis_types, devices=devices)
