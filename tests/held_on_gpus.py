"""Memory of attention on H200s that need not be there: by held.py, and as XLA allocates it. A row for each case.

`python tests/held_on_gpus.py 4 --strategies ring ulysses`; burst-nodes is burst over two axes. In place of the Hopper
kernels, which take long to compile, are calls with the same operands and results, which is all that XLA sees of them.
Bytes: as predicted, the most that lives at a time beside operands and results, and temp_size_in_bytes.
"""

import argparse
import tempfile
from pathlib import Path

import jax
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import Mesh

from benchmarks import plugin
from benchmarks.compile import compile_attention
from distflash_jax import xla_flags
from distflash_jax.cost import Shape
from distflash_jax.held import held
from distflash_jax.schedule import STRATEGIES
from distflash_jax.spread import Spread

CASES = [*STRATEGIES[1:], "burst-nodes"]


def stand_in(_, *, out_type, **options):
    """In place of plgpu.kernel: a call with these arrays, of which references come last and are written to."""

    def call(*operands):
        refs = [x for x in operands if hasattr(jax.typeof(x), "inner_aval")]
        arrays = [*operands[: len(operands) - len(refs)], *(ref[...] for ref in refs)]
        types = [*out_type, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays[len(arrays) - len(refs) :])]
        aliases = {len(operands) - 1 - i: len(types) - 1 - i for i in range(len(refs))}
        results = jax.ffi.ffi_call("mosaic_gpu_v2", types, input_output_aliases=aliases)(*arrays)
        for ref, result in zip(refs, results[len(out_type) :], strict=True):
            ref[...] = result
        return results[: len(out_type)]

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workers", type=int)
    parser.add_argument("--strategies", nargs="*", choices=CASES, default=CASES)
    parser.add_argument("--modes", nargs="*", choices=("forward", "backward"), default=("forward", "backward"))
    parser.add_argument("--heads", type=int, nargs=2, default=(32, 8), help="of queries, and of keys")
    parser.add_argument("--tokens", type=int, default=4096, help="of each GPU")
    parser.add_argument("--kernels", action="store_true", help="no stand-ins")
    arguments = parser.parse_args()
    P, halved = arguments.workers, {"hybrid", "burst-nodes"} & {*arguments.strategies}
    if P < 2 or (halved and (P % 2 or P < 4)):
        parser.error(f"workers {P}: at least 2; even and at least 4 for hybrid and burst-nodes, which have two nodes")
    try:
        library = plugin.find()
    except ValueError as error:
        parser.error(str(error))
    xla_flags.apply(xla_flags.choose() | ({} if arguments.kernels else {"xla_gpu_mock_custom_calls": "true"}))
    if not arguments.kernels:
        plgpu.kernel = stand_in
    with tempfile.TemporaryDirectory() as folder:
        gpus = np.array(plugin.devices(P, library, plugin.make_driver(Path(folder))))
    for name in arguments.strategies:
        strategy = name.removesuffix("-nodes")
        workers = (2, P // 2) if name in halved else (P,)
        mesh = Mesh(gpus.reshape(workers), ("node", "seq")[-len(workers) :])
        spread = Spread(strategy, Shape(P * arguments.tokens, *arguments.heads), workers)
        for mode in arguments.modes:
            compiled = compile_attention(
                mesh, tokens=P * arguments.tokens, heads=arguments.heads, strategy=strategy, mode=mode
            )
            memory = compiled.memory_analysis()
            assert memory is not None
            lives = memory.peak_memory_in_bytes - memory.argument_size_in_bytes - memory.output_size_in_bytes
            print(name, P, *arguments.heads, mode, held(spread, mode), lives, memory.temp_size_in_bytes, flush=True)


if __name__ == "__main__":
    main()
