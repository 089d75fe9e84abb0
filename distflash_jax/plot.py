"""Draw when a strategy's kernels and messages would run: `python -m distflash_jax.plot --workers 8 --tokens 262144`.

Times are predictions: see cost.py for the rates and workers.py for the order. The text goes to the terminal; --out
NAME.png adds a picture (with the extra `plot`), --out NAME.json a trace for https://ui.perfetto.dev. The machine can be
described: --machine, and in its place --link, --network, --workers-per-node and --tflops. Of more than 64 workers some
are drawn.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from distflash_jax import schedule
from distflash_jax.cost import MACHINES, Kernel, Machine, Rate, Shape
from distflash_jax.spread import Spread
from distflash_jax.table import BOTH, Direction
from distflash_jax.timeline import Timeline, simulate, simulate_strategy
from distflash_jax.workers import KINDS, Event

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DIRECTIONS: dict[str, tuple[Direction, ...]] = {
    "forward": ("forward",),
    "backward": ("backward",),
    "both": BOTH,
}
# Steps are numbered in base 36; behind them the numbers begin anew.
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def summary(timeline: Timeline) -> str:
    """Two lines: what runs where; how long it takes and what is lost."""
    shape = timeline.shape
    return (
        f"{timeline.name}, {timeline.num_workers} workers, {shape.T} tokens, heads {shape.N}/{shape.K}, "
        f"{' and '.join(timeline.directions)} on {timeline.machine.name}\n"
        f"predicted: {1e3 * timeline.makespan:.2f} ms, "
        f"efficiency {timeline.efficiency:.3f}, up to {1e3 * max(timeline.exposed):.2f} ms waiting for messages, "
        f"idle {100 * sum(timeline.idle) / timeline.num_workers:.1f}%"
    )


def text(timeline: Timeline, width: int = 100) -> str:
    """The summary, and for each worker a line of each kind that there is.

    A column of work shows what takes most of it; one of messages the last of those that touch it.
    """
    kinds = [kind for kind in KINDS if kind != "merge" and any(event.kind == kind for event in timeline.events)]
    rows = {(worker, kind): ["."] * width for worker in timeline.shown for kind in kinds}
    taken: dict[tuple[int, int], float] = {}
    column = timeline.makespan / width
    for event in timeline.events:
        is_work = event.kind in ("compute", "merge")
        row = rows[event.worker, "compute" if is_work else event.kind]
        sign = "+" if event.kind == "merge" else DIGITS[event.step % len(DIGITS)]
        for x in range(int(event.start / column), min(int(event.stop / column) + 1, width)):
            share = min(event.stop, (x + 1) * column) - max(event.start, x * column)
            if not is_work:
                row[x] = sign
            elif share > max(taken.get((event.worker, x), 0.0), column / 4):
                row[x], taken[event.worker, x] = sign, share
    lines = [summary(timeline), f"a digit is a step, + a merge, . nothing; a column is {1e6 * column:.0f} microseconds"]
    for (worker, kind), row in rows.items():
        label = f"worker {worker}" if kind == kinds[0] else ""
        lines.append(f"{label:11}{kind:8}{''.join(row)}")
    return "\n".join(lines)


def figure(timeline: Timeline) -> "Figure":
    """A lane for each worker: kernels in the colour of their step, merges dark, and messages below, red where exposed.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:  # only this picture needs it
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("--out: a picture needs matplotlib: pip install 'distflash_jax[plot]'") from error
    colours, num_workers = colormaps["tab20"].colors, len(timeline.shown)  # pyright: ignore
    lanes = {"compute": (0.0, 0.4), "merge": (0.0, 0.4), "fetch": (0.42, 0.2), "return": (0.64, 0.2)}
    drawing = Figure(figsize=(12, 1.2 + 0.5 * num_workers), layout="constrained")
    axes = drawing.subplots()
    for kind, (offset, height) in lanes.items():
        events = [event for event in timeline.events if event.kind == kind]
        for row, worker in enumerate(timeline.shown):
            own = [event for event in events if event.worker == worker]
            axes.broken_barh(
                [(1e3 * x.start, 1e3 * (x.stop - x.start)) for x in own],
                (row + offset, height),
                facecolors=["0.25" if kind == "merge" else colours[x.step % len(colours)] for x in own],
                edgecolors=["#D00000" if x.exposed else "none" for x in own],
            )
    axes.set_yticks([row + 0.42 for row in range(num_workers)], [f"worker {w}" for w in timeline.shown])
    axes.set_ylim(num_workers, 0)
    axes.set_xlim(0, 1e3 * timeline.makespan)
    axes.set_xlabel("milliseconds, predicted; of a worker from above: kernels and merges, fetches, returns")
    axes.set_title(summary(timeline), fontsize=8)
    return drawing


def trace(timeline: Timeline) -> dict[str, Any]:
    """The events in Chrome's trace format, times in microseconds: a process for each worker, a thread for each kind."""
    names = [
        {"ph": "M", "name": f"{name}_name", "pid": worker, "tid": tid, "args": {"name": label}}
        for worker in timeline.shown
        for name, tid, label in (
            ("process", 0, f"worker {worker}"),
            *(("thread", tid, kind) for tid, kind in enumerate(KINDS)),
        )
    ]
    return {"displayTimeUnit": "ms", "traceEvents": names + [_traced(event) for event in timeline.events]}


def _traced(event: Event) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": event.name,
        "cat": event.kind,
        "pid": event.worker,
        "tid": KINDS.index(event.kind),
        "ts": 1e6 * event.start,
        "dur": 1e6 * (event.stop - event.start),
        "args": {"direction": event.direction, "step": event.step, "exposed_us": 1e6 * event.exposed},
    }


def save(timeline: Timeline, path: Path) -> None:
    """Writes the picture or the trace that the name asks for.

    Raises:
        ValueError: the name ends in neither .png nor .json; matplotlib is not installed.
    """
    if path.suffix == ".png":
        figure(timeline).savefig(path, dpi=150)
    elif path.suffix == ".json":
        path.write_text(json.dumps(trace(timeline)))
    else:
        raise ValueError(f"--out {path}: must end in .png or .json")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, without the usage."""
        raise ValueError(message)


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(prog="python -m distflash_jax.plot", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True, help="of the whole sequence")
    parser.add_argument("--heads", type=int, default=32, help="of the queries")
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--window", type=int, help="tokens that a token sees, itself included; of tables only")
    parser.add_argument(
        "--strategy", choices=[name for name in schedule.STRATEGIES if name != "auto"], default="balanced"
    )
    parser.add_argument("--machine", choices=MACHINES, default="h200-nvlink")
    parser.add_argument(
        "--workers-per-node", type=int, help="of one node: for hybrid, and for the double ring of burst"
    )
    parser.add_argument("--link", type=float, help="GB/s each way to others of a node")
    parser.add_argument("--network", type=float, help="GB/s each way of each GPU to other nodes")
    parser.add_argument("--tflops", type=float, help="of the kernels, forward and backward, on chunks of any length")
    parser.add_argument("--direction", choices=DIRECTIONS, default="forward")
    parser.add_argument("--out", type=Path, help="NAME.png or NAME.json")
    return parser.parse_args(words)


def _machine(arguments: argparse.Namespace) -> Machine:
    """That of --machine, changed as other flags say."""
    machine = MACHINES[arguments.machine]
    changes: dict[str, Any] = {name: 1e9 * value for name in ("link", "network") if (value := getattr(arguments, name))}
    if arguments.workers_per_node:
        changes["workers_per_node"] = arguments.workers_per_node
    if arguments.tflops:
        rate = Rate(1e12 * arguments.tflops, 0)
        changes["forward"] = changes["backward"] = Kernel(rate, rate)
    machine = dataclasses.replace(machine, name=machine.name + "*" * bool(changes), **changes)
    if machine.workers_per_node and arguments.workers > machine.workers_per_node and not machine.network:
        raise ValueError(
            f"--network: is missing, for {arguments.workers} workers of which nodes have {machine.workers_per_node}"
        )
    return machine


def _draw(arguments: argparse.Namespace) -> Timeline:
    """The timeline that the flags ask for."""
    machine, directions = _machine(arguments), DIRECTIONS[arguments.direction]
    shape = Shape(arguments.tokens, arguments.heads, arguments.kv_heads, arguments.head_dim, window=arguments.window)
    strategy, workers, size = arguments.strategy, arguments.workers, machine.workers_per_node
    if arguments.window is not None:
        if strategy not in schedule.TABLES:
            raise ValueError(f"--window: must be left out with --strategy {strategy}, which is no table")
        rows = -(-arguments.tokens // workers)
        pairs = schedule.visible_pairs(workers, rows, rows, first=1 - arguments.window, last=0)
        table = schedule.choose(strategy, workers, kv_heads=arguments.kv_heads, pairs=pairs)
        return simulate(table, shape, machine, directions)
    sizes = (workers,)
    if strategy == "hybrid" or (strategy == "burst" and size and workers > size):
        if not size or workers % size:
            raise ValueError(f"--workers-per-node {size}: must divide --workers {workers} with --strategy {strategy}")
        sizes = (workers // size, size)
    return simulate_strategy(Spread(strategy, shape, sizes), machine, directions)


def main(words: Iterable[str] | None = None) -> int:
    """The exit code: 2 after one line that says what is wrong."""
    try:
        arguments = _parse(None if words is None else list(words))
        for name in (
            *("workers", "tokens", "heads", "kv_heads", "head_dim", "window"),
            *("workers_per_node", "link", "network", "tflops"),
        ):
            value, least = getattr(arguments, name), 0 if name in ("link", "network", "tflops") else 1
            if value is not None and (value < least or value == 0):
                words_ = "positive" if not least else "at least 1"
                raise ValueError(f"--{name.replace('_', '-')} {value}: must be {words_}")
        timeline = _draw(arguments)
        print(text(timeline))
        if arguments.out:
            save(timeline, arguments.out)
            print(arguments.out)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
