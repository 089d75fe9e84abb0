"""The Hopper forward kernel: interpreted on the CPU against the oracle, and lowered to CUDA for an H200."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels import Box, Mask, Operand, dense
from pallas_kernels import hopper_forward as hopper

# name: (T, S, N, K, H), (q_start, k_start, k_stop), is_causal
CASES = {
    "diagonal": ((128, 128, 2, 1, 64), (0, 0, 128), True),
    "far": ((128, 256, 1, 1, 64), (512, 0, 256), True),
    "future": ((64, 64, 2, 1, 64), (0, 512, 1024), True),
    "no task": ((64, 64, 2, 1, 64), (512, 0, 0), True),
    "odd lengths": ((77, 205, 2, 1, 64), (190, 100, 290), True),
    "full": ((72, 160, 2, 2, 64), (0, 0, 160), False),
    "head dim 128": ((128, 192, 1, 1, 128), (64, 0, 192), True),
}


def operands(shape, is_peer=(None, None), boxes=None, num_heads=None):
    T, S, N, K, H = shape
    num_q_heads, num_kv_heads = num_heads or (N, K)
    keys = iter(jax.random.split(jax.random.key(0), 6))
    draw = lambda rows, heads: (jax.random.normal(next(keys), (1, rows, heads, H)) + 0.3).astype(jnp.bfloat16)
    own = (draw(T, num_q_heads), draw(S, num_kv_heads), draw(S, num_kv_heads))
    peer = (draw(T, N), draw(S, K), draw(S, K))
    q_box, kv_box = boxes or (Box(0, T, 0, N), Box(0, S, 0, K))
    return (
        Operand(own[:1], q_box, None if is_peer[0] is None else peer[:1], jnp.bool_(bool(is_peer[0]))),
        Operand(own[1:], kv_box, None if is_peer[1] is None else peer[1:], jnp.bool_(bool(is_peer[1]))),
    )


def assert_matches(queries, keys, mask, detect_races=False):
    (q,), (k, v) = queries.read(), keys.read()
    scale = q.shape[-1] ** -0.5
    out, lse = hopper.forward(
        queries, keys, mask, scale, hopper.Tiles(keys=64), plgpu.InterpretGPUParams(detect_races=detect_races)
    )
    visible = mask.visible(jnp.arange(q.shape[1]), jnp.arange(k.shape[1]))
    exact_out, exact_lse = dense.attention(q, k, v, visible, scale)
    np.testing.assert_allclose(out, exact_out, atol=2e-3 * max(1, float(jnp.abs(exact_out).max())))
    np.testing.assert_allclose(lse, exact_lse, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_interpreted_kernel_matches_the_oracle(name):
    shape, scalars, is_causal = CASES[name]
    assert_matches(*operands(shape), Mask(*map(jnp.int32, scalars), is_causal))


@pytest.mark.parametrize("is_peer", [(True, False), (False, True)])
def test_operands_are_chosen_when_the_kernel_runs_and_without_a_race(is_peer):
    mask = Mask(*map(jnp.int32, (40, 30, 150)), True)
    assert_matches(*operands((64, 128, 2, 1, 64), is_peer), mask, detect_races=True)
    assert not gpu_callbacks.get_races().races_found


def test_boxes_of_rows_and_heads_are_read_in_place():
    boxes = Box(64, 64, 2, 2), Box(0, 128, 1, 1)
    assert_matches(
        *operands((128, 128, 2, 1, 64), (None, None), boxes, num_heads=(4, 2)),
        Mask(*map(jnp.int32, (64, 0, 128)), True),
    )


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", sorted(hopper.TILES))
@pytest.mark.parametrize("num_rows", [1000, 1 << 20])
def test_kernel_lowers_to_cuda_for_an_h200(num_rows, head_dim, dtype, is_causal):
    x = jax.ShapeDtypeStruct((1, num_rows, 8, head_dim), dtype)
    y = jax.ShapeDtypeStruct((1, num_rows, 2, head_dim), dtype)
    number, flag = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.bool_)

    def run(q, k, v, peer_q, peer_k, peer_v, q_start, k_start, k_stop, is_q_peer, is_kv_peer):
        queries = Operand((q,), Box(0, num_rows, 0, 8), (peer_q,), is_q_peer)
        keys = Operand((k, v), Box(0, num_rows, 0, 2), (peer_k, peer_v), is_kv_peer)
        return hopper.forward(queries, keys, Mask(q_start, k_start, k_stop, is_causal), head_dim**-0.5)

    device = AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        traced = jax.jit(run).trace(x, y, y, x, y, y, number, number, number, flag, flag)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
    assert "stablehlo.pad" not in text  # operands are read as they lie
