"""Drills: the real command under faults, and what must hold afterwards.

`python -m tests.drills` (`make drills`) runs all; `--only NAME` runs some, `--kills N` kills at N random times.
tests/test_drills.py runs the quick ones. Each is told of in docs/reliability.md: what is done, and what happens.

A drill is a function of a `Lab` that does and asserts it.
"""

import argparse
import dataclasses
import itertools
import json
import math
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.lab import PAIR, STEPS, Lab


@dataclasses.dataclass(frozen=True)
class Drill:
    """What a row of docs/reliability.md of this name tells; `given` goes to `act` beside a lab."""

    name: str
    act: Callable[..., None]
    given: dict[str, Any]
    is_quick: bool = False


DRILLS: list[Drill] = []


def drill(name: str, *, is_quick: bool = False, **given: Any):
    """Adds a drill that does what follows; of several on one function, the upper one comes first."""

    def add(act: Callable[..., None]) -> Callable[..., None]:
        place = next((i for i, other in enumerate(DRILLS) if other.act is act), len(DRILLS))
        DRILLS.insert(place, Drill(name, act, given, is_quick))
        return act

    return add


@drill("kill", is_quick=True)
def kill_at_a_step(lab: Lab) -> None:
    lab.train("--save-every", "2", fault="step@8,kill", code=-signal.SIGKILL)
    # The save of step 6 may have been under way.
    assert lab.resume().resumed_after in (4, 6)


@drill("kill in a save")
def kill_in_a_save(lab: Lab) -> None:
    child = lab.start("--steps", str(STEPS), "--save-every", "2")
    while not list(lab.run_dir.glob("checkpoints/6.orbax-checkpoint-tmp*")):
        assert child.poll() is None
    child.kill()
    lab.end(child)
    resumed = lab.resume()
    # It may have become whole meanwhile.
    is_left = "removed 6.orbax-checkpoint-tmp, left by a run that was killed" in resumed.said
    assert resumed.resumed_after == (4 if is_left else 6)


@drill("kill before a deletion")
def kill_between_the_new_and_the_old(lab: Lab) -> None:
    lab.train("--save-every", "4", "--keep", "1", fault="whole@8,kill", code=-signal.SIGKILL)
    assert lab.checkpoints() == [4, 8]
    lab.resume("--keep", "1", after=8)
    assert lab.checkpoints() == [STEPS]


@drill("kill in a deletion")
def kill_in_a_deletion(lab: Lab) -> None:
    lab.train("--save-every", "4", "--keep", "1", fault="delete@4,kill", code=-signal.SIGKILL)
    assert lab.checkpoints() == [8]
    assert "removed 4.deleted, left by a run that was killed" in lab.resume("--keep", "1").said


@drill("kill at the beginning")
def kill_before_any_checkpoint(lab: Lab) -> None:
    lab.train(fault="step@3,kill", code=-signal.SIGKILL)
    assert lab.resume().resumed_after is None


@drill("random kills")
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
    assert "is not whole" not in lab.train(*flags, steps=steps).said
    done = lab.outcomes.pop()
    # Where the last kill came after the end, the command has only said so.
    lab.outcomes.append(done if done.lines else lab.outcomes.pop())
    lab.assert_exact(*flags, steps=steps)


@drill("flipped bit", is_quick=True, how="flip")
@drill("truncated file", how="truncate")
@drill("zeroed file", how="zero")
@drill("missing file", how="delete")
def damage(lab: Lab, how: str) -> None:
    lab.train("--save-every", "4", steps=8)
    file = lab.largest_file(8)
    content = file.read_bytes()
    middle = len(content) // 2
    if how == "delete":
        file.unlink()
    else:
        flipped = content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]
        file.write_bytes({"flip": flipped, "truncate": content[:middle], "zero": bytes(len(content))}[how])
    assert "checkpoint 8 is not whole, trying an older one" in lab.resume(after=4).said
    assert (lab.run_dir / "broken" / "8").is_dir()


@drill("all damaged")
def all_damaged(lab: Lab) -> None:
    lab.train("--save-every", "4", steps=8)
    for step in (4, 8):
        lab.largest_file(step).write_bytes(b"")
    refused = lab.train(code=2)
    assert "none of the steps [8, 4] can be read" in refused.last_line
    assert lab.checkpoints() == [4, 8]


@drill("an older checkpoint")
def go_back_to_a_step(lab: Lab) -> None:
    lab.train("--save-every", "4", steps=8)
    refused = lab.train("--checkpoint", "5", code=2)
    assert refused.last_line == "error: --checkpoint 5: one of the steps [8, 4] in " + str(lab.run_dir)
    lab.resume("--checkpoint", "4", after=4)
    assert lab.checkpoints() == [4, STEPS] and (lab.run_dir / "later" / "8").is_dir()


@drill("full disk")
def full_disk_for_a_while(lab: Lab) -> None:
    outcome = lab.train("--save-every", "3", fault="save@3,full failed@3,free")
    assert "warning   checkpoint 3 was not saved (" in outcome.said and "Traceback" not in outcome.said
    assert lab.checkpoints() == [6, 9, 12]
    lab.assert_exact()


@drill("full disk to the end", is_quick=True)
def full_disk_to_the_end(lab: Lab) -> None:
    outcome = lab.train("--save-every", "3", fault="whole@3,full", code=3)
    assert outcome.last_line.startswith("error: checkpoint 12 was not saved (")
    assert "Traceback" not in outcome.said
    assert lab.checkpoints() == [3]
    lab.resume(after=3)


@drill("failed final save")
def failed_final_save(lab: Lab) -> None:
    outcome = lab.train("--save-every", "4", fault=f"save@{STEPS},raise", code=3)
    assert outcome.last_line.startswith(f"error: checkpoint {STEPS} was not saved (FaultError: asked for by FAULT)")
    lab.resume(after=8)


@drill("no run-dir")
def run_dir_that_cannot_be_written(lab: Lab) -> None:
    lab.run_dir.write_text("")
    refused = lab.train(code=2, environment={"JAX_LOG_COMPILES": "1"})
    assert refused.said == "error: --run-dir run: a folder, or a name for a new one\n"


@drill("Ctrl-C", signal="int", point="step@5")
@drill("SIGTERM", signal="term", point="step@7")
@drill("SIGTERM in a save", signal="term", point="save@6")
def stop_by(lab: Lab, signal: str, point: str) -> None:
    stopped = lab.train("--save-every", "3", fault=f"{point},{signal} {point},pause")
    assert "stopping after this step; a second signal leaves at once" in stopped.said
    assert f"of {STEPS}; to resume: python -m train.llama" in stopped.said
    lab.resume("--save-every", "3")


@drill("SIGTERM while compiling")
def stop_while_compiling(lab: Lab) -> None:
    stopped = lab.train(fault="compile,term")
    assert not stopped.lines
    assert f"stopped after step 0 of {STEPS}" in stopped.said
    lab.resume()


@drill("second signal")
def second_signal(lab: Lab) -> None:
    fault = "step@5,int step@5,pause step@5,term step@5,hang"
    stopped = lab.train("--save-every", "3", fault=fault, code=128 + signal.SIGTERM)
    assert "stopping after this step" in stopped.said
    lab.resume()


@drill("SIGUSR1")
def save_by_signal(lab: Lab) -> None:
    lab.train(fault="step@5,usr1 step@5,pause")
    assert lab.checkpoints() == [5, STEPS]
    lab.assert_exact()


@drill("a file SAVE")
def save_by_file(lab: Lab) -> None:
    lab.run_dir.mkdir()
    (lab.run_dir / "SAVE").touch()
    lab.train()
    assert lab.checkpoints() == [1, STEPS] and not (lab.run_dir / "SAVE").exists()
    lab.assert_exact()


@drill("saves by time")
def save_by_time(lab: Lab) -> None:
    outcome = lab.train("--save-every", "1s", fault="step@5,pause step@9,pause")
    assert {"checkpoint 5", "checkpoint 9"} <= {line.split(":")[0] for line in outcome.said.splitlines()}
    lab.assert_exact()


@drill("clock jumps")
def clock_jumps(lab: Lab) -> None:
    begun, clock = time.monotonic(), lab.jumping_clock()
    jumps = "restore,ahead step@3,back step@4,ahead"
    lab.train("--save-every", "1h", fault=jumps, environment=clock, steps=6)
    assert lab.checkpoints() == [6]
    second = lab.train("--save-every", "1s", fault="step@7,back step@9,pause", environment=clock)
    assert "checkpoint 9: " in second.said
    took = time.monotonic() - begun
    sessions = [json.loads(line) for line in (lab.run_dir / "time.jsonl").read_text().splitlines()]
    assert all(0 <= seconds < took for session in sessions for seconds in list(session.values())[2:])
    assert all(0 < line["step_seconds"] < took for outcome in lab.outcomes for line in outcome.lines)
    assert lab.curve() == list(range(1, STEPS + 1))
    lab.assert_exact()


@drill("clock of process 0", fault="step@5/0,ahead data@6,hang", codes=(-signal.SIGABRT, -signal.SIGABRT))
@drill("clock of process 1", fault="step@5/1,ahead data,pause", codes=(0, 0))
def clock_of_one_of_two(lab: Lab, fault: str, codes: tuple[int, int]) -> None:
    outcomes = lab.pair("--save-every", "3", fault=fault, environment=lab.jumping_clock())
    assert tuple(outcome.code for outcome in outcomes) == codes, outcomes[0].said[-2000:]
    lab.train(mesh=PAIR)
    lab.assert_pair_exact()


@drill("edited data", change=lambda text: text[:-100] + "#" + text[-99:])
@drill("shortened data", change=lambda text: text[: len(text) // 2])
@drill("longer data", change=lambda text: text + "more\n")
def changed_data(lab: Lab, change: Callable[[str], str]) -> None:
    lab.train(steps=4)
    lab.write_data(change((lab.folder / "data.txt").read_text()))
    refused = lab.train(code=2)
    assert refused.last_line.startswith("error: --data data.txt: the data of the checkpoint, but its content has")
    assert refused.last_line.endswith("--accept data goes on so") and not refused.lines
    assert lab.train("--accept", "data", steps=5).resumed_after == 4


@drill("renamed data")
def renamed_data(lab: Lab) -> None:
    lab.train(steps=4)
    (lab.folder / "data.txt").rename(lab.folder / "other.txt")
    refused = lab.train(code=2, data="other.txt")
    assert "--data was ['data.txt:1'] and is ['other.txt:1']; --accept data goes on so" in refused.last_line
    lab.resume("--accept", "data", after=4, data="other.txt")


@drill("other settings")
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
    lab.resume("--save-every", "5", "--keep", "2", "--accumulate", "1", "--sample-every", "100")
    accepted = lab.train("--lr", "0.5", "--accept", "lr", steps=STEPS + 1)
    assert accepted.lines[-1]["learning_rate"] == 0.5


@drill("other meshes")
def other_meshes(lab: Lab) -> None:
    for steps, mesh in ((3, "seq=2"), (6, "data=2,seq=2"), (9, "seq=1"), (STEPS, "data=2,seq=1")):
        lab.train(steps=steps, mesh=mesh)
    lab.assert_exact(rel=1e-5)


@drill("two launches")
def two_launches(lab: Lab) -> None:
    child = lab.start("--steps", str(STEPS), "--save-every", "2", fault="step@6,hang")
    first = child.stdout.readline()
    refused = lab.train(code=2)
    assert f"a folder that no other run is in; process {child.pid} on " in refused.last_line
    child.kill()
    lab.end(child, [first])
    lab.resume()


@drill("moved run-dir")
def moved_run_dir(lab: Lab) -> None:
    lab.train(steps=5)
    (lab.folder / "runs").mkdir()
    lab.run_dir = lab.run_dir.rename(lab.folder / "runs" / "moved")
    lab.resume(after=5)
    # Orbax notes where a checkpoint was committed in a file that nothing reads.
    files = [path for path in lab.run_dir.rglob("*") if path.is_file() and path.name != "commit_success.txt"]
    assert not [path.name for path in files if str(lab.folder).encode() in path.read_bytes()]


@drill("three generations", ends=(4, 8))
@drill("many generations", ends=(1, 2, 3, 7, 11))
@drill("packed documents", ends=(3, 8), flags=("--packing",))
@drill("accumulation", ends=(5,), flags=("--accumulate", "2"))
def generations(lab: Lab, ends: tuple[int, ...], flags: tuple[str, ...] = ()) -> None:
    for start, end in itertools.pairwise((0, *ends, STEPS)):
        outcome = lab.train(*flags, steps=end)
        assert [line["step"] for line in outcome.lines] == list(range(start + 1, end + 1))
    lab.assert_exact(*flags)


@drill("epoch borders")
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


@drill("a finished run")
def finished_run(lab: Lab) -> None:
    lab.train()
    again = lab.train()
    assert again.lines == []
    assert again.last_line == f"finished before: {STEPS} of {STEPS} steps are done; a larger --steps continues"
    lab.outcomes.pop()
    lab.assert_exact()


@drill("broken compile cache")
def broken_compile_cache(lab: Lab) -> None:
    lab.train(steps=5)
    own = shutil.copytree(lab.shared / "cache", lab.folder / "cache")
    for index, path in enumerate(sorted(path for path in own.iterdir() if path.is_file())):
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2] if index % 2 else content[:-9] + b"\0" + content[-8:])
    lab.resume(environment={"JAX_COMPILATION_CACHE_DIR": str(own)})


@drill("curves")
def curves_after_a_kill(lab: Lab) -> None:
    lab.train("--save-every", "4", fault="step@11,kill", code=-signal.SIGKILL)
    lab.resume()
    assert lab.curve() == list(range(1, STEPS + 1))


@drill("compilations")
def compilations(lab: Lab) -> None:
    for steps in (5, STEPS):
        outcome = lab.train("--save-every", "2", steps=steps, environment={"JAX_LOG_COMPILES": "1"})
        assert outcome.said.count("Compiling jit(step)") == 1
    lab.assert_exact()


@drill("memory")
def memory(lab: Lab) -> None:
    peaks, arrays = {}, {}
    for model in ("tiny", "llama-100m"):
        lab.run_dir = lab.folder / model
        flags = ["--seq-len", "32", "--batch-size", "1", "--remat", "none", "--steps", "1"]
        words = ["--platform", "cpu", "--mesh", "seq=2", "--data", "data.txt", "--run-dir", model, "--model", model]
        train = ("train.llama", *words, *flags)
        assert lab.end(lab.module(*train)).code == 0
        peaks[model] = lab.peak_memory(*train), lab.peak_memory("train.export", model, f"{model}-out")
        shapes = {name: re.split(r"[\[,\]]", words.split()[0])[1:-1] for name, words in lab.saved(1)["arrays"].items()}
        arrays = {name: 4 * math.prod(int(size) for size in shape if size) for name, shape in shapes.items()}
    params = sum(size for name, size in arrays.items() if name.startswith("params."))
    for small, large, held in zip(*peaks.values(), (sum(arrays.values()), params), strict=True):
        allowed = 1.2 * held + max(arrays.values())
        assert large - small <= allowed, f"{(large - small) / 2**20:.0f} of {allowed / 2**20:.0f} MiB"


@drill(
    "exception in process 1",
    fault="step@5/1,raise",
    codes=(6, 1),
    said=("error: process 1 (", "FaultError: asked for by FAULT"),
)
@drill(
    "exception in process 0",
    fault="data@5/0,raise",
    codes=(1, 6),
    said=("FaultError: asked for by FAULT", "error: process 0 ("),
)
@drill(
    "exception in an evaluation",
    fault="evaluate@6/1,raise",
    codes=(6, 1),
    said=("error: process 1 (", "FaultError: asked for by FAULT"),
    flags=("--eval-every", "3", "--eval-data", "data.txt", "--eval-batches", "1"),
)
@drill("killed process 1", fault="step@5/1,kill", codes=(6, -9), said=("is gone without a word", ""))
@drill(
    "killed process 0", fault="step@5/0,kill", codes=(-9, 6), said=("", "error: process 0, which listens at localhost:")
)
@drill(
    "stuck process",
    fault="data@8/1,hang",
    codes=(6, 13),
    said=("in the phase", "in the phase data"),
    flags=("--stuck-after", "3"),
)
@drill(
    "absent at the restore",
    fault="restore/1,hang",
    codes=(6, 13),
    said=("in the phase", "in the phase restore"),
    flags=("--stuck-after", "0.2"),
)
@drill("SIGTERM to one of two", fault="step@5/1,term", codes=(0, 0), said=("stopped after step 5", ""))
@drill("SIGTERM in a save of two", fault="save@6/1,term", codes=(0, 0), said=("stopped after step 7", ""))
@drill("SIGTERM to one that compiles", fault="compile/1,term", codes=(0, 0), said=("stopped after step 0", ""))
@drill("SIGUSR1 to one of two", fault="step@5/1,usr1 step@5/1,pause", codes=(0, 0), said=("checkpoint 5: state ", ""))
@drill("slow save of one of two", fault="whole/0,pause", codes=(0, 0), said=(f"checkpoint {STEPS}: state ", ""))
@drill(
    "full disk of one of two",
    fault="save@6/1,full",
    codes=(3, 3),
    said=(f"error: checkpoint {STEPS} was not saved (in another process)", "was not saved"),
)
def one_of_two(
    lab: Lab, fault: str, codes: tuple[int, int], said: tuple[str, str], flags: tuple[str, ...] = ()
) -> None:
    """`said` are the ends of both's lines for people, where they are ours."""
    outcomes = lab.pair("--save-every", "3", *flags, fault=fault)
    for outcome, code, words in zip(outcomes, codes, said, strict=True):
        # Who waits for a process that is stuck may find itself stuck first.
        assert outcome.code == code or (13 in codes and outcome.code == 13), outcome.said[-2000:]
        assert words in outcome.said[-2000:], outcome.said[-2000:]
    if 6 in codes and 13 not in codes:
        assert abs(outcomes[0].ended - outcomes[1].ended) < 15, "the other ended too late"
    lab.train(mesh=PAIR)
    lab.assert_pair_exact()


@drill("slow process")
def slow_process(lab: Lab) -> None:
    first, _ = lab.pair(fault="data@5/1,pause data@6/1,pause")
    slow = {line["step"] for line in first.lines if line["slowest_process"] == 1 and line["own_seconds_max"] > 1}
    assert slow >= {6, 7}
    lab.assert_pair_exact()


@drill("stuck alone")
def stuck_alone(lab: Lab) -> None:
    stuck = lab.train("--save-every", "3", "--stuck-after", "2", fault="data@8,hang", code=13)
    assert "in fault" in stuck.said and "stuck for" in stuck.last_line and "in the phase data" in stuck.last_line
    lab.resume(after=6)


@drill("not finite")
def not_finite(lab: Lab) -> None:
    stopped = lab.train("--lr", "1e30", "--save-every", "2", code=4)
    assert stopped.said.count("and changed nothing; its batch: rows ") == 3
    assert "that makes 3 in a row (--max-bad-steps)" in stopped.last_line
    assert max(stopped.by_step("loss")) == 3 and lab.checkpoints() == [2]


@drill("a step taken twice")
def taken_twice(lab: Lab) -> None:
    lab.resume("--deterministic", "--check-determinism", "2")


@drill("hash seeds")
def hash_seeds(lab: Lab) -> None:
    lab.train(steps=6, environment={"PYTHONHASHSEED": "1"})
    lab.resume(environment={"PYTHONHASHSEED": "2"})


def perform(drill: Drill, shared: Path) -> None:
    """Runs one in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        drill.act(Lab(Path(folder) / "lab", shared), **drill.given)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.drills")
    parser.add_argument("--only", help="drills whose name has this in it")
    parser.add_argument("--kills", type=int, help="kill -9 at so many random times, and nothing else")
    parser.add_argument("--seed", type=int, default=0, help="of --kills")
    parser.add_argument("--workers", type=int, default=2, help="drills at a time")
    arguments = parser.parse_args()
    drills = [drill for drill in DRILLS if (arguments.only or "") in drill.name]
    if arguments.kills:
        rounds = [min(10, arguments.kills - done) for done in range(0, arguments.kills, 10)]
        drills = [
            Drill(f"round {i}", kill_at_random_times, {"kills": kills, "seed": 1000 * arguments.seed + i})
            for i, kills in enumerate(rounds)
        ]
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
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
