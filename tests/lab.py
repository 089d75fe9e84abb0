"""Where a drill takes place: the real command in a folder of its own, under faults, and what must hold afterwards.

Five things are compared with a run that was left alone: losses by step, the checksum of the state at the end, the
batches that were seen, exit code and last line, and that nothing half-written stays.
"""

import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parent.parent
SMALL = [
    *("--platform", "cpu", "--seq-len", "32", "--hidden-size", "16", "--intermediate-size", "16"),
    *("--num-hidden-layers", "1", "--num-attention-heads", "2", "--num-key-value-heads", "1", "--head-dim", "8"),
    *("--warmup-steps", "2"),
]
STEPS = 12
PAIR = "data=2,seq=1"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run of the command ended."""

    code: int
    lines: list[dict[str, Any]]
    said: str
    ended: float

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

    def write_data(self, text: str | None = None) -> None:
        (self.folder / "data.txt").write_text(text or (ROOT / "train" / "step.py").read_text())

    def start(self, *flags: str, mesh: str = "seq=2", data: str = "data.txt", **options: Any) -> subprocess.Popen:
        """The command as a child, in this folder."""
        run_dir = str(self.run_dir.relative_to(self.folder))
        words = ("--mesh", mesh, "--data", data, "--run-dir", run_dir)
        return self.module("train.llama", *SMALL, *words, *flags, **options)

    def module(self, *words: str, fault: str = "", environment: dict[str, str] | None = None) -> subprocess.Popen:
        """Any module as a child, in this folder."""
        ours = {
            "FAULT": fault,
            "PYTHONPATH": str(ROOT),
            "JAX_COMPILATION_CACHE_DIR": str(self.shared / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        }
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        environment = os.environ | ours | (environment or {})
        return subprocess.Popen([sys.executable, "-m", *words], **pipes, text=True, env=environment, cwd=self.folder)

    def jumping_clock(self) -> dict[str, str]:
        """The environment in which the faults `ahead` and `back` move the wall clock."""
        library = str(self.folder / "clock.so")
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, str(ROOT / "tests" / "clock.c"), "-ldl"], check=True)
        return {"LD_PRELOAD": library}

    def peak_memory(self, *words: str) -> int:
        """The most bytes that a module had in memory, which ends well."""
        child = self.module(*words)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        assert child.returncode == 0, child.communicate()[1]
        child.communicate()
        return 1024 * usage.ru_maxrss

    def end(self, child: subprocess.Popen, begun: list[str] | None = None, timeout: float = 280) -> Outcome:
        """Waits for a child; `begun` are lines that were read before."""
        try:
            out, said = child.communicate(timeout=timeout)
        finally:
            child.kill()
        # A line may be cut by a kill.
        lines = [json.loads(line) for line in [*(begun or []), *out.splitlines()] if line.rstrip().endswith("}")]
        self.outcomes.append(Outcome(child.returncode, lines, said, time.monotonic()))
        return self.outcomes[-1]

    def train(self, *flags: str, code: int = 0, steps: int = STEPS, **options: Any) -> Outcome:
        """Runs the command to its end, which has this exit code."""
        outcome = self.end(self.start("--steps", str(steps), *flags, **options))
        assert outcome.code == code, f"exit code {outcome.code} instead of {code}: {outcome.said[-2000:]}"
        return outcome

    def resume(self, *flags: str, after: int | None = None, **options: Any) -> Outcome:
        """Runs the command to its end, after this step if given, and all so far is exact."""
        outcome = self.train(*flags, **options)
        assert after is None or outcome.resumed_after == after, outcome.resumed_after
        self.assert_exact()
        return outcome

    def pair(self, *flags: str, **options: Any) -> tuple[Outcome, Outcome]:
        """Runs the command as two processes of a device each to its end."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        job = (*("--steps", str(STEPS)), *flags, "--coordinator", f"localhost:{port}", "--num-processes", "2")
        children = [self.start(*job, "--process-id", str(i), mesh=PAIR, **options) for i in (0, 1)]
        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(self.end, children)
        return first, second

    def assert_pair_exact(self) -> None:
        """As `assert_exact`, for the sums of two processes, of which the order is another."""
        self.assert_exact(golden=self.undisturbed(mesh=PAIR), rel=1e-6)

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

    def curve(self) -> list[int]:
        """Steps of the loss in TensorBoard's files."""
        events = EventAccumulator(str(self.run_dir))
        events.Reload()
        return [event.step for event in events.Scalars("loss")]

    def checkpoints(self) -> list[int]:
        return sorted(int(path.name) for path in (self.run_dir / "checkpoints").iterdir() if path.name.isdigit())

    def largest_file(self, step: int) -> Path:
        files = (path for path in (self.run_dir / "checkpoints" / str(step)).rglob("*") if path.is_file())
        return max(files, key=lambda path: path.stat().st_size)
