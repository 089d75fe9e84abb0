"""Time functions in turns within one run, and keep what was measured as rows of a CSV file."""

import csv
import datetime
import os
import subprocess
import time
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

RESULTS = Path(__file__).parent / "results"
TURN = 0.1  # seconds in which one function is called over and over
ROUNDS = (3, 7)  # fewest and most turns of each function
TOTAL = 1.0  # seconds that all turns of one function may take, unless there are the fewest
FIELDS = (
    *("benchmark", "case", "implementation", "workers", "mode", "metric", "unit"),
    *("p20", "p50", "p80", "bound", "gpu", "jax", "commit", "date"),
)


def count_gpus() -> int:
    """Of this machine, as far as CUDA_VISIBLE_DEVICES lets them be seen; without a process of CUDA on them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (
        len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
        if visible is None
        else len(visible.replace(",", " ").split())
    )


class Quantiles(NamedTuple):
    p20: float
    p50: float
    p80: float


def plan_turns[Name: Hashable](seconds: dict[Name, float]) -> tuple[int, dict[Name, int]]:
    """(rounds, calls a turn of each function), where one call of each takes so many seconds."""
    calls = {name: max(1, round(TURN / once)) for name, once in seconds.items()}
    longest = max(calls[name] * once for name, once in seconds.items())
    return min(max(int(TOTAL / longest), ROUNDS[0]), ROUNDS[1]), calls


def time_in_turns[Name: Hashable](functions: dict[Name, Callable[[], object]]) -> dict[Name, Quantiles]:
    """Seconds a call of each function: warmed up twice, then measured alternately, in turns of about TURN seconds.

    Half a turn that is not counted comes before each: what ran last decides how warm the GPU is. The calls of a turn
    are queued: the host counts only where it takes longer to start a call than to run it.
    """
    once = {}
    for name, run in functions.items():
        _time(run, 1)
        once[name] = _time(run, 1)
    rounds, calls = plan_turns(once)
    seconds: dict[Name, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, run in functions.items():
            _time(run, -(-calls[name] // 2))
            seconds[name].append(_time(run, calls[name]))
    return {name: quantiles(values) for name, values in seconds.items()}


def quantiles(values: Sequence[float]) -> Quantiles:
    return Quantiles(*np.quantile(values, (0.2, 0.5, 0.8)).tolist())


def _time(run: Callable[[], object], calls: int) -> float:
    """Seconds a call. Only the last result is kept: a thousand would not fit."""
    start = time.perf_counter()
    for _ in range(calls):
        result = run()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / calls


def newest_rows(path: Path, num_workers: int = 1) -> dict[tuple[str, str, str], dict[str, str]]:
    """The last row that was written of each (case, implementation, mode) on so many GPUs."""
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["workers"] == str(num_workers)]
    return {(row["case"], row["implementation"], row["mode"]): row for row in rows}


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
