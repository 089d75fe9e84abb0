"""Which messages travel behind kernels; `python -m distflash_jax.overlap RUN_DIR` tells it of a profile.

A program tells the order in which a GPU starts messages, runs kernels and waits; a profile tells how long each took.
Both are read by the names that executor.py gives: forward_step_0/fetch, forward_step_0/compute, forward_step_1/return.
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import jax

from distflash_jax import xla_flags
from distflash_jax.trace import MessageTime, StepTime, find_scope, measure, place, read

_COLLECTIVE = r"(?:collective-permute|all-to-all|all-gather|reduce-scatter)(?:-start|-done)?"
_OPERATION = re.compile(rf"%(\S+) = .*? ({_COLLECTIVE}|custom-call|while)\((?:.*?%([^\s,)]+))?")
_FUSION = re.compile(r" fusion\(.*kind=kCustom, calls=%([^\s,]+)")
_HEADER = re.compile(r"(?:ENTRY )?%(\S+) \(.*\{$")


class Operation(NamedTuple):
    """One of a compiled program; a done has the name of its start, and scope is "" outside distflash_attention."""

    kind: Literal["kernel", "start", "done", "synchronous"]
    name: str
    scope: str


@dataclass(frozen=True)
class Message:
    """A collective of a compiled program; start and done are places in the order, one and the same if synchronous."""

    name: str
    scope: str
    start: int
    done: int
    is_hidden: bool

    @property
    def is_synchronous(self) -> bool:
        return self.start == self.done


def order(compiled_text: str) -> list[Operation]:
    """The collectives of a compiled program and the kernels of distflash_attention, in the order in which they run.

    A kernel is a custom call or a loop in the scope `compute` of a step, or a fusion around one that spares it a copy.
    Computations follow each other as in the text: a message ends in the one in which it starts.
    """
    operations, computation = [], ""
    fused: dict[str, Operation | None] = dict.fromkeys(_FUSION.findall(compiled_text))
    for line in compiled_text.splitlines():
        if header := _HEADER.match(line):
            computation = header[1]
        if (fusion := _FUSION.search(line)) and (kernel := fused[fusion[1]]):
            operations.append(kernel)
        if not (found := _OPERATION.search(line)):
            continue
        name, opcode, operand = found.groups()
        path = re.search(r'op_name="([^"]*)"', line)
        scope = find_scope(path[1] if path else "")
        if opcode.endswith("-start"):
            operations.append(Operation("start", name, scope))
        elif opcode.endswith("-done"):
            operations.append(Operation("done", operand, scope))
        elif re.fullmatch(_COLLECTIVE, opcode):
            operations.append(Operation("synchronous", name, scope))
        elif scope.endswith("/compute"):
            kernel = Operation("kernel", name, scope)
            if computation in fused:
                fused[computation] = kernel
            else:
                operations.append(kernel)
    return operations


def messages(operations: Sequence[Operation]) -> list[Message]:
    """Each message; hidden if some kernel runs between its start and its done."""
    dones = {operation.name: i for i, operation in enumerate(operations) if operation.kind == "done"}
    found = []
    for start, (kind, name, scope) in enumerate(operations):
        if kind in ("start", "synchronous"):
            done = dones[name] if kind == "start" else start
            is_hidden = any(operation.kind == "kernel" for operation in operations[start:done])
            found.append(Message(name, scope, start, done, is_hidden))
    return found


def warning(compiled_text: str) -> str | None:
    """One line on the messages of distflash_attention that no kernel hides, and what to do; None if all are hidden."""
    own = [message for message in messages(order(compiled_text)) if message.scope]
    exposed = [message for message in own if not message.is_hidden]
    if not exposed:
        return None
    scopes = ", ".join(f"{scope} ({n})" for scope, n in Counter(message.scope for message in exposed).items())
    num_processes = jax.process_count()
    lacks_flags = any(message.is_synchronous for message in exposed) or xla_flags.missing(num_processes)
    cost = "the flags are set; `python -m distflash_jax.overlap` tells what it costs"
    advice = xla_flags.how_to_set(num_processes) if lacks_flags else cost
    return f"{len(exposed)} of {len(own)} messages of attention travel behind no kernel: {scopes}; {advice}"


def describe(messages: Sequence[MessageTime], steps: Sequence[StepTime], num_devices: int) -> str:
    """The tables and what to do."""
    lines = [f"{'message':24}{'operation':24}{'MiB':>7}{'GPU':>5}{'µs':>9}{'hidden':>9}{'exposed':>9}"]
    for x in messages:
        size = f"{x.num_bytes / 2**20:.1f}" if x.num_bytes else "–"
        row = f"{x.scope:24}{x.op:24}{size:>7}{x.device:>5}{x.time:9.1f}{x.hidden:9.1f}{x.exposed:9.1f}"
        lines.append(row + ("  synchronous" if x.is_synchronous else ""))
    lines += ["", f"{'step':24}{'GPU':>36}{'µs':>9}{'compute':>9}{'exposed':>9}{'idle':>9}"]
    for x in steps:
        lines.append(f"{x.step:24}{x.device:>36}{x.span:9.1f}{x.compute:9.1f}{x.exposed:9.1f}{x.idle_share:9.1%}")
    return "\n".join([*lines, "", *advise(messages, steps, num_devices)])


def advise(messages: Sequence[MessageTime], steps: Sequence[StepTime], num_devices: int) -> list[str]:
    """What to do, in a line or two."""
    share = sum(x.exposed for x in steps) / sum(x.span for x in steps)
    lines = [f"Messages hold up {share:.1%} of the time."]
    if num_synchronous := sum(x.is_synchronous for x in messages):
        return [*lines, f"{num_synchronous} of {len(messages)} messages are synchronous: {xla_flags.how_to_set(1)}"]
    if num_devices > 1 and any(x.transport == "kernel" for x in messages):
        return [
            *lines,
            f"Kernels send messages, which the copy engines of one process can do: {xla_flags.how_to_set(1)}",
        ]
    # A kernel's time grows with the square of the tokens, that of a message with their number.
    beside = Counter[tuple[bool, int]]()
    for x in messages:
        beside[_beside(x)] += x.time  # pyright: ignore[reportArgumentType]
    waited_for = {_beside(x) for x in messages if x.exposed}
    factor = max((beside[place(x.step)] / x.compute for x in steps if place(x.step) in waited_for), default=0.0)
    if factor > 1:
        return [*lines, f"They outlast the kernels beside them: {factor:.1f} times as many tokens per GPU hide them."]
    if share < 0.01:
        return [*lines, "Nothing to do."]
    return [*lines, "They are shorter than the kernels beside them: a GPU waits for its peer, or for its host."]


def _beside(message: MessageTime) -> tuple[bool, int]:
    """The step whose kernel a message travels behind."""
    is_backward, number = place(message.scope)
    return is_backward, number + message.scope.endswith("/return")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "run_dir", type=Path, help="holds plugins/profile, as --profile-steps and jax.profiler write it"
    )
    run_dir = parser.parse_args().run_dir
    files = sorted(run_dir.glob("plugins/profile/*/*.xplane.pb"), key=lambda file: file.stat().st_mtime)
    if not files:
        return _fail(f"{run_dir}: no profile in plugins/profile; python -m train.llama --profile-steps 3:5 writes one")
    activities = read(files[-1])
    messages, steps = measure(activities)
    if not messages:
        return _fail(
            f"{files[-1]}: names no message on a GPU; it needs two GPUs or more and XLA_FLAGS with "
            "--xla_gpu_enable_command_buffer="
        )
    num_devices = len({x.device for x in activities})
    print(f"{files[-1]}: {num_devices} GPUs; medians over layers and executions on the GPU where it costs most\n")
    print(describe(messages, steps, num_devices))
    return 0


def _fail(sentence: str) -> int:
    print(sentence, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
