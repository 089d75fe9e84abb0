"""The training command on 1 .. N GPUs at a small size: `python -m benchmarks.train_step`.

Each run is the real command. The bound of a speed is the speed on one GPU times the workers; that of a loss is the loss
of the same run on CPUs, which it has to equal.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np

from benchmarks.harness import RESULTS, write_rows

FLAGS = ["--seq-len", "8192", "--batch-size", "1", "--steps", "20"]
CASE = "8k_tiny"


def run(platform: str, num_workers: int) -> list[dict[str, float]]:
    """The JSON line of each step."""
    with tempfile.TemporaryDirectory() as run_dir:
        mesh = ["--platform", platform, "--mesh", f"seq={num_workers}", "--dtype", "float32"]
        command = [sys.executable, "-m", "train.llama", *FLAGS, *mesh, "--run-dir", run_dir]
        child = subprocess.run(command, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in child.stdout.splitlines()]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS / "train_step.csv")
    arguments = parser.parse_args()
    on_cpu = run("cpu", 1)[-1]["loss"]
    rows, one = [], 0.0
    for num_workers in range(1, jax.device_count() + 1):
        steps = run("cuda", num_workers)
        speeds = [step["tokens_per_second"] for step in steps[3:]]
        one = one or statistics.median(speeds)
        loss = steps[-1]["loss"]
        common = {"benchmark": "train_step", "case": CASE, "implementation": "balanced", "workers": num_workers}
        common |= {"mode": "step"}
        p20, p50, p80 = np.quantile(speeds, (0.2, 0.5, 0.8)).tolist()
        rows += [
            common
            | {"metric": "tokens_per_second", "unit": "1/s", "p20": p20, "p50": p50, "p80": p80}
            | {"bound": one * num_workers},
            common | {"metric": "loss_at_20", "unit": "nats", "p20": loss, "p50": loss, "p80": loss, "bound": on_cpu},
        ]
        print(f"{num_workers} GPU(s): {p50:,.0f} tokens/s, loss {loss:.5f} (on CPU {on_cpu:.5f})", flush=True)
    write_rows(arguments.out, rows)


if __name__ == "__main__":
    main()
