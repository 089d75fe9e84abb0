"""What NVIDIA's assembler makes of the Triton kernels, without a GPU: `python -m benchmarks.assemble_triton`.

For each entry of the table of tile sizes and each kind of mask a line: registers of a thread, bytes of them that are
spilled to memory, KiB of shared memory. The exit code is 1 where an entry does not fit in shared memory, or spills more
than two registers, as the forward does in two entries for documents on sm90 (head dim 64, and 128 in float32).

Needs Triton, which brings the assembler: pip install 'distflash_jax[triton]'.
"""

import argparse
import functools
import importlib
import itertools
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from benchmarks.kernel import block_functions, random_inputs
from benchmarks.tune import make_case
from pallas_kernels import BlockAttention, triton_attention
from pallas_kernels.block_sizes import KINDS
from pallas_kernels.triton_attention import Launch
from pallas_kernels.triton_blocks import DIRECTIONS, HEAD_DIMS, KINDS_OF_GPU, SHARED_MEMORY

SPILLS = 8  # bytes of a thread
TYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "int32": "i32"}


class Report(NamedTuple):
    """registers: of a thread. spills: bytes of a thread. shared_memory: bytes of a program."""

    registers: int
    spills: int
    shared_memory: int


def find_launch(direction: str, head_dim: int, dtype: str, kind: str, architecture: int) -> Launch:
    """The call of a kernel with the entry of the table for such a mask, of two query heads to each of the keys."""
    found: list[Launch] = []

    def record(launch: Launch) -> tuple[Array, ...]:
        found.append(launch)
        return tuple(jnp.zeros(x.shape, x.dtype) for x in launch.results)

    options: dict[str, Any] = {"compute_capability": f"{architecture / 10}", "run": record}
    forward = functools.partial(triton_attention.forward, **options)
    backward = functools.partial(triton_attention.backward, **options)
    case = make_case((direction, head_dim, dtype, kind), tokens=4096, heads=4)._replace(K=2)
    function = block_functions(case, BlockAttention(forward, backward))[
        "forward" if direction == "forward" else "backward"
    ]
    jax.eval_shape(lambda: function(random_inputs(case, dtype)))
    return next(launch for launch in found if launch.kernel == direction)


def assemble(launch: Launch) -> Report:
    """What becomes of a kernel, by the compiler and the assembler that Triton has."""
    triton: Any = importlib.import_module("triton")
    compiler: Any = importlib.import_module("triton.compiler")
    backends: Any = importlib.import_module("triton.backends.compiler")
    kernel = getattr(importlib.import_module(launch.module), launch.kernel)
    arrays = [*launch.arrays, *launch.results]
    signature = {name: f"*{TYPES[x.dtype.name]}" for name, x in zip(kernel.arg_names, arrays, strict=False)}
    signature |= dict.fromkeys(launch.constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(arrays))}  # as jax-triton has it
    source = compiler.ASTSource(kernel, signature, launch.constants, aligned)
    architecture = int(launch.compute_capability.replace(".", ""))
    options = {"num_warps": launch.blocks.warps, "num_stages": launch.blocks.stages} | triton_attention.BACKEND_OPTIONS
    compiled = triton.compile(source, target=backends.GPUTarget("cuda", architecture, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(compiled.asm["ptx"])
        assembler = importlib.import_module("triton.backends.nvidia.compiler").get_ptxas(architecture).path
        name = f"sm_{architecture}{'a' * (architecture >= 90)}"
        command = [assembler, "-v", f"--gpu-name={name}", path, "-o", "/dev/null"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spills = (re.findall(pattern, text)[0] for pattern in (r"Used (\d+) reg", r"(\d+) bytes spill stores"))
    return Report(int(registers), int(spills), compiled.metadata.shared)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directions", nargs="*", choices=DIRECTIONS, default=DIRECTIONS)
    parser.add_argument("--head-dims", nargs="*", type=int, choices=HEAD_DIMS, default=HEAD_DIMS)
    parser.add_argument(
        "--dtypes", nargs="*", choices=("bfloat16", "float16", "float32"), default=("bfloat16", "float32")
    )
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=KINDS, help="of mask")
    parser.add_argument("--architectures", nargs="*", type=int, default=(80, 86, 89, 90), help="such as 80 for sm80")
    arguments = parser.parse_args()
    if not triton_attention.is_installed():
        parser.error("needs Triton: pip install 'distflash_jax[triton]'")
    num_bad = 0
    for dtype, direction, head_dim, architecture, kind in itertools.product(
        arguments.dtypes, arguments.directions, arguments.head_dims, arguments.architectures, arguments.kinds
    ):
        launch = find_launch(direction, head_dim, dtype, kind, architecture)
        report = assemble(launch)
        is_too_large = report.shared_memory > SHARED_MEMORY[KINDS_OF_GPU.get(launch.compute_capability, 86)]
        num_bad += is_too_large or report.spills > SPILLS
        blocks = launch.blocks
        print(
            f"{direction:14} {head_dim:3} {dtype:8} sm{architecture} {kind:8} {blocks.rows:3} x {blocks.keys:3}, "
            f"{blocks.warps} warps, {blocks.stages} stages: {report.registers:3} registers, {report.spills:4} bytes "
            f"spilled, {report.shared_memory // 1024:3} KiB{' too large' * is_too_large}",
            flush=True,
        )
    sys.exit(num_bad > 0)


if __name__ == "__main__":
    main()
