"""The Triton kernels without a GPU: interpreted against dense attention, assembled, lowered on a mesh.

On a GPU test_kernels and test_gpu_kernels run them like the others.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_distflash_attention import attend
from test_kernels import own

from benchmarks import assemble_triton
from distflash_jax import attention
from pallas_kernels import IMPLEMENTATIONS, BlockAttention, Choice, Mask, triton_attention, triton_blocks
from pallas_kernels.block_sizes import KINDS

TESTS = Path(__file__).parent
needs_triton = pytest.mark.skipif(
    not triton_attention.is_installed(), reason="jax-triton is not installed: pip install 'distflash_jax[triton]'"
)
INTERPRETED = (
    "own_boxes", "peers", "float16", "diagonal_of_other_lengths", "future", "padded_tail", "one_row_and_one_key",
    "one_head_of_keys", "window_across_chunks", "window_not_causal", "documents_after_padding",
    "documents_in_a_window", "softcap", "head_dim_72", "future_in_parts", "window_across_chunks_in_parts",
    "documents_in_a_window_in_parts", "float16_in_parts",
)  # fmt: skip


@functools.cache
def errors() -> dict[str, list[float]]:
    """Of each case, by one process: what the interpreter patches would stay."""
    command = [sys.executable, str(TESTS / "interpret_triton.py"), *INTERPRETED]
    paths = os.pathsep.join((str(TESTS.parent), str(TESTS)))
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr[-2000:]
    return json.loads(child.stdout)


@needs_triton
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", INTERPRETED)
def test_interpreted_kernels_equal_dense(name):
    """Out, lse, dq, dk, dv."""
    assert max(errors()[name]) < (5e-3 if "float16" in name else 1e-5), errors()[name]


@needs_triton
@pytest.mark.timeout(300)
@pytest.mark.parametrize("architecture", [80, 86, 90])
def test_kernels_fit_without_spills(architecture):
    """`python -m benchmarks.assemble_triton` looks at all of the table."""
    for direction in triton_blocks.DIRECTIONS:
        launch = assemble_triton.find_launch(direction, 128, "bfloat16", "causal", architecture)
        report = assemble_triton.assemble(launch)
        assert report.spills == 0, direction
        assert report.shared_memory <= triton_blocks.SHARED_MEMORY[architecture], direction


def gradients(num_workers: int) -> jax.stages.Traced:
    """Of distributed attention by the Triton kernels, under vmap, for which jax-triton has no rule."""
    q, k = (jax.ShapeDtypeStruct((2, 1, 2049, heads, 64), jnp.bfloat16) for heads in (4, 2))
    loss = lambda q, k, v: attend(num_workers)(q, k, v)[0].astype(jnp.float32).sum()
    return jax.jit(jax.vmap(jax.grad(loss, argnums=(0, 1, 2)))).trace(q, k, k)


@pytest.fixture
def triton_is_chosen(monkeypatch):
    monkeypatch.setattr(attention, "which_implementation", lambda *_, **__: Choice("triton", "for the test"))
    monkeypatch.setattr(triton_attention, "local_compute_capability", lambda: "8.0")


@needs_triton
@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_workers", [1, 3])
def test_the_kernels_lower_on_a_mesh(num_workers, triton_is_chosen):
    """Where JAX types what differs between workers."""
    from jax._src.lib import gpu_triton

    if not hasattr(gpu_triton, "TritonKernel"):
        pytest.skip("a plugin of JAX for CUDA is not installed")
    text = gradients(num_workers).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("triton_kernel_call") >= 3 * (num_workers + 1) // 2


def test_three_kernels_are_compiled_whatever_the_table(triton_is_chosen, monkeypatch):
    """Diagonal, far pair, half of the heads, own or peer's operands: all that differs is read at run time."""
    compiled, calls = set(), []

    def record(launch):
        calls.append(launch)
        compiled.add((launch.kernel, launch.blocks, *launch.constants.items()))
        assert launch.arrays[4].dtype == jnp.bfloat16 and {x.dtype for x in launch.arrays[:2]} == {jnp.dtype("int32")}
        return tuple(jnp.zeros(x.shape, x.dtype) for x in launch.results)

    functions = (functools.partial(x, run=record) for x in (triton_attention.forward, triton_attention.backward))
    monkeypatch.setitem(IMPLEMENTATIONS, "triton", BlockAttention(*functions))
    gradients(4)
    assert len(calls) > 9 and len(compiled) == 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("direction", triton_blocks.DIRECTIONS)
def test_as_many_programs_run_as_there_are_tiles(direction, kind):
    """Of 4096 rows and keys, 4 heads and 2."""
    launch = assemble_triton.find_launch(direction, 96, "bfloat16", kind, 89)
    heads, size = (2, launch.blocks.keys) if direction == "keys_backward" else (4, launch.blocks.rows)
    assert launch.programs == heads * 4096 // size
    assert launch.constants["BLOCK_H"] == 128 and launch.blocks == triton_blocks.TABLE[direction, 128, 16, 86]


def test_a_gpu_without_jax_triton_is_told_what_brings_it(monkeypatch):
    choice = Choice("xla", "for every platform; triton needs jax-triton: pip install 'distflash_jax[triton]'")
    monkeypatch.setattr(attention, "which_implementation", lambda *_, **__: choice)
    q = jnp.ones((1, 8, 1, 16))
    with pytest.warns(RuntimeWarning, match=r"attention runs in plain JAX: .*pip install 'distflash_jax\[triton\]'"):
        jax.eval_shape(attend(1), q, q, q)


def test_products_of_float32_are_rounded_to_tf32_where_jax_is_told_so():
    precision = lambda: assemble_triton.find_launch("forward", 64, "float32", "full", 80).constants["PRECISION"]
    assert precision() == "ieee"
    with jax.default_matmul_precision("tensorfloat32"):
        assert precision() == "tf32"


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"dtype": jnp.float64},
            "dtypes of q float64 and k float64: must be the same and bfloat16, float16 or float32",
        ),
        ({"num_heads": 3}, "3 query heads: must be a multiple of the 2 key/value heads"),
        ({"head_dim": 257}, "head dim 257: must be at most 256"),
        ({"scale": 0.0}, "scale=0.0: must be positive"),
        ({"softcap": 0.0}, "softcap=0.0: must be positive or None"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_the_kernels_do_not_take_is_refused(change, message):
    call = {"dtype": jnp.bfloat16, "num_heads": 4, "head_dim": 64, "scale": 0.1, "softcap": None} | change
    array = lambda heads: np.zeros((1, 8, heads, call["head_dim"]), call["dtype"])
    q, k = array(call["num_heads"]), array(2)
    with pytest.raises(ValueError, match=message):
        triton_attention.forward(
            own(q), own(k, k), Mask(0, 0, 8, True), call["scale"], call["softcap"], compute_capability="8.0"
        )
