"""Drills: the real command under faults, and what must hold afterwards.

`python -m tests.drills` (`make drills`) runs all and writes docs/reliability.md; `--only NAME` runs some, `--kills N`
kills at N random times. tests/test_drills.py runs the quick ones.

A drill is a row of `DRILLS`: its name, what is done, what happens, and a function of a `Lab` that does and asserts it.
Five things are compared with a run that was left alone: losses by step, the checksum of the state at the end, the
batches that were seen, exit code and last line, and that nothing half-written stays.
"""

import argparse
import dataclasses
import itertools
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parent.parent
SMALL = [
    *("--platform", "cpu", "--seq-len", "32", "--hidden-size", "16", "--intermediate-size", "16"),
    *("--num-hidden-layers", "1", "--num-attention-heads", "2", "--num-key-value-heads", "1", "--head-dim", "8"),
    *("--warmup-steps", "2", "--data", "data.txt"),
]
STEPS = 12
PAIR = "data=2,seq=1"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run of the command ended."""

    code: int
    lines: list[dict[str, Any]]
    said: str

    def by_step(self, name: str) -> dict[int, float]:
        return {line["step"]: line[name] for line in self.lines if name in line}

    @property
    def resumed_after(self) -> int | None:
        found = re.search(r"^resuming after step (\d+): state ", self.said, re.MULTILINE)
        return int(found[1]) if found else None

    @property
    def last_line(self) -> str:
        return self.said.splitlines()[-1]


class Lab:
    """A folder with data and a run-dir in it, the command, and what it does when it is left alone.

    Args:
      shared: keeps compiled programs and undisturbed runs, for all labs.
    """

    def __init__(self, folder: Path, shared: Path) -> None:
        self.folder, self.shared = folder, shared
        self.run_dir = folder / "run"
        self.outcomes: list[Outcome] = []
        folder.mkdir(parents=True)
        self.write_data()

    def write_data(self, text: str | None = None, name: str = "data.txt") -> None:
        (self.folder / name).write_text(text or (ROOT / "train" / "step.py").read_text())

    def start(self, *flags: str, fault: str = "", mesh: str = "seq=2", environment: dict[str, str] | None = None):
        """The command as a child, in this folder."""
        words = [*SMALL, "--mesh", mesh, "--run-dir", str(self.run_dir.relative_to(self.folder)), *flags]
        ours = {
            "FAULT": fault,
            "PYTHONPATH": str(ROOT),
            "JAX_COMPILATION_CACHE_DIR": str(self.shared / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        }
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        command = [sys.executable, "-m", "train.llama", *words]
        environment = os.environ | ours | (environment or {})
        return subprocess.Popen(command, **pipes, text=True, env=environment, cwd=self.folder)

    def end(self, child: subprocess.Popen, begun: list[str] | None = None, timeout: float = 280) -> Outcome:
        """Waits for a child; `begun` are lines that were read before."""
        try:
            out, said = child.communicate(timeout=timeout)
        finally:
            child.kill()
        # A line may be cut by a kill.
        lines = [json.loads(line) for line in [*(begun or []), *out.splitlines()] if line.rstrip().endswith("}")]
        self.outcomes.append(Outcome(child.returncode, lines, said))
        return self.outcomes[-1]

    def train(self, *flags: str, code: int = 0, steps: int = STEPS, **options: Any) -> Outcome:
        """Runs the command to its end, which has this exit code."""
        outcome = self.end(self.start("--steps", str(steps), *flags, **options))
        assert outcome.code == code, f"exit code {outcome.code} instead of {code}: {outcome.said[-2000:]}"
        return outcome

    def pair(self, *flags: str, fault: str = "") -> tuple[Outcome, Outcome]:
        """Runs the command as two processes of a device each to its end."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        job = (*("--steps", str(STEPS)), *flags, "--coordinator", f"localhost:{port}", "--num-processes", "2")
        children = [self.start(*job, "--process-id", str(i), fault=fault, mesh=PAIR) for i in (0, 1)]
        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(self.end, children)
        return first, second

    def undisturbed(self, *flags: str, steps: int = STEPS, mesh: str = "seq=2") -> Outcome:
        """A run of the same settings and data that nothing happens to."""
        name = "-".join([mesh, str(steps), *flags]).replace("/", "_")
        kept = self.shared / f"{name}.json"
        if not kept.exists():
            lab = Lab(Path(tempfile.mkdtemp(dir=self.shared)) / "lab", self.shared)
            outcome = lab.train(*flags, steps=steps, mesh=mesh)
            partial = kept.with_suffix(f".{lab.folder.parent.name}")
            partial.write_text(json.dumps(dataclasses.asdict(outcome)))
            partial.rename(kept)
        return Outcome(**json.loads(kept.read_text()))

    def assert_exact(self, *flags: str, golden: Outcome | None = None, steps: int = STEPS, rel: float = 0) -> None:
        """All outcomes so far together are a run that was left alone, up to `rel` of a loss."""
        golden = golden or self.undisturbed(*flags, steps=steps)
        for name in ("loss", "num_tokens", "learning_rate", "grad_norm"):
            expected, seen = golden.by_step(name), set()
            for outcome in self.outcomes:
                for step, value in outcome.by_step(name).items():
                    assert abs(value - expected[step]) <= rel * abs(expected[step]), f"{name} of step {step}"
                    seen.add(step)
            assert seen == set(expected), f"steps {sorted(set(expected) - seen)} were never told of"
        assert rel or self.checksum(self.outcomes[-1]) == self.checksum(golden)
        assert self.saved(steps)["position"]["iterator"] == {"next_index": steps}, "batches were lost or seen twice"
        self.assert_clean()

    def assert_clean(self) -> None:
        """Nothing half-written is left."""
        left = [path.name for path in self.run_dir.rglob("*") if path.suffix in (".partial", ".deleted")]
        left += [path.name for path in self.run_dir.rglob("*.orbax-checkpoint-tmp*")]
        assert not left, left

    def checksum(self, outcome: Outcome) -> str:
        """Of the state that was saved last."""
        return [line.split()[-1] for line in outcome.said.splitlines() if line.startswith("checkpoint ")][-1]

    def saved(self, step: int) -> dict[str, Any]:
        """What is saved beside the state."""
        metadata = json.loads((self.run_dir / "checkpoints" / str(step) / "_CHECKPOINT_METADATA").read_text())
        return json.loads(metadata["custom_metadata"]["content"])

    def checkpoints(self) -> list[int]:
        return sorted(int(path.name) for path in (self.run_dir / "checkpoints").iterdir() if path.name.isdigit())

    def largest_file(self, step: int) -> Path:
        files = (path for path in (self.run_dir / "checkpoints" / str(step)).rglob("*") if path.is_file())
        return max(files, key=lambda path: path.stat().st_size)


def kill_at_a_step(lab: Lab) -> None:
    lab.train("--save-every", "2", fault="step@8,kill", code=-signal.SIGKILL)
    # The save of step 6 may have been under way.
    assert lab.train().resumed_after in (4, 6)
    lab.assert_exact()


def kill_in_a_save(lab: Lab) -> None:
    child = lab.start("--steps", str(STEPS), "--save-every", "2")
    while not list(lab.run_dir.glob("checkpoints/6.orbax-checkpoint-tmp*")):
        assert child.poll() is None
    child.kill()
    lab.end(child)
    resumed = lab.train()
    # It may have become whole meanwhile.
    is_left = "removed 6.orbax-checkpoint-tmp, left by a run that was killed" in resumed.said
    assert resumed.resumed_after == (4 if is_left else 6)
    lab.assert_exact()


def kill_between_the_new_and_the_old(lab: Lab) -> None:
    lab.train("--save-every", "4", "--keep", "1", fault="whole@8,kill", code=-signal.SIGKILL)
    assert lab.checkpoints() == [4, 8]
    assert lab.train("--keep", "1").resumed_after == 8
    assert lab.checkpoints() == [STEPS]
    lab.assert_exact()


def kill_in_a_deletion(lab: Lab) -> None:
    lab.train("--save-every", "4", "--keep", "1", fault="delete@4,kill", code=-signal.SIGKILL)
    assert lab.checkpoints() == [8]
    assert "removed 4.deleted, left by a run that was killed" in lab.train("--keep", "1").said
    lab.assert_exact()


def kill_before_any_checkpoint(lab: Lab) -> None:
    lab.train(fault="step@3,kill", code=-signal.SIGKILL)
    assert lab.train().resumed_after is None
    lab.assert_exact()


def kill_at_random_times(lab: Lab, kills: int = 6, seed: int = 0) -> None:
    steps, draw = 100, random.Random(seed)
    flags = ("--save-every", "1", "--keep", "1")
    for _ in range(kills):
        child = lab.start("--steps", str(steps), *flags)
        first = child.stdout.readline()
        time.sleep(draw.uniform(0, 0.4))
        child.kill()
        outcome = lab.end(child, [first])
        assert outcome.code in (-signal.SIGKILL, 0)
        if outcome.code == 0 and not outcome.lines:
            break
    assert len(lab.train(*flags, steps=steps).said.split("is not whole")) == 1
    done = lab.outcomes.pop()
    # Where the last kill came after the end, the command has only said so.
    lab.outcomes.append(done if done.lines else lab.outcomes.pop())
    lab.assert_exact(*flags, steps=steps)


def damage(how: str) -> Callable[[Lab], None]:
    def drill(lab: Lab) -> None:
        lab.train("--save-every", "4", steps=8)
        file = lab.largest_file(8)
        content = bytearray(file.read_bytes())
        if how == "flip":
            content[len(content) // 2] ^= 4
        elif how == "truncate":
            content = content[: len(content) // 2]
        elif how == "zero":
            content = bytes(len(content))
        file.write_bytes(content)
        if how == "delete":
            file.unlink()
        resumed = lab.train()
        assert "checkpoint 8 is not whole, trying an older one" in resumed.said
        assert resumed.resumed_after == 4
        assert (lab.run_dir / "broken" / "8").is_dir()
        lab.assert_exact()

    return drill


def all_damaged(lab: Lab) -> None:
    lab.train("--save-every", "4", steps=8)
    for step in (4, 8):
        lab.largest_file(step).write_bytes(b"")
    refused = lab.train(code=2)
    assert "none of the steps [8, 4] can be read" in refused.last_line
    assert lab.checkpoints() == [4, 8]


def go_back_to_a_step(lab: Lab) -> None:
    lab.train("--save-every", "4", steps=8)
    refused = lab.train("--checkpoint", "5", code=2)
    assert refused.last_line == "error: --checkpoint 5: one of the steps [8, 4] in " + str(lab.run_dir)
    assert lab.train("--checkpoint", "4").resumed_after == 4
    assert lab.checkpoints() == [4, STEPS] and (lab.run_dir / "later" / "8").is_dir()
    lab.assert_exact()


def full_disk_for_a_while(lab: Lab) -> None:
    outcome = lab.train("--save-every", "3", fault="save@3,full failed@3,free")
    assert "warning   checkpoint 3 was not saved (" in outcome.said and "Traceback" not in outcome.said
    assert lab.checkpoints() == [6, 9, 12]
    lab.assert_exact()


def full_disk_to_the_end(lab: Lab) -> None:
    outcome = lab.train("--save-every", "3", fault="whole@3,full", code=3)
    assert outcome.last_line.startswith("error: checkpoint 12 was not saved (")
    assert "Traceback" not in outcome.said
    assert lab.checkpoints() == [3]
    assert lab.train().resumed_after == 3
    lab.assert_exact()


def failed_final_save(lab: Lab) -> None:
    outcome = lab.train("--save-every", "4", fault=f"save@{STEPS},raise", code=3)
    assert outcome.last_line.startswith(f"error: checkpoint {STEPS} was not saved (FaultError: asked for by FAULT)")
    assert lab.train().resumed_after == 8
    lab.assert_exact()


def run_dir_that_cannot_be_written(lab: Lab) -> None:
    lab.run_dir.write_text("")
    begun = time.monotonic()
    refused = lab.train(code=2)
    assert refused.last_line == "error: --run-dir run: a folder, or a name for a new one"
    assert time.monotonic() - begun < 30


def stop_by(number: signal.Signals, fault: str) -> Callable[[Lab], None]:
    def drill(lab: Lab) -> None:
        stopped = lab.train("--save-every", "3", fault=f"{fault},{number.name[3:].lower()} {fault},pause")
        assert "stopping after this step; a second signal leaves at once" in stopped.said
        assert f"of {STEPS}; to resume: python -m train.llama" in stopped.said
        lab.train("--save-every", "3")
        lab.assert_exact()

    return drill


def stop_while_compiling(lab: Lab) -> None:
    stopped = lab.train(fault="compile,term")
    assert not stopped.lines
    assert f"stopped after step 0 of {STEPS}" in stopped.said
    lab.train()
    lab.assert_exact()


def second_signal(lab: Lab) -> None:
    stopped = lab.train(
        "--save-every", "3", fault="step@5,int step@5,pause step@5,term step@5,hang", code=128 + signal.SIGTERM
    )
    assert "stopping after this step" in stopped.said
    lab.train()
    lab.assert_exact()


def ask_for_a_checkpoint(how: str) -> Callable[[Lab], None]:
    def drill(lab: Lab) -> None:
        if how == "file":
            lab.run_dir.mkdir()
            (lab.run_dir / "SAVE").touch()
            lab.train()
            assert lab.checkpoints() == [1, STEPS] and not (lab.run_dir / "SAVE").exists()
        else:
            lab.train(fault="step@5,usr1 step@5,pause")
            assert lab.checkpoints() == [5, STEPS]
        lab.assert_exact()

    return drill


def save_by_time(lab: Lab) -> None:
    outcome = lab.train("--save-every", "1s", fault="step@5,pause step@9,pause")
    assert {"checkpoint 5", "checkpoint 9"} <= {line.split(":")[0] for line in outcome.said.splitlines()}
    lab.assert_exact()


def changed_data(change: Callable[[str], str]) -> Callable[[Lab], None]:
    def drill(lab: Lab) -> None:
        lab.train(steps=4)
        text = (lab.folder / "data.txt").read_text()
        lab.write_data(change(text))
        refused = lab.train(code=2)
        assert refused.last_line.startswith("error: --data data.txt: the data of the checkpoint, but its content has")
        assert refused.last_line.endswith("--accept data goes on so") and not refused.lines
        assert lab.train("--accept", "data", steps=5).resumed_after == 4
        lab.write_data(text)

    return drill


def renamed_data(lab: Lab) -> None:
    lab.train(steps=4)
    (lab.folder / "data.txt").rename(lab.folder / "other.txt")
    index = SMALL.index("data.txt")
    words = [*SMALL[:index], "other.txt", *SMALL[index + 1 :]]
    for flags, code in (([], 2), (["--accept", "data"], 0)):
        child = lab.start(*flags)
        child.kill()
        child.communicate()
        command = [sys.executable, "-m", "train.llama", *words, "--mesh", "seq=2", "--run-dir", "run", "--steps", "12"]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        outcome = lab.end(subprocess.Popen([*command, *flags], **pipes, text=True, env=environment, cwd=lab.folder))
        assert outcome.code == code, outcome.said
    assert "--data was ['data.txt:1'] and is ['other.txt:1']; --accept data goes on so" in lab.outcomes[-2].last_line
    lab.assert_exact()


def other_settings(lab: Lab) -> None:
    lab.train("--save-every", "2", steps=4)
    for flag, name, was, value in (
        ("--lr", "lr", "0.006", "0.5"),
        ("--seed", "seed", "0", "3"),
        ("--clip-norm", "clip-norm", "1.0", "9.0"),
        ("--packing", "packing", "False", "True"),
    ):
        refused = lab.train(flag, *([] if value == "True" else [value]), code=2)
        expected = f"{flag} was {was} and is {value}; --accept {name} goes on so"
        assert refused.last_line == f"error: --run-dir run: a folder of the same configuration; {expected}"
    lab.train("--save-every", "5", "--keep", "2", "--accumulate", "1", "--sample-every", "100")
    lab.assert_exact()
    accepted = lab.train("--lr", "0.5", "--accept", "lr", steps=STEPS + 1)
    assert accepted.lines[-1]["learning_rate"] == 0.5


def other_meshes(lab: Lab) -> None:
    for steps, mesh in ((3, "seq=2"), (6, "data=2,seq=2"), (9, "seq=1"), (STEPS, "data=2,seq=1")):
        lab.train(steps=steps, mesh=mesh)
    lab.assert_exact(rel=1e-5)


def two_launches(lab: Lab) -> None:
    child = lab.start("--steps", str(STEPS), "--save-every", "2", fault="step@6,hang")
    first = child.stdout.readline()
    refused = lab.train(code=2)
    assert f"a folder that no other run is in; process {child.pid} on " in refused.last_line
    child.kill()
    lab.end(child, [first])
    lab.train()
    lab.assert_exact()


def moved_run_dir(lab: Lab) -> None:
    lab.train(steps=5)
    (lab.folder / "runs").mkdir()
    lab.run_dir = lab.run_dir.rename(lab.folder / "runs" / "moved")
    assert lab.train().resumed_after == 5
    # Orbax notes where a checkpoint was committed in a file that nothing reads.
    files = [path for path in lab.run_dir.rglob("*") if path.is_file() and path.name != "commit_success.txt"]
    assert not [path.name for path in files if str(lab.folder).encode() in path.read_bytes()]
    lab.assert_exact()


def generations(*ends: int, flags: tuple[str, ...] = ()) -> Callable[[Lab], None]:
    def drill(lab: Lab) -> None:
        for start, end in itertools.pairwise((0, *ends, STEPS)):
            outcome = lab.train(*flags, steps=end)
            assert [line["step"] for line in outcome.lines] == list(range(start + 1, end + 1))
        lab.assert_exact(*flags)

    return drill


def epoch_borders(lab: Lab) -> None:
    # Ten rows of 32 tokens in batches of 4: an epoch ends within step 3 and with step 5.
    rows = ("".join(f"{i:02} " * 10 + "\n" for i in range(11)))[:320]
    whole = Lab(lab.folder / "whole", lab.shared)
    for each in (lab, whole):
        each.write_data(rows)
    whole.train()
    for steps in (2, 3, 5, 10, STEPS):
        lab.train(steps=steps)
    lab.assert_exact(golden=whole.outcomes[0])


def finished_run(lab: Lab) -> None:
    lab.train()
    again = lab.train()
    assert again.lines == []
    assert again.last_line == f"finished before: {STEPS} of {STEPS} steps are done; a larger --steps continues"
    lab.outcomes.pop()
    lab.assert_exact()


def broken_compile_cache(lab: Lab) -> None:
    lab.train(steps=5)
    own = shutil.copytree(lab.shared / "cache", lab.folder / "cache")
    for index, path in enumerate(sorted(path for path in own.iterdir() if path.is_file())):
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2] if index % 2 else content[:-9] + b"\0" + content[-8:])
    lab.train(environment={"JAX_COMPILATION_CACHE_DIR": str(own)})
    lab.assert_exact()


def curves_after_a_kill(lab: Lab) -> None:
    lab.train("--save-every", "4", fault="step@11,kill", code=-signal.SIGKILL)
    lab.train()
    events = EventAccumulator(str(lab.run_dir))
    events.Reload()
    steps = [event.step for event in events.Scalars("loss")]
    # Those that a kill -9 finds in memory are missing.
    resumed_after = lab.outcomes[-1].resumed_after
    assert steps == sorted(set(steps)) and steps[-STEPS + resumed_after :] == list(range(resumed_after + 1, STEPS + 1))
    lab.assert_exact()


def compilations(lab: Lab) -> None:
    for steps in (5, STEPS):
        outcome = lab.train("--save-every", "2", steps=steps, environment={"JAX_LOG_COMPILES": "1"})
        assert outcome.said.count("Compiling jit(step)") == 1
    lab.assert_exact()


def hash_seeds(lab: Lab) -> None:
    lab.train(steps=6, environment={"PYTHONHASHSEED": "1"})
    lab.train(environment={"PYTHONHASHSEED": "2"})
    lab.assert_exact()


def pair_ends(fault: str, codes: tuple[int, int], *said: str, flags: tuple[str, ...] = ()) -> Callable[[Lab], None]:
    """A fault in one of two processes; `said` are the ends of both's lines for people, where they are ours."""

    def drill(lab: Lab) -> None:
        outcomes = lab.pair("--save-every", "3", *flags, fault=fault)
        for outcome, code, words in zip(outcomes, codes, said, strict=True):
            # Who waits for a process that is stuck may find itself stuck first.
            assert outcome.code == code or (13 in codes and outcome.code == 13), outcome.said[-2000:]
            assert words in outcome.said[-2000:], outcome.said[-2000:]
        lab.train(mesh=PAIR)
        if lab.outcomes[1].lines:
            lab.outcomes.pop(0)
        lab.assert_exact(golden=lab.undisturbed(mesh=PAIR), rel=1e-6)

    return drill


def slow_process(lab: Lab) -> None:
    first, _ = lab.pair(fault=" ".join(f"data@{step}/1,pause" for step in (5, 6)))
    slow = {line["step"] for line in first.lines if line["slowest_process"] == 1 and line["own_seconds_max"] > 1}
    assert slow >= {6, 7}
    lab.assert_exact(golden=lab.undisturbed(mesh=PAIR), rel=1e-6)


def stuck_alone(lab: Lab) -> None:
    stuck = lab.train("--save-every", "3", "--stuck-after", "2", fault="data@8,hang", code=13)
    assert "in fault" in stuck.said and "stuck for" in stuck.last_line and "in the phase data" in stuck.last_line
    assert "resuming after step 6" in lab.train().said
    lab.assert_exact()


def not_finite(lab: Lab) -> None:
    stopped = lab.train("--lr", "1e30", "--save-every", "2", code=4)
    assert stopped.said.count("and changed nothing; its batch: rows ") == 3
    assert "that makes 3 in a row (--max-bad-steps)" in stopped.last_line
    assert max(stopped.by_step("loss")) == 3 and lab.checkpoints() == [2]


def taken_twice(lab: Lab) -> None:
    lab.train("--deterministic", "--check-determinism", "2")
    lab.assert_exact()


@dataclasses.dataclass(frozen=True)
class Drill:
    """One row of docs/reliability.md."""

    name: str
    done: str
    happened: str
    act: Callable[[Lab], None]
    is_quick: bool = False


FALLS_BACK = "one line names it, `broken/` has it, the one before is taken, exact"
REFUSED_DATA = "exit 2, the file and `--accept data` are named; with that flag it goes on"
DRILLS = [
    Drill(
        "kill",
        "kill -9 in step 8, checkpoints every 2",
        "resumes from the newest whole checkpoint, exact",
        kill_at_a_step,
        True,
    ),
    Drill(
        "kill in a save",
        "kill -9 while files of checkpoint 6 are written",
        "what is left is removed and named, resumes from the one before, exact",
        kill_in_a_save,
    ),
    Drill(
        "kill before a deletion",
        "`--keep 1`, kill -9 once the new checkpoint is whole",
        "both were there, one is afterwards, exact",
        kill_between_the_new_and_the_old,
    ),
    Drill(
        "kill in a deletion",
        "`--keep 1`, kill -9 while the old checkpoint is deleted",
        "the new one is whole, what is left of the old one is removed and named, exact",
        kill_in_a_deletion,
    ),
    Drill("kill at the beginning", "kill -9 before any checkpoint", "begins anew, exact", kill_before_any_checkpoint),
    Drill(
        "random kills",
        "kill -9 at random times, six times in a row, a save in every step, `--keep 1`",
        "always a whole checkpoint, exact",
        kill_at_random_times,
    ),
    Drill("flipped bit", "one bit of the newest checkpoint flipped", FALLS_BACK, damage("flip"), True),
    Drill("truncated file", "the largest file of the newest checkpoint cut in half", FALLS_BACK, damage("truncate")),
    Drill("zeroed file", "the largest file of the newest checkpoint full of zeros", FALLS_BACK, damage("zero")),
    Drill("missing file", "the largest file of the newest checkpoint deleted", FALLS_BACK, damage("delete")),
    Drill("all damaged", "all checkpoints damaged", "exit 2, one line, nothing is moved", all_damaged),
    Drill(
        "an older checkpoint",
        "`--checkpoint 4`, and one that is not there",
        "goes on from step 4, exact, newer ones are in `later/`; exit 2 and the steps that are there",
        go_back_to_a_step,
    ),
    Drill(
        "full disk",
        "no file can grow while step 3 is saved",
        "the failed save is told, training goes on, later saves are whole, exact",
        full_disk_for_a_while,
    ),
    Drill(
        "full disk to the end",
        "no file can grow once checkpoint 3 is whole",
        "exit 3 after three failed saves, the last good checkpoint is whole, resumes exactly",
        full_disk_to_the_end,
        True,
    ),
    Drill(
        "failed final save",
        "the save of the last step fails",
        "tried three times, exit 3, resumes exactly",
        failed_final_save,
    ),
    Drill(
        "no run-dir",
        "a run-dir that cannot be written",
        "exit 2, one line, nothing compiled",
        run_dir_that_cannot_be_written,
    ),
    Drill("Ctrl-C", "SIGINT in step 5", "saves, exit 0, resumes exactly", stop_by(signal.SIGINT, "step@5")),
    Drill("SIGTERM", "SIGTERM in step 7", "saves, exit 0, resumes exactly", stop_by(signal.SIGTERM, "step@7")),
    Drill(
        "SIGTERM in a save",
        "SIGTERM as checkpoint 6 begins",
        "saves, exit 0, resumes exactly",
        stop_by(signal.SIGTERM, "save@6"),
    ),
    Drill("SIGTERM while compiling", "SIGTERM before the first step", "exit 0, resumes exactly", stop_while_compiling),
    Drill("second signal", "SIGINT and SIGTERM in a step", "exit 143 at once, resumes exactly", second_signal),
    Drill("SIGUSR1", "SIGUSR1 in step 5", "checkpoint 5, goes on, exact", ask_for_a_checkpoint("signal")),
    Drill("a file SAVE", "`touch RUN_DIR/SAVE`", "a checkpoint, goes on, exact", ask_for_a_checkpoint("file")),
    Drill("saves by time", "`--save-every 1s`, two slow steps", "saves after these, exact", save_by_time),
    Drill(
        "edited data",
        "one letter of the data changed",
        REFUSED_DATA,
        changed_data(lambda text: text[:-100] + "#" + text[-99:]),
    ),
    Drill("shortened data", "the data cut in half", REFUSED_DATA, changed_data(lambda text: text[: len(text) // 2])),
    Drill("longer data", "a line appended to the data", REFUSED_DATA, changed_data(lambda text: text + "more\n")),
    Drill(
        "renamed data",
        "the data under another name",
        "exit 2, both names and `--accept data`; with that flag exact",
        renamed_data,
    ),
    Drill(
        "other settings",
        "`--lr`, `--seed`, `--clip-norm`, `--packing` changed; then `--save-every`, `--keep`, `--accumulate`",
        "the first are refused by name with the flag that accepts them, the others go on, exact",
        other_settings,
    ),
    Drill(
        "other meshes",
        "seq=2, data=2,seq=2, seq=1 and data=2 in one run",
        "the same batches, losses within 1e-5",
        other_meshes,
    ),
    Drill(
        "two launches",
        "the command started twice on a run-dir",
        "the second exits 2 and names the first; after a kill -9 of that, resumes exactly",
        two_launches,
    ),
    Drill(
        "moved run-dir",
        "`mv` of the run-dir between two runs",
        "resumes exactly, no absolute path is read again",
        moved_run_dir,
    ),
    Drill("three generations", "stopped after steps 4 and 8", "exact", generations(4, 8)),
    Drill("many generations", "stopped after steps 1, 2, 3, 7 and 11", "exact", generations(1, 2, 3, 7, 11)),
    Drill(
        "packed documents", "`--packing`, stopped after steps 3 and 8", "exact", generations(3, 8, flags=("--packing",))
    ),
    Drill(
        "accumulation", "`--accumulate 2`, stopped after step 5", "exact", generations(5, flags=("--accumulate", "2"))
    ),
    Drill("epoch borders", "ten rows, stopped within and at ends of epochs", "exact", epoch_borders),
    Drill("a finished run", "the same command again", "says so, exit 0, changes nothing", finished_run),
    Drill("broken compile cache", "its files cut and flipped", "compiles anew, exact", broken_compile_cache),
    Drill("curves", "kill -9, then TensorBoard's files", "no step twice, all in order", curves_after_a_kill),
    Drill("compilations", "saves, a resume", "each session compiles the step once", compilations),
    Drill(
        "exception in process 1",
        "an exception in step 5 of process 1 of two",
        "its traceback and exit 1; the other has one line with process and error, and exit 6; resumes exactly",
        pair_ends("step@5/1,raise", (6, 1), "error: process 1 (", "FaultError: asked for by FAULT"),
    ),
    Drill(
        "exception in process 0",
        "an exception with the data of step 5 in process 0 of two",
        "the same the other way round",
        pair_ends("data@5/0,raise", (1, 6), "FaultError: asked for by FAULT", "error: process 0 ("),
    ),
    Drill(
        "exception in an evaluation",
        "an exception in an evaluation in process 1 of two",
        "the same",
        pair_ends(
            *("evaluate@6/1,raise", (6, 1), "error: process 1 (", "FaultError: asked for by FAULT"),
            flags=("--eval-every", "3", "--eval-data", "data.txt", "--eval-batches", "1"),
        ),
    ),
    Drill(
        "killed process 1",
        "kill -9 of process 1 of two",
        "the other has one line that names it, and exit 6; resumes exactly",
        pair_ends("step@5/1,kill", (6, -9), "is gone without a word", ""),
    ),
    Drill(
        "killed process 0",
        "kill -9 of process 0 of two, which coordinates",
        "the other has one line that names it, and exit 6; resumes exactly",
        pair_ends("step@5/0,kill", (-9, 6), "", "error: process 0, which listens at localhost:"),
    ),
    Drill(
        "stuck process",
        "process 1 of two sleeps in step 8, `--stuck-after 3`",
        "its stacks and exit 13; the other has one line with process and phase, and exit 6; resumes exactly",
        pair_ends("data@8/1,hang", (6, 13), "in the phase", "in the phase data", flags=("--stuck-after", "3")),
    ),
    Drill(
        "absent at the restore",
        "process 1 of two sleeps before it restores, `--stuck-after 0.2`",
        "the same",
        pair_ends("restore/1,hang", (6, 13), "in the phase", "in the phase restore", flags=("--stuck-after", "0.2")),
    ),
    Drill(
        "stuck alone", "a run sleeps in step 8, `--stuck-after 2`", "its stacks, exit 13, resumes exactly", stuck_alone
    ),
    Drill(
        "SIGTERM to one of two",
        "SIGTERM to process 1 of two in step 5",
        "both save after the same step, exit 0, resumes exactly",
        pair_ends("step@5/1,term", (0, 0), "stopped after step 5", ""),
    ),
    Drill(
        "SIGTERM in a save of two",
        "SIGTERM to process 1 of two as checkpoint 6 begins",
        "both save after the same step, exit 0, resumes exactly",
        pair_ends("save@6/1,term", (0, 0), "stopped after step 7", ""),
    ),
    Drill(
        "SIGTERM to one that compiles",
        "SIGTERM to process 1 of two before the first step",
        "exit 0, resumes exactly",
        pair_ends("compile/1,term", (0, 0), "stopped after step 0", ""),
    ),
    Drill(
        "SIGUSR1 to one of two",
        "SIGUSR1 to process 1 of two in step 5",
        "both save after the same step and go on, exact",
        pair_ends("step@5/1,usr1 step@5/1,pause", (0, 0), "checkpoint 5: state ", ""),
    ),
    Drill(
        "full disk of one of two",
        "no file of process 1 of two can grow from the save of step 6 on",
        "both know of each failed save at once, exit 3 after three, the last good checkpoint is whole, resumes exactly",
        pair_ends(
            "save@6/1,full", (3, 3), f"error: checkpoint {STEPS} was not saved (in another process)", "was not saved"
        ),
    ),
    Drill("slow process", "process 1 of two pauses twice", "the lines of these steps name it", slow_process),
    Drill(
        "not finite",
        "`--lr 1e30`, whose steps overflow",
        "each names its batch and changes nothing, exit 4 after three in a row, nothing is saved of them",
        not_finite,
    ),
    Drill(
        "a step taken twice",
        "`--deterministic --check-determinism 2`",
        "equal, and the losses are the same",
        taken_twice,
    ),
    Drill("hash seeds", "another PYTHONHASHSEED in the second session", "exact", hash_seeds),
]


def perform(drill: Drill, shared: Path) -> None:
    """Runs one in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        drill.act(Lab(Path(folder) / "lab", shared))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.drills")
    parser.add_argument("--only", help="drills whose name has this in it; writes no report")
    parser.add_argument("--kills", type=int, help="kill -9 at so many random times, and nothing else")
    parser.add_argument("--seed", type=int, default=0, help="of --kills")
    parser.add_argument("--workers", type=int, default=2, help="drills at a time")
    arguments = parser.parse_args()
    drills = [drill for drill in DRILLS if (arguments.only or "") in drill.name]
    if arguments.kills:
        rounds = [min(10, arguments.kills - done) for done in range(0, arguments.kills, 10)]

        def killer(number: int, kills: int) -> Callable[[Lab], None]:
            return lambda lab: kill_at_random_times(lab, kills, seed=1000 * arguments.seed + number)

        drills = [Drill(f"{kills} kills, round {i}", "", "", killer(i, kills)) for i, kills in enumerate(rounds)]
    begun, failures = time.monotonic(), {}
    with tempfile.TemporaryDirectory() as shared, ThreadPoolExecutor(arguments.workers) as pool:
        # Once alone, so that it is compiled, and known, before all.
        Lab(Path(shared) / "first", Path(shared)).undisturbed()

        def attempt(drill: Drill) -> None:
            start = time.monotonic()
            try:
                perform(drill, Path(shared))
            except Exception as error:
                failures[drill.name] = f"{type(error).__name__}: {error}"
            print(f"{time.monotonic() - start:5.1f} s  {drill.name}: {failures.get(drill.name, 'held')}", flush=True)

        list(pool.map(attempt, drills))
    print(f"{len(drills) - len(failures)} of {len(drills)} drills held in {time.monotonic() - begun:.0f} s")
    if not (arguments.only or arguments.kills or failures):
        write_report()
    return bool(failures)


def write_report() -> None:
    """Replaces the table of docs/reliability.md."""
    path = ROOT / "docs" / "reliability.md"
    before = path.read_text().split("\n| drill |")[0]
    rows = [f"| {drill.name} | {drill.done} | {drill.happened} |" for drill in DRILLS]
    path.write_text("\n".join([before, "| drill | what was done | what happened |", "|---|---|---|", *rows]) + "\n")


if __name__ == "__main__":
    sys.exit(main())
