"""What XLA makes of distflash_attention for several H200s, compiled by JAX's CUDA plugin without a GPU.

Skipped where the plugin is not: `make build/cuda/.ready` unpacks it.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import plugin


def test_on_four_gpus_messages_travel_behind_kernels_and_no_whole_operand_is_copied():
    try:
        plugin.find()
    except ValueError as error:
        pytest.skip(str(error))
    command = [sys.executable, "-m", "benchmarks.compile", "--workers", "4", "--tokens", "4096"]
    child = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent, check=False)
    assert child.returncode == 0, child.stderr[-2000:]
    order, _, rest = child.stdout.partition("\noutside of kernels and messages:\n")
    kinds = [line.split()[:2] for line in order.splitlines()]
    assert sum(kind == "kernel" for kind, _ in kinds) == 8
    # 4 fetched and 3 returned arrays or pairs of arrays in the largest step.
    assert sum(kind == "start" for kind, _ in kinds) == sum(kind == "done" for kind, _ in kinds) >= 16
    assert not any(kind == "synchronous" for kind, _ in kinds)
    # Halves of heads are cut out to be sent, and results merged; nothing else passes over an operand.
    scopes = [line.split()[-1] for line in rest.partition("\n\n")[0].splitlines()]
    others = [x for x in scopes if not x.endswith(("fetch/slice", "broadcast_in_dim")) and "/merge" not in x]
    assert scopes and others == [scope for scope in others if scope.endswith("reduce_sum")], others
