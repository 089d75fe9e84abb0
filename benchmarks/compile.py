"""Compile distflash_attention for H200s that need not be there, and say what hides its messages: `make compile`.

Prints, in the order in which a GPU runs them, kernels, messages and all else that touches as many bytes as the smallest
operand, and the memory of a GPU beside its prediction. The exit code is 1 if a message travels behind no kernel, as all
of `ulysses` do.
"""

import argparse
import functools
import math
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import plugin
from benchmarks.attention import MODES, STRATEGIES
from distflash_jax import distflash_attention, overlap, xla_flags
from distflash_jax.cost import Shape
from distflash_jax.held import held
from distflash_jax.schedule import Strategy
from distflash_jax.spread import Spread
from distflash_jax.table import BOTH

WIDTHS = {"pred": 1, "s32": 4, "u32": 4, "f32": 4, "bf16": 2, "f16": 2}


def compile_attention(
    mesh: Mesh, *, tokens: int, heads: tuple[int, int] = (32, 8), head_dim: int = 128, strategy: Strategy = "balanced",
    mode: str = "forward_backward",
) -> jax.stages.Compiled:  # fmt: skip
    """Causal bfloat16 attention of so many tokens in total, for all GPUs of a mesh, sharded along all of its axes.

    mode: forward, backward (of the residuals and dout) or forward_backward.
    """
    sharding = NamedSharding(mesh, P(None, mesh.axis_names))
    place = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    q, k = (place((1, tokens, num_heads, head_dim), jnp.bfloat16) for num_heads in heads)
    axis = mesh.axis_names if len(mesh.shape) > 1 else str(mesh.axis_names[0])
    attention: Callable[..., Any] = functools.partial(
        distflash_attention, mesh=mesh, axis=axis, strategy=strategy, implementation="hopper"
    )
    vjp = lambda q, k, v: jax.vjp(attention, q, k, v)[1]
    program, inputs = attention, (q, k, k)
    if mode == "forward_backward":
        program, inputs = lambda q, k, v, dout: vjp(q, k, v)(dout), (q, k, k, q)
    elif mode == "backward":
        residuals = jax.tree.map(lambda x: place(x.shape, x.dtype), jax.eval_shape(vjp, q, k, k))
        program, inputs = lambda residuals, dout: residuals(dout), (residuals, q)
    return jax.jit(program).trace(*inputs).lower().compile()


def copies(compiled_text: str, num_bytes: int) -> list[tuple[str, str, int]]:
    """(operation, scope, bytes) of all that is neither kernel nor message and makes an array of so many bytes."""
    found = []
    for line in compiled_text[compiled_text.index("ENTRY ") :].splitlines():
        operation = re.search(r"= (\(?.*?\)?) ([a-z-]+)\(", line)
        if operation is None or re.search("permute|all-|scatter|tuple|parameter|bitcast|custom-call", operation[2]):
            continue
        sizes = [WIDTHS.get(kind, 1) * math.prod(map(int, shape.split(",")))
                 for kind, shape in re.findall(r"(\w+)\[([\d,]+)\]", operation[1])]  # fmt: skip
        scope = re.search(r'op_name="([^"]*)"', line)
        if sum(sizes) >= num_bytes:
            found.append((operation[2], scope[1] if scope else "", sum(sizes)))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8192, help="of each GPU")
    parser.add_argument("--heads", type=int, nargs=2, default=(32, 8), help="of queries, and of keys")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--strategy", choices=STRATEGIES, default="balanced")
    parser.add_argument("--mode", choices=MODES, default="forward_backward")
    parser.add_argument("--plugin", type=Path, help="xla_cuda_plugin.so")
    arguments = parser.parse_args()
    xla_flags.apply(xla_flags.choose())
    with tempfile.TemporaryDirectory() as folder:
        try:
            library = arguments.plugin or plugin.find()
        except ValueError as error:
            parser.error(str(error))
        gpus = plugin.devices(arguments.workers, library, plugin.make_driver(Path(folder)))
        compiled = compile_attention(
            Mesh(np.array(gpus), ("seq",)),
            tokens=arguments.workers * arguments.tokens,
            heads=cast(tuple[int, int], tuple(arguments.heads)),
            head_dim=arguments.head_dim,
            strategy=arguments.strategy,
            mode=arguments.mode,
        )
    text = compiled.as_text()
    assert text is not None
    operations = overlap.order(text)
    for kind, name, scope in operations:
        print(f"{kind:12} {scope:28} {name}")
    smallest = 2 * arguments.tokens * arguments.heads[1] * arguments.head_dim // 2
    print("\noutside of kernels and messages:")
    for operation, scope, size in copies(text, smallest):
        print(f"{size / 2**20:9.0f} MiB  {operation:10} {scope[-70:]}")
    shape = Shape(arguments.workers * arguments.tokens, *arguments.heads, H=arguments.head_dim)
    spread = Spread(arguments.strategy, shape, (arguments.workers,))
    directions = BOTH if arguments.mode == "forward_backward" else BOTH[:1]
    print(f"\n{compiled.memory_analysis()}\npredicted temp_size_in_bytes={max(held(spread, x) for x in directions)}")
    exposed = [message for message in overlap.messages(operations) if not message.is_hidden]
    print(f"{len(exposed)} messages travel behind no kernel", *(message.scope for message in exposed))
    return int(bool(exposed))


if __name__ == "__main__":
    sys.exit(main())
