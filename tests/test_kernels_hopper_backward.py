"""The Hopper backward: interpreted on the CPU against float32 gradients, and lowered to CUDA for an H200."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.mesh import AbstractDevice
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.sharding import AbstractMesh
from tolerance import assert_close

from pallas_kernels import block_sizes, dense, hopper_backward, hopper_keys, merge, xla
from pallas_kernels.block import Box, Operand
from pallas_kernels.masks import Mask

H200 = AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
on_cpu = pytest.mark.skipif("config.getoption('--platform') != 'cpu'", reason="interpreted and lowered on CPUs")
pytestmark = [on_cpu, pytest.mark.timeout(300)]


def make_inputs(B, T, N, S, K, H, dtype):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(B, T, N, H), (B, S, K, H), (B, S, K, H), (B, T, N, H)]
    q, k, v, dout = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    return tuple(x.astype(dtype) for x in (q, k + 0.2, v + 0.5, dout))


def document_ids(length, *starts):
    """[1, length]: 1 for the first document, 0 for what lies before it."""
    return jnp.asarray(np.searchsorted(starts, np.arange(length), side="right").astype(np.int32))[None]


@functools.partial(jax.jit, static_argnames="softcap")
def differentiate(q, k, v, dout, mask, softcap=None):
    """(lse, delta, gradients) of dense attention in float32."""
    visible = mask.visible(jnp.arange(q.shape[1]), jnp.arange(k.shape[1]))
    attention = lambda q, k, v: dense.attention(q, k, v, visible, q.shape[-1] ** -0.5, softcap)
    (out, lse), pull_back = jax.vjp(attention, *(x.astype(jnp.float32) for x in (q, k, v)))
    dout = dout.astype(jnp.float32)
    return lse, (dout * out).sum(axis=-1), pull_back((dout, jnp.zeros_like(lse)))


def whole(*arrays):
    _, num_rows, num_heads = arrays[0].shape[:3]
    return Operand(arrays, Box(0, num_rows, 0, num_heads), None, jnp.array(False))


def position(q_start, k_start, k_stop, is_causal, window=None, segment_ids=None):
    return Mask(jnp.int32(q_start), jnp.int32(k_start), jnp.int32(k_stop), is_causal, window, segment_ids)


def call_compiled(function, queries, keys, mask):
    """function(queries, keys, mask) as one program; without, each of its operations would be compiled by itself."""

    @jax.jit
    def run(queries_without_box, keys_without_box, mask):
        return function(queries_without_box._replace(box=queries.box), keys_without_box._replace(box=keys.box), mask)

    return run(queries._replace(box=None), keys._replace(box=None), mask)


def plain_backward(queries, keys, mask, H, softcap=None):
    return call_compiled(functools.partial(xla.backward, scale=H**-0.5, softcap=softcap), queries, keys, mask)


def interpreted(queries, keys, mask, H, softcap=None, deterministic=False, blocks=None):
    options = {"softcap": softcap, "deterministic": deterministic, "blocks": blocks}
    backward = functools.partial(hopper_backward.backward, scale=H**-0.5, **options, interpret=True)
    gradients = call_compiled(backward, queries, keys, mask)
    jax.block_until_ready(gradients)
    assert not gpu_callbacks.get_races().races_found
    return gradients


def compare(ours, plain, exact, dtype):
    for name, x, y, z in zip(("dq", "dk", "dv"), ours, plain, exact, strict=True):
        assert jnp.isfinite(x).all()
        assert_close(name, x, y, z, dtype)


@pytest.mark.parametrize(
    "shape, place",
    [
        pytest.param((1, 131, 2, 131, 1, 64, "bfloat16"), (0, 0, 131, True), id="diagonal, odd, grouped"),
        pytest.param((1, 70, 2, 150, 1, 128, "float16"), (1000, 0, 150, True), id="far chunk"),
        pytest.param((2, 65, 1, 140, 1, 64, "bfloat16"), (0, 0, 130, False), id="not causal, padded keys"),
        pytest.param((1, 130, 1, 130, 1, 64, "bfloat16"), (0, 70, 200, True), id="first rows see nothing"),
        pytest.param((1, 64, 1, 130, 1, 128, "bfloat16"), (0, 0, 0, True), id="no task"),
        pytest.param((1, 72, 1, 72, 1, 96, "bfloat16"), (0, 0, 72, True), id="head dim 96"),
        pytest.param((1, 72, 1, 150, 1, 96, "bfloat16"), (78, 0, 150, True), id="head dim 96"),
        pytest.param((1, 72, 1, 72, 1, 192, "bfloat16"), (0, 0, 72, True), id="head dim 192"),
        pytest.param((1, 72, 1, 72, 1, 256, "bfloat16"), (0, 0, 72, True), id="head dim 256"),
        pytest.param((1, 200, 1, 200, 1, 64, "bfloat16"), (0, 0, 200, True, 50), id="window"),
        pytest.param((1, 100, 1, 200, 1, 128, "bfloat16"), (50, 0, 200, False, 30), id="window, not causal"),
        pytest.param((1, 200, 1, 200, 1, 64, "bfloat16"), (0, 0, 200, True, None, (30, 40, 170)), id="documents"),
        pytest.param(
            (1, 200, 1, 200, 1, 128, "bfloat16"), (0, 0, 200, False, None, (30, 40, 170)), id="documents, not causal"
        ),
    ],
)
def test_gradients_are_those_of_dense_attention(shape, place):
    assert_gradients_match(shape, place)


@pytest.mark.parametrize("ctas, parts", [(1, 1), (3, 2), (128, 4)])
def test_a_group_of_heads_is_dealt_to_several_thread_blocks_where_there_are_few(ctas, parts):
    blocks = dataclasses.replace(block_sizes.TABLE["backward", 64, "bfloat16", "causal"], ctas=ctas)
    assert hopper_keys.divide_group(4, 2, ctas) == parts
    assert_gradients_match((1, 70, 4, 131, 1, 64, "bfloat16"), (61, 0, 131, True), blocks=blocks)


@pytest.mark.parametrize(
    "shape, place",
    [
        pytest.param((1, 131, 2, 131, 1, 64, "bfloat16"), (0, 0, 131, True), id="diagonal, odd, grouped"),
        pytest.param((1, 70, 1, 150, 1, 128, "float16"), (1000, 0, 150, True, 960), id="far chunk, window"),
        pytest.param((1, 72, 1, 72, 1, 96, "bfloat16"), (0, 0, 72, True), id="head dim 96"),
        pytest.param((1, 72, 1, 72, 1, 192, "bfloat16"), (0, 0, 72, False), id="full, head dim 192"),
        pytest.param((1, 200, 1, 200, 1, 64, "bfloat16"), (0, 0, 200, True, None, (30, 40, 170)), id="documents"),
    ],
)
def test_the_deterministic_kernels_compute_the_same(shape, place):
    assert_gradients_match(shape, place, deterministic=True)


def test_many_keys_are_added_up_in_parts(monkeypatch):
    monkeypatch.setattr(merge, "MAX_KEYS", 64)
    assert_gradients_match((1, 100, 1, 200, 1, 64, "bfloat16"), (90, 0, 200, True, None, (30, 40, 170)), None, True)


def test_gradients_through_a_softcap_are_those_of_dense_attention():
    for deterministic in (False, True):
        assert_gradients_match((1, 64, 1, 64, 1, 64, "bfloat16"), (0, 0, 64, True), 2.0, deterministic)


def assert_gradients_match(shape, place, softcap=None, deterministic=False, blocks=None):
    q, k, v, dout = make_inputs(*shape)
    if len(place) == 6:
        place = (*place[:5], tuple(document_ids(x.shape[1], *place[5]) for x in (q, k)))
    mask = position(*place)
    lse, delta, exact = differentiate(q, k, v, dout, mask, softcap)
    task = whole(q, dout, lse, delta), whole(k, v), mask
    ours = interpreted(*task, q.shape[-1], softcap, deterministic, blocks)
    compare(ours, plain_backward(*task, q.shape[-1], softcap), exact, shape[-1])


def test_vmap_gives_each_element_a_dq_of_its_own():
    """dq is a reference that the kernel changes in place, so a batch must not share it."""
    q, k, v, dout = (x[:, None] for x in make_inputs(2, 64, 2, 64, 1, 64, "bfloat16"))
    rows, mask = jnp.ones(q.shape[:-1]), position(0, 0, 64, True)
    operands = lambda q, k, v, dout, rows: (whole(q, dout, 4 * rows, 0 * rows), whole(k, v), mask)
    ours = jax.vmap(lambda *x: interpreted(*operands(*x), 64))(q, k, v, dout, rows)
    plain = jax.vmap(lambda *x: plain_backward(*operands(*x), 64))(q, k, v, dout, rows)
    for x, y in zip(ours, plain, strict=True):
        assert jnp.abs(x - y).max() <= 5e-3 * jnp.abs(y).max()


def test_gradients_of_two_blocks_add_up():
    T, S, first, dtype = 72, 136, 64, "bfloat16"
    q, k, v, dout = make_inputs(1, T, 1, S, 1, 64, dtype)
    mask = position(S - T, 0, S, True)
    lse, delta, exact = differentiate(q, k, v, dout, mask)
    queries = whole(q, dout, lse, delta)
    parts = [
        interpreted(queries, whole(k[:, start:stop], v[:, start:stop]), position(S - T, start, S, True), 64)
        for start, stop in ((0, first), (first, S))
    ]
    ours = (parts[0][0] + parts[1][0], *(jnp.concatenate(x, axis=1) for x in zip(*(p[1:] for p in parts), strict=True)))
    compare(ours, plain_backward(queries, whole(k, v), mask, 64), exact, dtype)


@pytest.mark.parametrize("is_peer", [False, True], ids=["own", "peer"])
@pytest.mark.parametrize(
    "q_box, k_box",
    [
        pytest.param(Box(0, 70, 2, 2), Box(0, 66, 1, 1), id="half of the heads"),
        pytest.param(Box(40, 40, 0, 4), Box(0, 66, 0, 2), id="half of the rows, past the end"),
        pytest.param(Box(35, 35, 0, 4), Box(0, 66, 0, 2), id="half of the rows, unaligned"),
    ],
)
def test_the_kernel_takes_the_box_of_the_operand_that_the_role_names(q_box, k_box, is_peer):
    q, k, v, dout = make_inputs(1, 70, 4, 66, 2, 64, "bfloat16")
    mask = position(0, 0, 66, True)
    lse, delta, _ = differentiate(q, k, v, dout, mask)
    role = jnp.array(is_peer)

    def operand(arrays, box, shift):
        """What the role names are the arrays; the other holds something else."""
        other = tuple(x + jnp.asarray(shift, x.dtype) for x in arrays)
        own, peer = (other, arrays) if is_peer else (arrays, other)
        return Operand(own, box, tuple(map(box.take, peer)), role)

    task = operand((q, dout, lse, delta), q_box, 1), operand((k, v), k_box, 1), position(q_box.row, 0, 66, True)
    ours, exact = interpreted(*task, 64), plain_backward(*task, 64)
    compare(ours, exact, exact, "bfloat16")


def lowered(shape, *, kind, has_peers=False, deterministic=False):
    B, T, N, S, K, H, dtype = shape

    def run(q, dout, lse, delta, k, v, scalars, is_peer, ids):
        q_side, k_side = (q, dout, lse, delta), (k, v)
        queries = Operand(q_side, Box(0, T, 0, N), q_side if has_peers else None, is_peer)
        keys = Operand(k_side, Box(0, S, 0, K), k_side if has_peers else None, is_peer)
        mask = Mask(*scalars, kind != "full", 4096 if kind == "window" else None, ids)
        return hopper_backward.backward(queries, keys, mask, H**-0.5, deterministic=deterministic)

    q, k = jax.ShapeDtypeStruct((B, T, N, H), dtype), jax.ShapeDtypeStruct((B, S, K, H), dtype)
    rows, scalar = jax.ShapeDtypeStruct((B, T, N), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    ids = tuple(jax.ShapeDtypeStruct((B, x), jnp.int32) for x in (T, S)) if kind == "segments" else None
    arguments = q, q, rows, rows, k, k, (scalar,) * 3, jax.ShapeDtypeStruct((), bool), ids
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=H200)):
        return jax.jit(run).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    "key", [key for key in block_sizes.TABLE if key[0] != "forward"], ids=lambda key: "-".join(map(str, key))
)
def test_every_entry_of_the_table_lowers_for_an_h200_and_fits_in_shared_memory(key):
    direction, H, dtype, kind = key
    text = lowered((1, 4096, 8, 4096, 2, H, dtype), kind=kind, deterministic=direction == "dq")
    assert ("hopper_dq" in text) == (direction == "dq") and "hopper_backward" in text


@pytest.mark.parametrize("kind", ["causal", "segments"])
def test_a_million_tokens_and_odd_lengths_with_peers_lower(kind):
    lowered((1, 2**20, 8, 2**20, 8, 128, "bfloat16"), kind=kind)
    lowered((2, 1003, 8, 777, 2, 128, "bfloat16"), kind=kind, has_peers=True)


def test_operands_with_aligned_rows_are_not_copied():
    """Only lse, delta and the results are made outside of the kernel: nothing in 16 bit."""
    text = lowered((1, 4096, 8, 4096, 2, 128, "bfloat16"), kind="causal", has_peers=True)
    assert not [
        line for line in text.splitlines() if "xbf16>" in line and "stablehlo." in line and "custom_call" not in line
    ]


@pytest.mark.parametrize("shape", [(1, 64, 1, 64, 1, 320, "bfloat16"), (1, 64, 1, 64, 1, 64, "float32")])
def test_what_the_kernel_does_not_have_is_refused_by_name(shape):
    with pytest.raises(ValueError, match=r"head dim 320: must be at most 256|q\.dtype=float32"):
        lowered(shape, kind="causal")
