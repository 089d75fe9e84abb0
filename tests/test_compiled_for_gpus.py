"""What XLA makes of distflash_attention for several H200s, compiled by JAX's CUDA plugin without a GPU.

Skipped where the plugin is not: `make build/cuda/.ready` unpacks it.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import plugin

ROOT = Path(__file__).parent.parent


def run(*command: str) -> str:
    """What Python prints, with XLA's optimizations, which conftest.py switches off."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
    child = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=ROOT, env=environment, check=False
    )
    assert child.returncode == 0, child.stderr[-2000:]
    return child.stdout


@pytest.fixture(autouse=True)
def _needs_the_plugin():
    try:
        plugin.find()
    except ValueError as error:
        pytest.skip(str(error))


def test_on_four_gpus_messages_travel_behind_kernels_and_no_whole_operand_is_copied():
    output = run("-m", "benchmarks.compile", "--workers", "4", "--tokens", "4096")
    order, _, rest = output.partition("\noutside of kernels and messages:\n")
    kinds = [line.split()[:2] for line in order.splitlines()]
    assert sum(kind == "kernel" for kind, _ in kinds) == 8
    # 4 fetched and 3 returned arrays or pairs of arrays in the largest step.
    assert sum(kind == "start" for kind, _ in kinds) == sum(kind == "done" for kind, _ in kinds) >= 16
    assert not any(kind == "synchronous" for kind, _ in kinds)
    # Halves of heads are cut out to be sent, and results merged; nothing else passes over an operand.
    scopes = [line.split()[-1] for line in rest.partition("\n\n")[0].splitlines()]
    others = [x for x in scopes if not x.endswith(("fetch/slice", "broadcast_in_dim")) and "/merge" not in x]
    assert scopes and others == [scope for scope in others if scope.endswith("reduce_sum")], others
    allocated, predicted = map(int, re.findall(r"\btemp_size_in_bytes=(\d+)", output))
    assert predicted == pytest.approx(allocated, rel=0.1)


ON_ONE_GPU = """
import tempfile
from pathlib import Path
import numpy as np
from jax.sharding import Mesh
from benchmarks import compile, plugin
with tempfile.TemporaryDirectory() as folder:
    gpus = plugin.devices(1, plugin.find(), plugin.make_driver(Path(folder)))
    print(compile.compile_attention(Mesh(np.array(gpus), "seq"), tokens=4096).as_text())
"""


def test_on_one_gpu_delta_is_summed_in_a_pass_of_its_own():
    """Not where a kernel's operand is put together from it: there each thread would walk along a row by itself."""
    passes = run("-c", ON_ONE_GPU).split("\n}\n")
    sums = [x for x in passes if re.search(r" reduce\(", x)]
    assert sums and not any(re.search(r" (concatenate|pad|select)\(", x) for x in sums)


CHECKSUM = """
import tempfile
from pathlib import Path
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from benchmarks import plugin
from train import checksum
with tempfile.TemporaryDirectory() as folder:
    gpus = plugin.devices(2, plugin.find(), plugin.make_driver(Path(folder)))
sharding = NamedSharding(Mesh(np.array(gpus), "seq"), P(None, "seq"))
arrays = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((32000, 768), (12, 768, 2048), (12, 2048, 768))] * 3
compiled = checksum._sums((sharding,) * len(arrays)).lower(arrays).compile()
print(compiled.memory_analysis().temp_size_in_bytes, compiled.as_text().count(" while("))
"""


def test_a_checksum_keeps_no_array_of_hashes_and_has_no_loop():
    num_bytes, num_loops = map(int, run("-c", CHECKSUM).split())
    assert num_bytes < 2**20 and num_loops == 0


@pytest.mark.parametrize(
    ("num_workers", "kv_heads", "strategies"),
    [(4, 8, ("ulysses", "all_gather", "hybrid")), (3, 32, ("ring", "zigzag"))],
)
def test_memory_that_is_held_is_within_ten_percent_of_what_is_allocated(num_workers, kv_heads, strategies):
    command = ("tests/held_on_gpus.py", str(num_workers), "--heads", "32", str(kv_heads), "--strategies", *strategies)
    rows = [line.split() for line in run(*command).splitlines()]
    assert len(rows) == 2 * len(strategies)
    for *case, predicted, allocated in rows:
        assert int(predicted) == pytest.approx(int(allocated), rel=0.1), case
