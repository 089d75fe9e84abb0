"""The training command as a user runs it: a child process, at a size that compiles in seconds."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "train.llama"]
SMALL = [
    *("--platform", "cpu", "--seq-len", "32", "--hidden-size", "16", "--intermediate-size", "16"),
    *("--num-hidden-layers", "1", "--num-attention-heads", "2", "--num-key-value-heads", "1"),
    *("--head-dim", "8", "--warmup-steps", "2"),
]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Starts the command on a text of its own; a program is compiled once for all tests of this file, and drills."""
    folder = tmp_path_factory.mktemp("train")
    text = folder / "text.txt"
    text.write_bytes(Path(subprocess.__file__).read_bytes())
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.getbasetemp() / "shared" / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }

    def start(run_dir: Path, *arguments: str, mesh: str = "seq=2") -> subprocess.Popen:
        flags = [*SMALL, "--data", str(text), "--mesh", mesh, "--run-dir", str(run_dir), *arguments]
        return subprocess.Popen(
            [*COMMAND, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | cache,
            cwd=Path(__file__).parent.parent,
        )

    return start


@pytest.fixture(scope="module")
def train(start):
    """Runs the command to its end; returns its JSON lines and what it said."""

    def train(run_dir: Path, *arguments: str, mesh: str = "seq=2") -> tuple[list[dict], str]:
        child = start(run_dir, *arguments, mesh=mesh)
        out, err = child.communicate(timeout=110)
        assert child.returncode == 0, err
        return [json.loads(line) for line in out.splitlines()], err

    return train


@pytest.fixture(scope="module")
def undisturbed(train, tmp_path_factory):
    """Eight steps without a pause, with a profile of steps 3 to 4: (lines, what it said, run-dir)."""
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    return *train(run_dir, "--steps", "8", "--profile-steps", "3:4"), run_dir


def losses(lines: list[dict]) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in lines}


def test_a_run_tells_its_setting_each_step_and_where_to_look(undisturbed):
    lines, said, run_dir = undisturbed
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert {"loss", "num_tokens", "grad_norm", "learning_rate", "tokens_per_second", "seconds_left"} <= lines[0].keys()
    assert lines[0]["num_tokens"] == 4 * 31
    for fact in (
        "2 virtual CPU device(s)",
        "data=1,seq=2",
        "float32",
        "balanced",
        "remat attention",
        "of parameters and optimizer on a device, one part of 2.00",
        "kernel    xla: for every platform; hopper needs a GPU, got cpu; triton needs a GPU, got cpu",
        str(run_dir),
    ):
        assert fact in said
    assert f"loss {lines[0]['loss']:.3f} -> " in said
    assert f"tensorboard --logdir {run_dir}" in said


def test_a_run_dir_holds_config_scalars_checkpoint_and_profile(undisturbed):
    run_dir = undisturbed[2]
    assert json.loads((run_dir / "config.json").read_text())["dtype"] == "float32"
    assert list(run_dir.glob("events.out.tfevents.*"))
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["8"]
    assert list(run_dir.glob("plugins/profile/*/*.xplane.pb"))


def test_a_finished_run_says_so_and_more_steps_continue_it_exactly(undisturbed, train, tmp_path):
    run_dir = tmp_path / "run"
    first, _ = train(run_dir, "--steps", "3")
    again, said = train(run_dir, "--steps", "3")
    assert again == []
    assert "a larger --steps continues" in said
    second, said = train(run_dir, "--steps", "8")
    assert "resuming after step 3" in said
    assert losses(first) | losses(second) == losses(undisturbed[0])
    sessions = [json.loads(line) for line in (run_dir / "time.jsonl").read_text().splitlines()]
    assert [(session["first_step"], session["last_step"]) for session in sessions] == [(1, 3), (4, 8)]


def test_ctrl_c_saves_and_the_same_command_resumes_bitwise(undisturbed, train, tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    monkeypatch.setenv("FAULT", "step@4,int")
    stopped, said = train(run_dir, "--steps", "8")
    last = stopped[-1]["step"]
    assert f"stopped after step {last} of 8; to resume: python -m train.llama --platform cpu" in said
    monkeypatch.delenv("FAULT")
    resumed, said = train(run_dir, "--steps", "8")
    assert f"resuming after step {last}: state " in said
    assert losses(stopped) | losses(resumed) == losses(undisturbed[0])
    checksums = [[line for line in text.splitlines() if "checkpoint 8: " in line] for text in (said, undisturbed[1])]
    assert checksums[0] == checksums[1] and len(checksums[0]) == 1


def test_a_second_signal_leaves_at_once(start, tmp_path):
    child = start(tmp_path / "run", "--steps", "1000000")
    child.stdout.readline()
    child.send_signal(signal.SIGSTOP)
    child.send_signal(signal.SIGTERM)
    child.send_signal(signal.SIGINT)
    child.send_signal(signal.SIGCONT)
    child.communicate(timeout=30)
    assert child.returncode in (128 + signal.SIGINT, 128 + signal.SIGTERM)


def test_an_evaluation_is_reported_and_changes_no_step(undisturbed, train, tmp_path):
    (tmp_path / "eval.txt").write_bytes(b"to be evaluated\n" * 20)
    flags = ("--steps", "3", "--eval-data", str(tmp_path / "eval.txt"), "--eval-every", "2", "--eval-batches", "2")
    lines, said = train(tmp_path / "run", *flags)
    evaluated = [line for line in lines if "eval_loss" in line]
    assert [line["step"] for line in evaluated] == [2, 3]
    assert evaluated[0]["eval_num_tokens"] == 2 * 4 * 31
    assert evaluated[0]["eval_bits_per_byte"] == pytest.approx(evaluated[0]["eval_loss"] / math.log(2))
    assert {f"eval_loss_from_{position}" for position in (0, 2, 4, 8, 16)} <= evaluated[0].keys()
    assert evaluated[0]["eval_loss_cut_to_4"] > 0 and evaluated[0]["eval_loss_not_cut"] > 0
    assert f"evaluates 8 rows of {tmp_path / 'eval.txt'}" in said
    assert b"eval_bits_per_byte" in next((tmp_path / "run").glob("events.out.tfevents.*")).read_bytes()
    trained = [line for line in lines if "loss" in line]
    assert losses(trained).items() <= losses(undisturbed[0]).items()


def test_samples_are_reported_and_change_no_step(undisturbed, train, tmp_path):
    lines, _ = train(tmp_path / "run", "--steps", "3", "--sample-every", "2", "--sample-prompt", "import o")
    samples = [line for line in lines if "sample" in line]
    assert [line["step"] for line in samples] == [2, 3]
    assert all(line["sample"].startswith("import o|") for line in samples)
    assert b"    import o|" in next((tmp_path / "run").glob("events.out.tfevents.*")).read_bytes()
    assert losses([line for line in lines if "loss" in line]).items() <= losses(undisturbed[0]).items()


def test_a_packed_run_tells_how_evenly_its_documents_lie(train, tmp_path):
    for number in range(40):
        (tmp_path / f"{number:02}.txt").write_text("some words " * (number + 1))
    lines, _ = train(tmp_path / "run", "--steps", "2", "--packing", "--data", str(tmp_path))
    assert all(0 <= line["attention_idle_share"] < 1 for line in lines) and len(lines) == 2


def test_recomputing_whole_layers_changes_no_loss(undisturbed, train, tmp_path):
    lines, said = train(tmp_path / "run", "--steps", "3", "--remat", "layer")
    assert "remat layer" in said
    assert losses(lines) == pytest.approx({step: losses(undisturbed[0])[step] for step in (1, 2, 3)}, abs=1e-6)
