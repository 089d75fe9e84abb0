"""What the streams of GPUs did in a profile: how long messages and steps took, and which messages kernels waited for.

They are told by the names that executor.py gives: forward_step_0/fetch, forward_step_0/compute, forward_step_1/return.
"""

import re
import statistics
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from jax.profiler import ProfileData

_SCOPE = re.compile(r"(forward|backward)_step_(\d+)/(fetch|compute|return)")
_MICROSECONDS = 1e-3  # of a nanosecond


def find_scope(path: str) -> str:
    """Such as forward_step_0/fetch, of an operation's scopes; "" outside of fetch, compute and return of a step."""
    found = _SCOPE.search(path)
    return found[0] if found else ""


_COLLECTIVES = ("/ppermute", "/all_to_all", "/all_gather", "/reduce_scatter")


class Activity(NamedTuple):
    """What a stream of a GPU did, from start to stop in microseconds.

    op: the operation of the program. path: the scopes it is in. run: a number that one run of an operation on a GPU has
    to itself. destination: the GPU that a copy between peers goes to.
    """

    device: int
    stream: str
    name: str
    op: str
    path: str
    start: float
    stop: float
    run: int = 0
    num_bytes: int | None = None
    destination: int | None = None

    @property
    def scope(self) -> str:
        return find_scope(self.path)

    @property
    def is_message(self) -> bool:
        return self.path.endswith(_COLLECTIVES) and self.scope != ""

    @property
    def is_fill(self) -> bool:
        """Whether it writes the zeros that a worker gets to which nobody sends."""
        return self.name.startswith("Memset")


@dataclass(frozen=True)
class MessageTime:
    """A message on the GPU where it is most exposed: microseconds, median over layers and executions.

    time: of the copy, with the zero fill of a worker to which nobody sends; through NCCL it includes the wait for the
    peer. exposed: all of a synchronous message; else the time that the stream of the kernels had been idle when the
    message ended, during the message. A kernel that waits for a message is preceded by just that; an idle stream that
    takes up work while the message still travels waited for something else. An upper bound: the cause is not recorded.
    """

    scope: str
    op: str
    device: int
    transport: str
    num_bytes: int | None
    time: float
    exposed: float
    is_synchronous: bool

    @property
    def hidden(self) -> float:
        return self.time - self.exposed


@dataclass(frozen=True)
class StepTime:
    """A step on the GPU that idles longest in it: microseconds, median over layers and executions.

    span: from the end of the kernel of the step before (of the first step: from its first fetch) to the end of its own.
    compute: the part in which its stream works, other than on messages. exposed: the part that waits for messages.
    """

    step: str
    device: int
    span: float
    compute: float
    exposed: float

    @property
    def idle_share(self) -> float:
        return 1 - self.compute / self.span


def read(path: Path) -> list[Activity]:
    """The activities of all GPUs in an .xplane.pb file."""
    activities = []
    for plane in ProfileData.from_file(str(path)).planes:
        if not (gpu := re.fullmatch(r"/device:GPU:(\d+)", plane.name)):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream #"):
                continue
            for event in line.events:
                stats = dict(event.stats)
                details = f"{stats.get('memcpy_details', '')} {stats.get('Memset_details', '')}"
                size, destination = (re.search(rf"\b{key}:(\d+)", details) for key in ("(?:size|num_bytes)", "dest"))
                activities.append(
                    Activity(
                        device=int(gpu[1]),
                        stream=line.name,
                        name=event.name,
                        op=str(stats.get("hlo_op", "")),
                        path=str(stats.get("name", "")),
                        start=event.start_ns * _MICROSECONDS,
                        stop=(event.start_ns + event.duration_ns) * _MICROSECONDS,
                        run=int(stats.get("scope_range_id", 0)),
                        num_bytes=int(size[1]) if size else None,
                        destination=int(destination[1]) if destination else None,
                    )
                )
    return activities


def measure(activities: Sequence[Activity]) -> tuple[list[MessageTime], list[StepTime]]:
    """(messages, steps) of a profile, each on the GPU where it costs most, in the order of the table."""
    by_device: dict[int, list[Activity]] = defaultdict(list)
    for x in sorted(activities, key=lambda x: x.start):
        # A copy between peers is recorded on the GPU that sends; the one that receives may wait for it as well.
        for device in {x.device, x.device if x.destination is None else x.destination}:
            by_device[device].append(x)
    sizes = _sizes(activities)
    messages: dict[str, MessageTime] = {}
    steps: dict[str, StepTime] = {}
    for device, own in sorted(by_device.items()):
        main = _main_stream(device, own)
        sent = [_Sent(x, *_wait(x, device, main)) for x in own if x.is_message]
        for x in _message_times(device, sent, sizes):
            if x.op not in messages or x.exposed > messages[x.op].exposed:
                messages[x.op] = x
        for x in _step_times(device, sent, main):
            if x.step not in steps or x.span - x.compute > steps[x.step].span - steps[x.step].compute:
                steps[x.step] = x
    return sorted(messages.values(), key=lambda x: place(x.scope)), sorted(steps.values(), key=lambda x: place(x.step))


class _Sent(NamedTuple):
    """A message that a GPU sends or receives, and when its stream of kernels waited for it: (begin, end)."""

    activity: Activity
    is_synchronous: bool
    wait: tuple[float, float]


def _main_stream(device: int, own: Iterable[Activity]) -> list[Activity]:
    """What runs on the stream that has most to do besides messages: that of the kernels."""
    streams: dict[str, list[Activity]] = defaultdict(list)
    for x in own:
        if x.device == device:
            streams[x.stream].append(x)
    return max(streams.values(), key=lambda xs: sum(x.stop - x.start for x in xs if not x.is_message), default=[])


def _wait(message: Activity, device: int, main: Sequence[Activity]) -> tuple[bool, tuple[float, float]]:
    """(whether it is synchronous, its exposed part), as MessageTime has them; main is sorted by start."""
    if main and (message.device, message.stream) == (device, main[0].stream):
        return True, (message.start, message.stop)
    num_before = bisect_left(main, message.stop, key=lambda x: x.start)
    # On one stream the last to start is the last to stop.
    idle_since = main[num_before - 1].stop if num_before else message.start
    return False, (min(max(message.start, idle_since), message.stop), message.stop)


def _sizes(activities: Iterable[Activity]) -> dict[str, int]:
    """Bytes by operation. NCCL's kernels do not tell them, but zeros do, on a GPU to which nobody sends."""
    totals = Counter[tuple[str, int, int, bool]]()
    for x in activities:
        if x.is_message and x.num_bytes:
            totals[x.op, x.device, x.run, x.is_fill] += x.num_bytes
    return {op: num_bytes for (op, *_), num_bytes in totals.items()}


def _message_times(device: int, sent: Iterable[_Sent], sizes: Mapping[str, int]) -> Iterator[MessageTime]:
    """The medians of each message; XLA can send several arrays as one, and zeros belong to it too."""
    runs: dict[str, dict[tuple[int, int], list[_Sent]]] = defaultdict(lambda: defaultdict(list))
    for x in sent:
        runs[x.activity.op][x.activity.device, x.activity.run].append(x)
    for op, of_op in runs.items():
        groups = list(of_op.values())
        first, is_synchronous, _ = groups[0][0]
        yield MessageTime(
            scope=first.scope,
            op=op,
            device=device,
            transport="zeros" if first.is_fill else "copy" if first.name.startswith("Memcpy") else "kernel",
            num_bytes=sizes.get(op),
            time=statistics.median(sum(x.activity.stop - x.activity.start for x in group) for group in groups),
            exposed=statistics.median(sum(x.wait[1] - x.wait[0] for x in group) for group in groups),
            is_synchronous=is_synchronous,
        )


def _step_times(device: int, sent: Sequence[_Sent], main: Sequence[Activity]) -> Iterator[StepTime]:
    """The medians of each step. What has no step in its name, as a fused merge, counts where it runs."""
    fetches = [x.activity for x in sent if x.activity.scope.endswith("/fetch")]
    busy = [(x.start, x.stop) for x in main if not x.is_message]
    waits = sorted(x.wait for x in sent if x.wait[0] < x.wait[1])
    times: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for step, begin, end in _windows(sorted({*main, *fetches}, key=lambda x: x.start)):
        times[step].append((end - begin, _covered(busy, begin, end), _covered(waits, begin, end)))
    for step, each in times.items():
        yield StepTime(step, device, *(statistics.median(values) for values in zip(*each, strict=True)))


def _windows(activities: Iterable[Activity]) -> Iterator[tuple[str, float, float]]:
    """(step, begin, end) of each run of a step: see StepTime."""
    step, begin, end = "", 0.0, 0.0
    for x in activities:
        own, _, part = x.scope.partition("/")
        if part not in ("fetch", "compute"):
            continue
        if own != step:
            if end > begin:
                yield step, begin, end
            (is_backward, number), (was_backward, last) = place(own), place(step)
            follows = (is_backward, number) == (was_backward, last + 1)
            step, begin = own, end if follows else x.start
            end = begin
        if part == "compute":
            end = x.stop
    if end > begin:
        yield step, begin, end


def _covered(intervals: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    """How much of the time from begin to end some interval covers; they are sorted."""
    total, reached = 0.0, begin
    for start, stop in intervals[max(bisect_right(intervals, (begin,)) - 1, 0) : bisect_left(intervals, (end,))]:
        total += max(0.0, min(stop, end) - max(start, reached))
        reached = max(reached, min(stop, end))
    return total


def place(scope: str) -> tuple[bool, int]:
    """Where a step stands: forward before backward, then by its number; before all others where there is none."""
    found = re.match(r"(forward|backward)_step_(\d+)", scope)
    return (found[1] == "backward", int(found[2])) if found else (False, -2)
