"""Masks of distflash_attention on virtual workers against dense attention: windows, documents, soft-cap, sinks."""

import functools
import os

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from counting import num_messages
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import Case
from test_distflash_attention import attend, make_mesh

from distflash_jax import distflash_attention, schedule
from pallas_kernels import Mask, dense

NUM_EXAMPLES = int(os.environ.get("DISTFLASH_EXAMPLES", "5"))


def documents(length: int, *lengths: int) -> jax.Array:
    """Numbers of documents that follow each other, from 1; what is left of the length is padding, 0."""
    numbers = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return jnp.asarray(np.pad(numbers, (0, length - numbers.size)), jnp.int32)


def assert_equals_dense(
    case: Case, attention, *, window=None, ids=None, kv_ids=None, softcap=None, sinks=None, error=3e-5
):
    """out, lse and all their gradients, where dense attention materialises the mask; error: relative to the largest."""
    S = case.S or case.T
    segments = None if ids is None else (ids, ids if kv_ids is None else kv_ids)
    mask = Mask(0, 0, S, case.is_causal, window, segments)
    visible = mask.visible(jnp.arange(case.T), jnp.arange(S))

    def exact(q, k, v):
        out, lse = dense.attention(q, k, v, visible, case.H**-0.5, softcap)
        if sinks is None:
            return out, lse
        total = jnp.logaddexp(lse, sinks)
        return out * jnp.exp(lse - total)[..., None], total

    arrays = oracle.inputs(case)
    ours, wanted = (oracle.results(f, *arrays).named() for f in (attention, exact))
    for name, value in wanted.items():
        assert not np.isnan(ours[name]).any(), name
        largest = float(jnp.abs(value).max(where=jnp.isfinite(value), initial=1))
        np.testing.assert_allclose(ours[name], value, rtol=error, atol=error * largest, err_msg=name)


@pytest.mark.parametrize("num_workers, window", [(1, 5), (2, 1), (3, 6), (4, 12), (5, 30), (8, 3), (8, 19), (8, 100)])
def test_a_window_equals_dense(num_workers, window):
    assert_equals_dense(Case(T=43, B=1), attend(num_workers, window=window), window=window)


HEADS = [(1, (2, 1)), (2, (3, 1)), (3, (2, 1)), (4, (3, 1)), (5, (2, 2)), (8, (4, 2))]


@pytest.mark.parametrize("num_workers, heads", HEADS)
def test_packed_documents_equal_dense_across_borders_of_chunks(num_workers, heads):
    ids = jnp.stack([documents(43, 5, 20, 1, 9), documents(43, 43)])  # the first row ends with padding
    case = Case(T=43, N=heads[0], K=heads[1])
    assert_equals_dense(case, attend(num_workers, segment_ids=ids), ids=ids)


def test_documents_and_a_window_and_a_softcap_and_a_ring_equal_dense():
    ids = documents(43, 30, 13)[None]
    options = {"window": 7, "softcap": 1.5}
    attention = attend(4, strategy="ring", segment_ids=ids, **options)
    assert_equals_dense(Case(T=43, B=1), attention, ids=ids, **options)


def test_documents_and_sinks_on_a_mesh_with_explicit_axes_equal_dense():
    case, ids, sinks = Case(T=40), documents(40, 11, 29)[None].repeat(2, axis=0), jnp.arange(4.0)
    mesh = make_mesh(AxisType.Explicit, data=2, seq=2)
    place = lambda x: jax.reshard(x, NamedSharding(mesh, P("data", "seq")))

    def attention(q, k, v):
        out, lse = distflash_attention(*map(place, (q, k, v)), mesh=mesh, segment_ids=ids, sinks=sinks, return_lse=True)
        return tuple(jax.reshard(x, NamedSharding(mesh, P())) for x in (out, lse))

    with jax.set_mesh(mesh):
        assert_equals_dense(case, attention, ids=ids, sinks=sinks)


@pytest.mark.parametrize("strategy, num_workers", [("ulysses", 3), ("all_gather", 4)])
def test_masks_with_strategies_that_are_no_table_equal_dense(strategy, num_workers):
    ids = documents(43, 9, 25, 8)[None]
    options = {"window": 11, "softcap": 1.5}
    attention = attend(num_workers, strategy=strategy, segment_ids=ids, **options)
    assert_equals_dense(Case(T=43, B=1), attention, ids=ids, **options)


def test_documents_of_queries_and_of_keys_of_other_lengths_equal_dense():
    ids, kv_ids = documents(40, 10, 17, 13)[None], documents(29, 3, 20, 6)[None]
    case = Case(T=40, S=29, B=1, is_causal=False)
    assert_equals_dense(case, attend(4, causal=False, segment_ids=ids, kv_segment_ids=kv_ids), ids=ids, kv_ids=kv_ids)


def test_sinks_and_their_gradient_equal_dense():
    case = Case(T=24, B=1)
    sinks = jnp.array([-1.0, 0.5, 2.0, 0.0])
    assert_equals_dense(case, attend(3, sinks=sinks), sinks=sinks)
    q, k, v, dout, _ = oracle.inputs(case)
    visible = jnp.tril(jnp.ones((1, 24, 24), bool))

    def exact(sinks):
        out, lse = dense.attention(q, k, v, visible, case.H**-0.5)
        return jnp.sum(dout * out * jax.nn.sigmoid(lse - sinks)[..., None])

    ours = jax.grad(lambda sinks: jnp.sum(dout * attend(3, sinks=sinks)(q, k, v)[0]))(sinks)
    np.testing.assert_allclose(ours, jax.grad(exact)(sinks), rtol=1e-5)


def test_inside_a_shard_map_a_worker_gives_the_ids_of_its_chunk():
    ids = documents(40, 11, 29)[None]
    spec = P(None, "seq")

    def attention(q, k, v):
        run = lambda q, k, v, ids: distflash_attention(q, k, v, segment_ids=ids, return_lse=True)
        return jax.shard_map(run, mesh=make_mesh(seq=4), in_specs=(spec,) * 4, out_specs=(spec, spec))(q, k, v, ids)

    assert_equals_dense(Case(T=40, B=1), attention, ids=ids)


@pytest.mark.timeout(3600)
@hypothesis.settings(max_examples=NUM_EXAMPLES, deadline=None, derandomize=True)
@hypothesis.given(st.data())
def test_any_masks_lengths_and_heads_on_any_workers_equal_dense(data):
    """DISTFLASH_EXAMPLES=1000 tries as many."""
    draw = lambda *choices: data.draw(st.sampled_from(choices))
    num_workers, T, kv_heads = draw(*range(1, 9)), data.draw(st.integers(8, 70)), draw(1, 2, 3)
    case = Case(T=T, N=kv_heads * draw(1, 2), K=kv_heads, B=draw(1, 2), is_causal=draw(True, True, False), H=8)
    strategy = draw("balanced", "balanced", "balanced_unsplit", "ring", "ulysses", "all_gather")
    window = draw(None, 1, 5, 20, 64) if case.is_causal else None
    softcap = draw(None, None, 3.0)
    ids = None
    if draw(True, False):
        lengths = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=6))
        ends = np.minimum(np.cumsum(lengths), T)
        ids = jnp.broadcast_to(documents(T, *np.diff(ends, prepend=0)), (case.B, T))
    options = {"window": window, "softcap": softcap}
    attention = attend(num_workers, strategy=strategy, causal=case.is_causal, segment_ids=ids, **options)
    assert_equals_dense(case, attention, ids=ids, **options)


@pytest.mark.parametrize("count", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("reach", [0, 1, 2, 7])
def test_a_window_leaves_the_pairs_that_it_reaches(count, reach):
    table = schedule.choose("balanced", count, kv_heads=2, reach=reach)
    tasks = {(task.q, task.kv) for step in table.steps for task in step.tasks if task}
    assert tasks == {(q, kv) for q in range(count) for kv in range(q + 1) if q - kv <= reach}
    assert len(table.steps) <= min(reach, count // 2) + 2


def test_what_lies_beyond_a_window_is_not_sent():
    q, k, v, *_ = oracle.inputs(Case(T=64, B=1))
    count = lambda window: num_messages(jax.make_jaxpr(attend(8, window=window))(q, k, v))
    assert count(9) == 2 and count(1) == 0  # k and v of the chunk before; nothing
    assert count(None) > 8


@pytest.mark.parametrize(
    "options, message",
    [
        ({"window": 0}, "window=0: must be at least 1, the token itself, or None"),
        ({"window": 3, "causal": False}, "window=3: needs causal=True"),
        ({"softcap": 2.0, "strategy": "zigzag"}, "softcap: must be left out with strategy='zigzag'"),
        ({"softcap": -1.0}, "softcap=-1.0: must be positive or None"),
        (
            {"segment_ids": jnp.zeros((2, 12))},
            r"segment_ids: must be integers of shape \(2, 12\), got float32\(2, 12\)",
        ),
        (
            {"segment_ids": jnp.zeros((1, 12), int)},
            r"segment_ids: must be integers of shape \(2, 12\), got int32\(1, 12\)",
        ),
        ({"kv_segment_ids": jnp.zeros((2, 12), int)}, "kv_segment_ids: needs segment_ids, those of the queries"),
        ({"sinks": jnp.zeros(3)}, r"sinks: must be floats of shape \(4,\), one a head, got float32\(3,\)"),
    ],
)
def test_what_a_mask_cannot_be_is_refused(options, message):
    q, k, v, *_ = oracle.inputs(Case(T=12))
    with pytest.raises(ValueError, match=message):
        functools.partial(attend(2, **options))(q, k, v)
