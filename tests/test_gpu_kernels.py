"""The kernels on a GPU at the sizes they are made for: numbers, repeats, addresses. `pytest --platform cuda`."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import oracle
import pytest
from jaxtyping import Array
from test_kernels import Pair, own, skip_unless_it_runs
from tolerance import assert_close, max_error

from pallas_kernels import IMPLEMENTATIONS, BlockAttention, Box, Mask, Operand, dense

ROOT = Path(__file__).parent.parent
XLA = IMPLEMENTATIONS["xla"]
NAMES = ("out", "lse", "dq", "dk", "dv")
MILLION = 2**20
pytestmark = pytest.mark.gpu(1)


@pytest.fixture(params=["hopper", "triton"])
def kernel(request) -> BlockAttention:
    skip_unless_it_runs(request.param)
    return IMPLEMENTATIONS[request.param]


def chunk(T=4096, S=4096, N=8, K=2, H=128, **others) -> Pair:
    return Pair(T, S, num_keys=S, N=N, K=K, H=H, **others)


CASES = {
    **{f"head_dim_{H}": (chunk(H=H), "bfloat16") for H in (64, 96, 128, 192, 256)},
    "full": (chunk(is_causal=False), "bfloat16"),
    "window": (chunk(window=1000), "bfloat16"),
    "of_many_keys": (chunk(1000, 9000, q_start=8000), "bfloat16"),
    "full_of_many_keys": (chunk(1000, 9000, is_causal=False), "bfloat16"),
    "window_of_many_keys": (chunk(1000, 9000, q_start=8000, window=5000), "bfloat16"),
    "documents": (chunk(documents=(100, 1500, 1531, 3000)), "bfloat16"),
    "softcap": (chunk(softcap=30.0), "bfloat16"),
    "float16": (chunk(), "float16"),
    "end_of_a_quarter_of_a_million_keys": (chunk(64, MILLION // 4, 1, 1, q_start=MILLION // 4 - 64), "bfloat16"),
}
MILLION_KEYS = {f"head_dim_{H}": chunk(64, MILLION, 1, 1, H, q_start=MILLION - 64) for H in (64, 128)}


def inputs(pair: Pair, dtype: str, B: int) -> tuple[Array, ...]:
    return oracle.inputs(oracle.Case(T=pair.T, N=pair.N, K=pair.K, S=pair.S, B=B, H=pair.H, dtype=dtype))


def forward(kernel: BlockAttention, pair: Pair, q, k, v):
    return kernel.forward(own(q), own(k, v), pair.mask(), pair.H**-0.5, pair.softcap)


def backward(kernel: BlockAttention, pair: Pair, q, k, v, dout, lse, delta, deterministic=False):
    queries, scale = own(q, dout, lse, delta), pair.H**-0.5
    return kernel.backward(queries, own(k, v), pair.mask(), scale, pair.softcap, deterministic=deterministic)


def both(kernel: BlockAttention, pair: Pair, q, k, v, dout, dlse, deterministic=False):
    """(out, lse, dq, dk, dv), the gradients given what the forward returned."""
    out, lse = forward(kernel, pair, q, k, v)
    delta = jnp.sum(dout.astype(jnp.float32) * out, axis=-1) - dlse
    return out, lse, *backward(kernel, pair, q, k, v, dout, lse, delta, deterministic)


def exact(pair: Pair, q, k, v, dout, dlse):
    """(out, lse, dq, dk, dv, delta) of dense attention in float32."""
    q, k, v, dout = (x.astype(jnp.float32) for x in (q, k, v, dout))
    visible = pair.mask().visible(jnp.arange(pair.T), jnp.arange(pair.S))
    attention = lambda q, k, v: dense.attention(q, k, v, visible, pair.H**-0.5, pair.softcap)
    (out, lse), pull_back = jax.vjp(attention, q, k, v)
    return out, lse, *pull_back((dout, dlse)), jnp.sum(dout * out, axis=-1) - dlse


def compile_together(*calls: tuple) -> list[Callable]:
    """A program for each (function, *arguments): lowered in turn, as Mosaic GPU must be, compiled in parallel."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(jax.jit(function).lower(*arguments).compile) for function, *arguments in calls]
    return [future.result() for future in futures]


def compare(ours: BlockAttention, pair: Pair, dtype: str, names: Collection[str]) -> None:
    """These results with dense attention's; the backward is given the exact lse and delta, as of the whole row."""
    *arrays, dlse = inputs(pair, dtype, B=1 if pair.S >= MILLION // 4 else 2)
    calls = [(partial(exact, pair), *arrays, dlse)]
    for kernel in (ours, XLA):
        calls.append((partial(forward, kernel, pair), *arrays[:3]))
        calls.append((partial(backward, kernel, pair), *arrays, dlse, dlse))  # lse and delta are like dlse
    run_exact, *runs = compile_together(*calls)
    *expected, delta = run_exact(*arrays, dlse)
    results = [
        (*run_forward(*arrays[:3]), *run_backward(*arrays, expected[1], delta))
        for run_forward, run_backward in (runs[:2], runs[2:])
    ]
    # Of a million keys every 65th, which has each place in a tile in turn: all would take the host too long.
    step = pair.S // 2**14 | 1
    for name, x, plain, y in zip(NAMES, *results, expected, strict=True):
        if name in names:
            rows = slice(None, None, step if name in ("dk", "dv") else 1)
            assert_close(name, x[:, rows], plain[:, rows], y[:, rows], dtype)


@pytest.mark.parametrize("pair, dtype", CASES.values(), ids=CASES)
def test_results_and_gradients_equal_dense_at_real_sizes(kernel, pair, dtype):
    """On activations with a mean and outliers."""
    compare(kernel, pair, dtype, NAMES)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("ends", [(0.1, 30), (30, 0.1)])
def test_scores_that_grow_along_the_keys(kernel, head_dim, ends):
    """Running maxima are replaced again and again, in rows of one warp at different keys."""
    pair = chunk(256, 9000, is_causal=False, H=head_dim)
    *arrays, dlse = inputs(pair, "bfloat16", B=1)
    q, k, v, dout = arrays
    k = (k.astype(jnp.float32) * jnp.linspace(*ends, pair.S)[:, None, None]).astype(k.dtype)
    ours, plain = (jax.jit(partial(forward, x, pair))(q, k, v) for x in (kernel, XLA))
    for name, x, y, z in zip(NAMES, ours, plain, exact(pair, q, k, v, dout, dlse), strict=False):
        assert_close(name, x, y, z, "bfloat16")


@pytest.mark.parametrize("pair", MILLION_KEYS.values(), ids=MILLION_KEYS)
def test_results_and_gradients_equal_dense_at_the_end_of_a_million_keys(kernel, pair):
    compare(kernel, pair, "bfloat16", NAMES)


def test_elements_beyond_two_to_the_31_are_read_and_written(kernel):
    """The last rows of q, dout, out and dq of a million times 17 heads: only there dout, dlse and dq are not zero."""
    small = chunk(64, 64, 17, 1, is_causal=False)
    large = small._replace(T=MILLION)
    q, k, v, dout, dlse = inputs(small._replace(T=MILLION // 256), "bfloat16", B=1)
    last = q[:, -64:], k, v, dout[:, -64:], dlse[:, -64:]
    behind_zeros = lambda x: jnp.pad(x, [(0, 0), (MILLION - 64, 0)] + [(0, 0)] * (x.ndim - 2))

    @jax.jit
    def run(q, k, v, dout, dlse):
        q = jnp.tile(q, (1, 256, 1, 1))
        out, lse, dq, dk, dv = both(kernel, large, q, k, v, behind_zeros(dout), behind_zeros(dlse))
        return (*(x[:, -64:] for x in (out, lse, dq)), dk, dv), jnp.any(dq[:, :-64] != 0)

    ours, has_other_gradients = run(q, *last[1:])
    *expected, _ = exact(small, *last)
    for name, x, plain, y in zip(NAMES, ours, both(XLA, small, *last), expected, strict=True):
        assert_close(name, x, plain, y, "bfloat16")
    assert not has_other_gradients


def test_products_of_float32_are_rounded_to_tf32_only_where_jax_is_told_so():
    """Which is finer than bfloat16."""
    skip_unless_it_runs("triton")
    pair = chunk(1003, 1003)
    arrays = inputs(pair, "float32", B=1)
    ours, plain = (partial(both, IMPLEMENTATIONS[name], pair) for name in ("triton", "xla"))
    runs = compile_together(*((function, *arrays) for function in (ours, plain, partial(exact, pair))))
    ieee, fine, expected = (run(*arrays) for run in runs)
    with jax.default_matmul_precision("tensorfloat32"):
        tf32 = jax.jit(ours)(*arrays)
    coarse = jax.jit(plain)(*(x.astype(jnp.bfloat16) for x in arrays[:4]), arrays[4])
    for name, x, plain_x, y, plain_y, z in zip(NAMES, ieee, fine, tf32, coarse, expected, strict=False):
        assert_close(name, x, plain_x, z, "float32")
        assert_close(name, y, plain_y, z, "bfloat16")
        assert max_error(y, z) > max_error(x, z), name


@pytest.mark.parametrize("head_dim, deterministic", [(64, False), (128, False), (256, False), (128, True)])
def test_a_hundred_repeats_are_bitwise_equal(kernel, head_dim, deterministic):
    """But for a dq of the Hopper kernel, whose additions come in no fixed order."""
    pair = chunk(1003, 1003, H=head_dim)
    arrays = inputs(pair, "bfloat16", B=2)
    run = jax.jit(partial(both, kernel, pair, deterministic=deterministic))
    first = run(*arrays)
    assert all(jnp.isfinite(x).all() for x in first)
    for _ in range(99):
        for name, x, y in zip(NAMES, first, run(*arrays), strict=True):
            if name == "dq" and not deterministic and kernel is IMPLEMENTATIONS["hopper"]:
                assert jnp.abs(x - y).max() <= 1e-3 * jnp.abs(x).max(), name
            else:
                assert (x == y).all(), name


def attend_with_peers(kernel: BlockAttention) -> None:
    """Forward and backward of an odd length, on operands that lie here and on a peer's."""
    q, k, v, dout, dlse = oracle.inputs(oracle.Case(T=130, B=1, H=64, dtype="bfloat16"))

    @jax.jit
    def run(is_peer, q, k, v, dout, dlse):
        operand = lambda *arrays: Operand(arrays, Box(0, 130, 0, arrays[0].shape[2]), arrays, is_peer)
        mask = Mask(jnp.int32(0), jnp.int32(0), jnp.int32(130), is_causal=True)
        out, lse = kernel.forward(operand(q), operand(k, v), mask, 0.125)
        delta = jnp.sum(dout.astype(jnp.float32) * out, axis=-1) - dlse
        return kernel.backward(operand(q, dout, lse, delta), operand(k, v), mask, 0.125)

    for is_peer in (False, True):
        jax.block_until_ready(run(jnp.array(is_peer), q, k, v, dout, dlse))


# What is printed tells a tool that does not run here from a kernel that fails.
UNDER_SANITIZER = """
import sys, jax
jax.block_until_ready(jax.numpy.ones(8) + 1)
print("attached", flush=True)
sys.path.append("tests")
import test_gpu_kernels
test_gpu_kernels.attend_with_peers(test_gpu_kernels.IMPLEMENTATIONS[sys.argv[1]])
print("finished", flush=True)
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["hopper", "triton"])
def test_no_address_is_invalid(name):
    """Says compute-sanitizer, where it runs."""
    skip_unless_it_runs(name)
    if shutil.which("compute-sanitizer") is None:
        pytest.skip("compute-sanitizer is not on PATH")
    # Errors of the driver are not counted: JAX asks it for what may not be there. Each array has an allocation of its
    # own, so that its end is an end.
    command = ["compute-sanitizer", "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9"]
    environment = os.environ | {"JAX_PLATFORMS": "cuda", "XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
    child = subprocess.run(
        [*command, sys.executable, "-c", UNDER_SANITIZER, name],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    message = "\n".join((child.stdout + child.stderr).splitlines()[-40:])
    if "attached" not in child.stdout:
        pytest.skip(f"compute-sanitizer does not run here: {message}")
    assert child.returncode == 0 and "finished" in child.stdout, message
