"""Time functions in turns within one run, and keep what was measured as rows of a CSV file."""

import csv
import datetime
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

RESULTS = Path(__file__).parent / "results"
FIELDS = (
    *("benchmark", "case", "implementation", "workers", "mode", "metric", "unit"),
    *("p20", "p50", "p80", "bound", "gpu", "jax", "commit", "date"),
)


class Quantiles(NamedTuple):
    p20: float
    p50: float
    p80: float


def time_in_turns(functions: dict[str, Callable[[], object]], rounds: int = 7, calls: int = 3) -> dict[str, Quantiles]:
    """Seconds a call of each function: warmed up twice, then measured alternately, `calls` calls at a time."""
    for run in functions.values():
        jax.block_until_ready(run())
        jax.block_until_ready(run())
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, run in functions.items():
            start = time.perf_counter()
            result = [run() for _ in range(calls)]
            jax.block_until_ready(result)
            seconds[name].append((time.perf_counter() - start) / calls)
    return {name: Quantiles(*np.quantile(values, (0.2, 0.5, 0.8)).tolist()) for name, values in seconds.items()}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Appends rows, completed by the machine, the versions, the commit and the date; `bound` must be given."""
    commit = (
        os.environ.get("COMMIT")
        or subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
    )
    common = {
        "gpu": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "commit": commit,
        "date": datetime.date.today().isoformat(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer: csv.DictWriter[str] = csv.DictWriter(file, FIELDS, lineterminator="\n")
        if is_new:
            writer.writeheader()
        for row in rows:
            writer.writerow({key: _short(value) for key, value in (row | common).items()})


def _short(value: Any) -> Any:
    return f"{value:.5g}" if isinstance(value, float) else value
