"""The Triton kernels run on the CPU by Triton's interpreter, against dense attention: errors as JSON, by case.

Run by test_kernels_triton in a process of its own, which the interpreter needs: TRITON_INTERPRET=1 python FILE CASE...
The interpreter wants tensors as PyTorch has them, which is not needed here: numpy's arrays do, with two methods more.
"""

import importlib
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from test_kernels import PAIRS, Pair, as_float32, own, random_arrays
from triton.runtime import interpreter

from pallas_kernels import Box, Operand, dense, merge, triton_attention
from pallas_kernels.triton_attention import Launch
from pallas_kernels.triton_blocks import Blocks

IN_PARTS = "_in_parts"
TYPES = {"float32": "fp32", "float16": "fp16", "int32": "i32"}
BLOCKS = {"forward": Blocks(16, 32, 4, 2), "keys_backward": Blocks(16, 32, 4, 2), "rows_backward": Blocks(32, 16, 4, 2)}


class Tensor:
    """An array as the interpreter takes it."""

    def __init__(self, array: np.ndarray):
        self.array, self.dtype = array, TYPES[array.dtype.name]

    def data_ptr(self) -> int:
        return self.array.ctypes.data


class Executor(interpreter.GridExecutor):
    """Reads and writes the arrays where they lie."""

    def _init_args_hst(self, args_dev: Any, kwargs: Any) -> Any:
        return args_dev, kwargs

    def _restore_args_dev(self, *_: Any) -> None:
        pass


def patch_tensors(tensor: Any, scope: Any, original: Any = interpreter._patch_lang_tensor) -> None:
    """Loop bounds are arrays of one element, which numpy 2.4 and later do not take for numbers."""
    original(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def interpret(launch: Launch) -> tuple[jax.Array, ...]:
    """The results of a kernel; what it does not write is not a number."""
    kernel = getattr(importlib.import_module(launch.module), launch.kernel)
    arrays = [Tensor(np.array(x)) for x in launch.arrays]
    results = [Tensor(np.full(x.shape, np.nan, x.dtype)) for x in launch.results]
    Executor(kernel.fn, kernel.arg_names, (launch.programs,))(*arrays, *results, **launch.constants)
    return tuple(jnp.asarray(x.array) for x in results)


def errors(pair: Pair, dtype: str, queries: Any = None, keys: Any = None) -> list[float]:
    """Of out, lse, dq, dk, dv: the largest difference from dense attention, whose backward has a dlse."""
    q, k, v, dout = random_arrays(pair, dtype)
    scale = pair.H**-0.5
    exact = lambda *x: dense.attention(*x, pair.visible(), scale, pair.softcap)
    (out, lse), pull_back = jax.vjp(exact, *as_float32(q, k, v))
    dlse = jnp.where(lse == -jnp.inf, 0.0, jnp.sin(lse))
    delta = jnp.sum(dout.astype(jnp.float32) * out, axis=-1) - dlse
    options: dict[str, Any] = {"compute_capability": "8.0", "run": interpret}
    queries, keys = queries or own, keys or own
    mask = pair.mask()
    ours = triton_attention.forward(
        queries(q), keys(k, v), mask, scale, pair.softcap, blocks=BLOCKS["forward"], **options
    )
    ours += triton_attention.backward(
        queries(q, dout, lse, delta), keys(k, v), mask, scale, pair.softcap, blocks=BLOCKS, **options
    )
    expected = (out, lse, *pull_back((*as_float32(dout), dlse)))
    return [float(np.max(np.where(x == y, 0, np.abs(x - y)))) for x, y in zip(ours, expected, strict=True)]


def boxed(row: int, num_rows: int, is_peer: bool) -> Any:
    """Operands in the middle of chunks whose other elements, and peers that are not read, are not numbers."""

    def make(*arrays: jax.Array) -> Operand:
        box = Box(row, num_rows, 1, arrays[0].shape[2])
        widths = lambda x: [(0, 0), (row, 3), (1, 2)] + [(0, 0)] * (x.ndim - 3)
        whole = tuple(jnp.pad(x, widths(x), constant_values=jnp.nan) for x in arrays)
        nothing = lambda xs: tuple(jnp.full_like(x, jnp.nan) for x in xs)
        own, peer = (nothing(whole), arrays) if is_peer else (whole, nothing(arrays))
        return Operand(own, box, peer, jnp.array(is_peer))

    return make


def main(names: list[str]) -> None:
    interpreter._patch_lang_tensor = patch_tensors
    found = {}
    with np.errstate(all="ignore"):
        for name in names:
            # In parts, in some of which rows see nothing.
            merge.MAX_KEYS = 32 if name.endswith(IN_PARTS) else 2**20
            pair, dtype = (
                PAIRS.get(name.removesuffix(IN_PARTS), Pair(T=20)),
                "float16" if "float16" in name else "float32",
            )
            if name in ("own_boxes", "peers"):
                sides = [boxed(*place, name == "peers") for place in ((5, pair.T), (2, pair.S))]
                found[name] = errors(pair, dtype, *sides)
            else:
                found[name] = errors(pair, dtype)
    print(json.dumps(found))


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main(sys.argv[1:])
