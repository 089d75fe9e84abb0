"""The Hopper forward kernel: interpreted on the CPU against the oracle, and lowered to CUDA for an H200."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels import Box, Mask, Operand, block_sizes, dense, merge
from pallas_kernels import hopper_forward as hopper


def document_ids(length, *starts):
    """[1, length]: 1 for the first document, 0 for what lies before it."""
    return jnp.asarray(np.searchsorted(starts, np.arange(length), side="right").astype(np.int32))[None]


SMALL_TILES = block_sizes.ForwardBlocks(keys=64)
# name: (T, S, N, K, H), (q_start, k_start, k_stop), what else the mask has, softcap
CASES = {
    "diagonal": ((128, 128, 2, 1, 64), (0, 0, 128), {}, None),
    "far": ((128, 256, 1, 1, 64), (512, 0, 256), {}, None),
    "future": ((64, 64, 2, 1, 64), (0, 512, 1024), {}, None),
    "no task": ((64, 64, 2, 1, 64), (512, 0, 0), {}, None),
    "odd lengths": ((77, 205, 2, 1, 64), (190, 100, 290), {}, None),
    "full": ((72, 160, 2, 2, 64), (0, 0, 160), {"is_causal": False}, None),
    "head dim 128": ((128, 192, 1, 1, 128), (64, 0, 192), {}, None),
    "head dim 96": ((64, 64, 1, 1, 96), (0, 0, 64), {}, None),
    "window": ((64, 256, 1, 1, 64), (200, 0, 256), {"window": 70}, None),
    "window, not causal": ((100, 200, 1, 1, 64), (50, 0, 200), {"window": 30, "is_causal": False}, None),
    "documents": (
        (200, 200, 1, 1, 64),
        (0, 0, 200),
        {"segment_ids": (document_ids(200, 30, 40, 170), document_ids(200, 30, 40, 170))},
        None,
    ),
    "softcap": ((128, 128, 1, 1, 64), (0, 0, 128), {}, 2.0),
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


def assert_matches(queries, keys, mask, softcap=None, tiles=SMALL_TILES):
    scale = queries.own[0].shape[-1] ** -0.5
    boxes = queries.box, keys.box

    @jax.jit
    def both(queries, keys, mask):
        """(kernel's, oracle's) results; one program, since each operation would be compiled by itself without."""
        queries, keys = (operand._replace(box=box) for operand, box in zip((queries, keys), boxes, strict=True))
        interpret = plgpu.InterpretGPUParams(detect_races=True)
        ours = hopper.forward(queries, keys, mask, scale, softcap, blocks=tiles, interpret=interpret)
        (q,), (k, v) = queries.read(), keys.read()
        visible = mask.visible(jnp.arange(q.shape[1]), jnp.arange(k.shape[1]))
        return ours, dense.attention(q, k, v, visible, scale, softcap)

    without_boxes = queries._replace(box=None), keys._replace(box=None)
    (out, lse), (exact_out, exact_lse) = jax.block_until_ready(both(*without_boxes, mask))
    assert not gpu_callbacks.get_races().races_found
    atol = 2e-3 * max(1, float(jnp.abs(exact_out).max()))
    assert (np.abs(out - exact_out) <= atol + 1e-7 * np.abs(exact_out)).all()
    np.testing.assert_allclose(lse, exact_lse, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_interpreted_kernel_matches_the_oracle(name):
    shape, scalars, others, softcap = CASES[name]
    assert_matches(*operands(shape), Mask(*map(jnp.int32, scalars), **({"is_causal": True} | others)), softcap)


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_results_of_the_inputs_dtype_are_the_rounded_ones(head_dim):
    """They leave by other ways through shared memory."""
    queries, keys = operands((77, 205, 2, 1, head_dim))
    mask = Mask(*map(jnp.int32, (190, 100, 290)), True)

    @jax.jit
    def run(q, k, v):
        operand = lambda x, *arrays: Operand(arrays, x.box, None, x.is_peer)
        interpret = plgpu.InterpretGPUParams(detect_races=True)
        forward = lambda dtype: hopper.forward(operand(queries, q), operand(keys, k, v), mask, 0.1, dtype=dtype,
                                               blocks=SMALL_TILES, interpret=interpret)  # fmt: skip
        return forward(jnp.float32), forward(jnp.bfloat16)

    (out, lse), (short_out, short_lse) = jax.block_until_ready(run(*queries.own, *keys.own))
    assert not gpu_callbacks.get_races().races_found
    assert short_out.dtype == jnp.bfloat16
    np.testing.assert_allclose(short_out.astype(jnp.float32), out, rtol=2**-8)
    np.testing.assert_allclose(short_lse, lse, rtol=1e-6)


@pytest.mark.parametrize("growth", [0, 3])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kind", ["causal", block_sizes.SHORT])
@pytest.mark.parametrize("name", ["odd lengths", "documents"])
def test_maxima_that_are_replaced_again_and_again(name, kind, head_dim, growth):
    """Scores grow, or not, in tiles of long rows, such as three warpgroups and 80 keys, and in those of short rows."""
    (T, S, N, K, _), scalars, others, _ = CASES[name]
    queries, keys = operands((T, S, N, K, head_dim))
    factor = jnp.exp2(-growth * jnp.arange(S) / 64)[:, None, None]  # tiles are visited from the last to the first
    k, v = keys.own
    keys = keys._replace(own=((k.astype(jnp.float32) * factor * (1 + 2 * growth)).astype(k.dtype), v))
    mask = Mask(*map(jnp.int32, scalars), **({"is_causal": True} | others))
    assert_matches(queries, keys, mask, tiles=block_sizes.TABLE["forward", head_dim, "bfloat16", kind])


@pytest.mark.parametrize("name", ["odd lengths", "full", "window", "documents", "future", "far"])
def test_many_keys_are_added_up_in_parts(name, monkeypatch):
    """In each part rows that see none of its keys walk over a tile that they do not see, whichever side it lies on."""
    monkeypatch.setattr(merge, "MAX_KEYS", 64)
    shape, scalars, others, softcap = CASES[name]
    assert_matches(*operands(shape), Mask(*map(jnp.int32, scalars), **({"is_causal": True} | others)), softcap)


@pytest.mark.parametrize("is_peer", [(True, False), (False, True)])
def test_operands_are_chosen_when_the_kernel_runs(is_peer):
    mask = Mask(*map(jnp.int32, (40, 30, 150)), True)
    assert_matches(*operands((64, 128, 2, 1, 64), is_peer), mask)


def test_boxes_of_rows_and_heads_are_read_in_place():
    boxes = Box(64, 64, 2, 2), Box(0, 128, 1, 1)
    assert_matches(
        *operands((128, 128, 2, 1, 64), (None, None), boxes, num_heads=(4, 2)),
        Mask(*map(jnp.int32, (64, 0, 128)), True),
    )


def test_tiles_of_short_rows_are_taken_where_few_keys_are_seen_or_multiprocessors_would_wait():
    def kind(tokens, heads=16, **mask):
        options = {"is_causal": True, "window": None, "segment_ids": None} | mask
        return block_sizes.forward_kind(Mask(0, 0, tokens, **options), 128, heads, tokens, tokens)

    full = partial(kind, is_causal=False)
    # 8192 rows of 16 heads: 1024 tiles of 128 rows, 8 for most multiprocessors, or 688 of 192, 6 for some, 5 for most.
    assert [full(tokens) for tokens in (1024, 4096, 8192, 16384)] == ["short"] * 3 + ["full"]
    assert (full(8192, heads=32), full(8192, heads=24)) == ("full", "full")
    assert [kind(4096), kind(8192), kind(65536, window=1024), kind(65536, window=4096)] == [
        *("short", "causal", "short", "window"),
    ]
    assert kind(1024, segment_ids=(None, None)) == "segments"


def lowered(num_rows, head_dim, dtype, kind, blocks=None):
    """The program for an H200 of a call whose operands may come from a peer."""
    x = jax.ShapeDtypeStruct((1, num_rows, 8, head_dim), dtype)
    y = jax.ShapeDtypeStruct((1, num_rows, 2, head_dim), dtype)
    number, flag = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.bool_)
    ids = (jax.ShapeDtypeStruct((1, num_rows), jnp.int32),) * 2 if kind == "segments" else None

    def run(q, k, v, peer_q, peer_k, peer_v, q_start, k_start, k_stop, is_q_peer, is_kv_peer, ids):
        queries = Operand((q,), Box(0, num_rows, 0, 8), (peer_q,), is_q_peer)
        keys = Operand((k, v), Box(0, num_rows, 0, 2), (peer_k, peer_v), is_kv_peer)
        mask = Mask(q_start, k_start, k_stop, kind != "full", 4096 if kind == "window" else None, ids)
        return hopper.forward(queries, keys, mask, head_dim**-0.5, blocks=blocks)

    device = AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        traced = jax.jit(run).trace(x, y, y, x, y, y, number, number, number, flag, flag, ids)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    "key", [key for key in block_sizes.TABLE if key[0] == "forward"], ids=lambda key: "-".join(map(str, key[1:]))
)
def test_every_entry_of_the_table_lowers_for_an_h200_and_fits_in_shared_memory(key):
    _, head_dim, dtype, kind = key
    text = lowered(1000, head_dim, dtype, kind, block_sizes.TABLE[key])
    assert "mosaic_gpu" in text
    assert not [line for line in text.splitlines() if "stablehlo.pad" in line and "f16>" in line]  # read as they lie


@pytest.mark.parametrize("kind", ["causal", "segments"])
def test_a_million_tokens_lower(kind):
    lowered(1 << 20, 128, "bfloat16", kind)


def test_blocks_that_do_not_fit_are_refused_with_their_sizes():
    q = jnp.zeros((1, 64, 1, 256), jnp.bfloat16)
    operand = lambda *x: Operand(x, Box(0, 64, 0, 1), None, jnp.bool_(False))
    with pytest.raises(ValueError, match=r"more than the 227 KiB of shared memory: .*'k_smem'\] 128 KiB.*keys=128"):
        hopper.forward(operand(q), operand(q, q), Mask(0, 0, 64, True), 0.1, blocks=block_sizes.ForwardBlocks())
