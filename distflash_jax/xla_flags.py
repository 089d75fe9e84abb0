"""XLA flags by which messages travel behind kernels: `export XLA_FLAGS="$(python -m distflash_jax.xla_flags)"`.

XLA reads its flags once, when JAX first looks for devices, and aborts at one that it does not know: with --check each
flag is tried in a process of its own against the jaxlib that is installed; the exit code is 1 if one is refused.
`python -m train.llama` sets them itself. A flag that XLA_FLAGS names already is left as it is.
"""

import argparse
import os
import subprocess
import sys
import warnings
from collections.abc import Mapping
from typing import NamedTuple

from jax._src import xla_bridge  # nothing public says whether JAX has started


class Flag(NamedTuple):
    """needs_one_process: it is of use, or allowed, only where one process has all GPUs."""

    name: str
    value: str
    purpose: str
    needs_one_process: bool = False


FLAGS = (
    Flag(
        "xla_gpu_collective_permute_mode",
        "peer",
        "messages go through the copy engines, which take no multiprocessor from the kernels",
        needs_one_process=True,
    ),
    Flag(
        "xla_gpu_experimental_parallel_collective_overlap_limit",
        "16",
        "all messages of a step travel at the same time, up to nine in the backward of three workers or more",
    ),
)
# CUDA graphs hide in a profile which operation a kernel belongs to: without them, kernels are launched one by one.
PROFILING = {"xla_gpu_enable_command_buffer": ""}
# Sums in a fixed order, and kernels that are chosen without measuring: the same bits in every run.
DETERMINISTIC = {"xla_gpu_deterministic_ops": "true"}


def choose(*, num_processes: int = 1) -> dict[str, str]:
    """The flags for a job of so many processes: one with all GPUs of a host, or one for each GPU."""
    return {flag.name: flag.value for flag in FLAGS if num_processes == 1 or not flag.needs_one_process}


def add(flags: Mapping[str, str], text: str) -> str:
    """XLA_FLAGS of this text with those flags added that it does not name."""
    named = _named(text)
    return " ".join([*text.split(), *(f"--{name}={value}" for name, value in flags.items() if name not in named)])


def _named(text: str) -> set[str]:
    return {word.removeprefix("--").partition("=")[0] for word in text.split()}


def missing(num_processes: int) -> list[str]:
    """Those flags for a job of so many processes that XLA_FLAGS does not name now, whatever their value."""
    named = _named(os.environ.get("XLA_FLAGS", ""))
    return [name for name in choose(num_processes=num_processes) if name not in named]


def how_to_set(num_processes: int) -> str:
    option = f" --num-processes {num_processes}" if num_processes > 1 else ""
    return f'export XLA_FLAGS="$(python -m distflash_jax.xla_flags{option})" before JAX starts'


def warn_if_missing(num_processes: int) -> None:
    """Warns of flags that XLA_FLAGS does not name; by Python's own rule once in a process."""
    if names := missing(num_processes):
        warnings.warn(
            f"XLA_FLAGS lacks {', '.join(names)}: unless compiler_options has them, attention waits for messages; "
            f"{how_to_set(num_processes)}",
            RuntimeWarning,
            stacklevel=2,
        )


def apply(flags: Mapping[str, str]) -> None:
    """Adds flags to XLA_FLAGS of this process; warns where JAX has looked for devices already and XLA reads no more."""
    text = os.environ.get("XLA_FLAGS", "")
    with_flags = add(flags, text)
    if with_flags == " ".join(text.split()):
        return
    if xla_bridge.backends_are_initialized():
        warnings.warn("XLA flags are read when JAX starts, which it has: set them before", RuntimeWarning, stacklevel=2)
    os.environ["XLA_FLAGS"] = with_flags


def refusal(name: str, value: str) -> str | None:
    """What the installed jaxlib says of a flag that it does not take, in one line; None if it does."""
    environment = os.environ | {"XLA_FLAGS": f"--{name}={value}", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", "import jax; jax.devices()"]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if child.returncode == 0:
        return None
    lines = (child.stdout + child.stderr).splitlines()
    return next((line for line in lines if name in line), f"exit code {child.returncode}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="try each flag against the installed jaxlib")
    parser.add_argument("--num-processes", type=int, default=1, help="of the job; 1: one process has all GPUs")
    arguments = parser.parse_args()
    if not arguments.check:
        print(add(choose(num_processes=arguments.num_processes), os.environ.get("XLA_FLAGS", "")))
        return 0
    purposes = {flag.name: flag.purpose for flag in FLAGS} | dict.fromkeys(PROFILING, "profiles that name operations")
    purposes |= dict.fromkeys(DETERMINISTIC, "the same bits in every run")
    refused = {}
    for name, value in (choose(num_processes=arguments.num_processes) | PROFILING | DETERMINISTIC).items():
        refused[name] = refusal(name, value)
        verdict = "accepted" if refused[name] is None else f"REFUSED: {refused[name]}"
        print(f"--{name}={value}  {verdict}  ({purposes[name]})", flush=True)
    return int(any(refused.values()))


if __name__ == "__main__":
    sys.exit(main())
