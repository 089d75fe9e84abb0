"""What NVIDIA's assembler makes of the Hopper kernels, without a GPU: `make assemble`.

For each entry of the table of tile sizes (--candidates: also for those that benchmarks.tune tries) a line: bytes of
registers a thread that are spilled to memory, and what the assembler warns of. C7512 to C7514 say that it runs all
matrix products of a kernel one after the other, because registers are short or change under a running product: such a
kernel is slow whatever else it does, and the exit code is 1.

Needs a C compiler, and the library of JAX's CUDA plugin: from jax[cuda12] or jax[cuda13], or named by --plugin. Its
entry point for compiling a Mosaic GPU kernel is not public and may change.
"""

import argparse
import dataclasses
import functools
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax

from benchmarks import plugin
from benchmarks.kernel import OURS, block_functions, random_inputs
from benchmarks.tune import label, make_case, title
from pallas_kernels import IMPLEMENTATIONS
from pallas_kernels.block_sizes import ALL_KINDS, CANDIDATES, HEAD_DIMS, TABLE, Blocks, Key

DIRECTIONS = ("forward", "backward", "dq")
SERIALIZED = {"C7512", "C7513", "C7514"}
COMPILE = """
import ctypes, sys
compile = ctypes.CDLL(sys.argv[1]).MosaicGpuCompile
compile.argtypes, compile.restype = [ctypes.c_char_p, ctypes.c_int], ctypes.c_void_p
module = sys.stdin.buffer.read()
compile(module, len(module))
"""


class Report(NamedTuple):
    """spills: bytes a thread. warnings: numbers of the assembler's, such as C7512."""

    spills: int
    warnings: frozenset[str]


def read(text: str) -> Report:
    """The report in what the assembler printed of one kernel.

    Raises:
        ValueError: it printed none.
    """
    spills = re.findall(r"(\d+) bytes spill stores", text)
    if not spills:
        raise ValueError(f"the assembler printed no report: {' '.join(text.split())[-300:]}")
    # C7519 tells of an instruction that costs nothing.
    return Report(max(map(int, spills)), frozenset(re.findall(r"C7\d\d\d", text)) - {"C7519"})


def modules(key: Key, blocks: Blocks) -> Iterator[bytes]:
    """The Mosaic GPU modules of a call with these blocks; of a deterministic backward, that which makes dq."""
    direction, _, dtype, _ = key
    kernel = IMPLEMENTATIONS[OURS]
    if direction != "dq":
        function = functools.partial(getattr(kernel, direction), blocks=blocks)
        kernel = dataclasses.replace(kernel, **{direction: function})
    case = make_case(key, tokens=4096, heads=4)
    function = block_functions(case, kernel)["deterministic" if direction == "dq" else direction]
    inputs = jax.eval_shape(functools.partial(random_inputs, case, dtype))
    lowered = jax.jit(function).trace(inputs).lower(lowering_platforms=("cuda",))
    name = {"forward": "hopper_forward", "backward": "hopper_backward", "dq": "hopper_dq"}[direction]
    program = lowered.compiler_ir()
    assert program is not None
    pending = [program.operation]
    while pending:
        operation = pending.pop()
        pending += [op.operation for region in operation.regions for block in region.blocks for op in block.operations]
        if "call_target_name" in operation.attributes and "mosaic_gpu" in str(operation.attributes["call_target_name"]):
            module = operation.attributes["mhlo.backend_config"]["module"].value_bytes
            if name.encode() in module:
                yield module


def assemble(module: bytes, library: Path, driver: Path) -> Report:
    environment = os.environ | {"LD_LIBRARY_PATH": str(driver), "MOSAIC_GPU_DUMP_PTXAS": "1"}
    child = [sys.executable, "-c", COMPILE, str(library)]
    run = subprocess.run(child, input=module, capture_output=True, env=environment, check=False)
    return read((run.stdout + run.stderr).decode(errors="replace"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directions", nargs="*", choices=DIRECTIONS, default=DIRECTIONS)
    parser.add_argument("--head-dims", nargs="*", type=int, choices=HEAD_DIMS, default=HEAD_DIMS)
    parser.add_argument("--kinds", nargs="*", choices=ALL_KINDS, default=ALL_KINDS, help="of mask")
    parser.add_argument("--candidates", action="store_true")
    parser.add_argument("--plugin", type=Path, help="xla_cuda_plugin.so")
    arguments = parser.parse_args()
    try:
        library = arguments.plugin or plugin.find()
    except ValueError as error:
        parser.error(str(error))
    num_serialized = 0
    with tempfile.TemporaryDirectory() as folder:
        plugin.make_driver(Path(folder))
        keys = itertools.product(arguments.directions, arguments.head_dims, ("bfloat16",), arguments.kinds)
        for key in filter(TABLE.__contains__, keys):
            others = CANDIDATES.get(key[:2], ()) if arguments.candidates else ()
            for blocks in (TABLE[key], *others):
                for module in modules(key, blocks):
                    report = assemble(module, library, Path(folder))
                    is_serialized = bool(report.warnings & SERIALIZED)
                    num_serialized += is_serialized and blocks == TABLE[key]
                    warnings = " ".join(sorted(report.warnings)) + " products one after the other" * is_serialized
                    print(
                        f"{title(key)} {report.spills:5} bytes  {label(blocks, TABLE[key]):40} {warnings}", flush=True
                    )
    sys.exit(num_serialized > 0)


if __name__ == "__main__":
    main()
