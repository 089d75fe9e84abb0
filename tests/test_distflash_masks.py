"""Masks of distflash_attention on virtual workers against dense attention, alone and composed."""

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
from distflash_jax.checks import check_mask
from distflash_jax.masks import CausalMask, GlobalMask, PrefixMask, SegmentMask, WindowMask
from pallas_kernels import dense

NUM_EXAMPLES = int(os.environ.get("DISTFLASH_EXAMPLES", "4"))


def documents(length: int, *lengths: int) -> jax.Array:
    """Numbers of documents that follow each other, from 1; what is left of the length is padding, 0."""
    numbers = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return jnp.asarray(np.pad(numbers, (0, length - numbers.size)), jnp.int32)


def visible(
    case: Case, *, causal=True, window=None, global_tokens=0, prefix_lengths=None, q_offset=0, segment_ids=None,
    kv_segment_ids=None,
) -> np.ndarray:  # fmt: skip
    """What distflash_attention says that these arguments show, token by token."""
    q, k = q_offset + np.arange(case.T)[:, None], np.arange(case.S or case.T)
    left, right = (window - 1, 0) if isinstance(window, int) else window or (None, None)
    is_far = np.zeros((1, q.size, k.size), bool)
    is_far |= False if left is None else q - k > left
    is_far |= False if right is None else k - q > right
    seen = ~is_far | (k < global_tokens) | ((q < global_tokens) & (global_tokens > 0))
    if causal:
        lengths = np.zeros(1, int) if prefix_lengths is None else np.asarray(prefix_lengths)
        seen = seen & ((k <= q) | ((q < lengths[:, None, None]) & (k < lengths[:, None, None])))
    if segment_ids is not None:
        ids = np.asarray(segment_ids)
        kv_ids = ids if kv_segment_ids is None else np.asarray(kv_segment_ids)
        seen = seen & (ids[:, :, None] == kv_ids[:, None]) & (ids[:, :, None] > 0)
    return seen


def assert_equals_dense(case: Case, attention, *, softcap=None, sinks=None, error=3e-5, **mask):
    """out, lse and all their gradients, where dense attention materialises the mask; error: relative to the largest."""
    seen = jnp.asarray(visible(case, **mask))

    def exact(q, k, v):
        out, lse = dense.attention(q, k, v, seen, case.H**-0.5, softcap)
        if sinks is None:
            return out, lse
        total = jnp.logaddexp(lse, sinks)
        return out * jnp.exp(lse - total)[..., None], total

    arrays = oracle.inputs(case)
    ours, wanted = (oracle.results(f, *arrays).named() for f in (attention, exact))
    for name, value in wanted.items():
        assert not np.isnan(ours[name]).any(), name
        largest = float(jnp.abs(value).max(where=jnp.isfinite(value), initial=1))
        np.testing.assert_allclose(
            ours[name].astype(jnp.float32), value.astype(jnp.float32), rtol=error, atol=error * largest, err_msg=name
        )


def check(case: Case, num_workers: int, error=3e-5, *, strategy="balanced", **options):
    """distflash_attention with these options equals dense."""
    assert_equals_dense(case, attend(num_workers, strategy=strategy, **options), error=error, **options)


@pytest.mark.parametrize("num_workers, window", [(1, 5), (2, 1), (3, 6), (4, 12), (5, 30), (8, 3), (8, 19), (8, 100)])
def test_a_window_equals_dense(num_workers, window):
    check(Case(T=43, B=1), num_workers, window=window)


HEADS = [(1, (2, 1)), (2, (3, 1)), (3, (2, 1)), (4, (3, 1)), (5, (2, 2)), (8, (4, 2))]


@pytest.mark.parametrize("num_workers, heads", HEADS)
def test_packed_documents_equal_dense_across_borders_of_chunks(num_workers, heads):
    ids = jnp.stack([documents(43, 5, 20, 1, 9), documents(43, 43)])  # the first row ends with padding
    case = Case(T=43, N=heads[0], K=heads[1])
    check(case, num_workers, segment_ids=ids)


def test_documents_and_a_window_and_a_softcap_and_a_ring_equal_dense():
    check(Case(T=43, B=1), 4, strategy="ring", segment_ids=documents(43, 30, 13)[None], window=7, softcap=1.5)


def test_documents_and_sinks_on_a_mesh_with_explicit_axes_equal_dense():
    case, ids, sinks = Case(T=40), documents(40, 11, 29)[None].repeat(2, axis=0), jnp.arange(4.0)
    mesh = make_mesh(AxisType.Explicit, data=2, seq=2)
    place = lambda x: jax.reshard(x, NamedSharding(mesh, P("data", "seq")))

    def attention(q, k, v):
        out, lse = distflash_attention(*map(place, (q, k, v)), mesh=mesh, segment_ids=ids, sinks=sinks, return_lse=True)
        return tuple(jax.reshard(x, NamedSharding(mesh, P())) for x in (out, lse))

    with jax.set_mesh(mesh):
        assert_equals_dense(case, attention, segment_ids=ids, sinks=sinks)


@pytest.mark.parametrize("strategy, num_workers", [("ulysses", 3), ("all_gather", 4)])
def test_masks_with_strategies_that_are_no_table_equal_dense(strategy, num_workers):
    ids = documents(43, 9, 25, 8)[None]
    check(Case(T=43, B=1), num_workers, strategy=strategy, segment_ids=ids, window=11, softcap=1.5)


def test_documents_of_queries_and_of_keys_of_other_lengths_equal_dense():
    ids, kv_ids = documents(40, 10, 17, 13)[None], documents(29, 3, 20, 6)[None]
    check(Case(T=40, S=29, B=1), 4, causal=False, segment_ids=ids, kv_segment_ids=kv_ids)


def test_sinks_and_their_gradient_equal_dense():
    case = Case(T=24, B=1)
    sinks = jnp.array([-1.0, 0.5, 2.0, 0.0])
    check(case, 3, sinks=sinks)
    q, k, v, dout, _ = oracle.inputs(case)
    visible = jnp.tril(jnp.ones((1, 24, 24), bool))

    def exact(sinks):
        out, lse = dense.attention(q, k, v, visible, case.H**-0.5)
        return jnp.sum(dout * out * jax.nn.sigmoid(lse - sinks)[..., None])

    ours = jax.jit(jax.grad(lambda sinks: jnp.sum(dout * attend(3, sinks=sinks)(q, k, v)[0])))(sinks)
    np.testing.assert_allclose(ours, jax.grad(exact)(sinks), rtol=1e-5)


def test_inside_a_shard_map_a_worker_gives_the_ids_of_its_chunk():
    ids = documents(40, 11, 29)[None]
    spec = P(None, "seq")

    def attention(q, k, v):
        run = lambda q, k, v, ids: distflash_attention(q, k, v, segment_ids=ids, return_lse=True)
        return jax.shard_map(run, mesh=make_mesh(seq=4), in_specs=(spec,) * 4, out_specs=(spec, spec))(q, k, v, ids)

    assert_equals_dense(Case(T=40, B=1), attention, segment_ids=ids)


AROUND = {"causal": False, "window": (5, 3)}


@pytest.mark.parametrize("num_workers, window", [(3, (5, 3)), (2, (None, 4))])
def test_a_window_to_both_sides_equals_dense(num_workers, window):
    check(Case(T=29, N=2, B=1), num_workers, causal=False, window=window)


@pytest.mark.parametrize(
    "options",
    [{"window": 4, "global_tokens": 3}, {**AROUND, "global_tokens": 17}],
    ids=["causal", "more_than_a_chunk"],
)
def test_global_tokens_beside_a_window_equal_dense(options):
    check(Case(T=29, N=2, B=1), 2, **options)


def test_prefixes_of_packed_documents_equal_dense():
    ids = jnp.stack([documents(29, 5, 12, 9), documents(29, 29)])
    check(Case(T=29, N=2), 2, segment_ids=ids, prefix_lengths=jnp.array([11, 29]))


@pytest.mark.parametrize("T, S, offset", [(21, 40, 0), (40, 21, -19)])
def test_causal_attention_across_lengths_is_aligned_as_is_said(T, S, offset):
    check(Case(T=T, S=S, N=2, B=1), 2, q_offset=offset)


def test_prefixes_are_sharded_as_the_batch_and_global_tokens_work_inside_a_shard_map():
    case, lengths = Case(T=24, N=2), jnp.array([3, 16])
    mesh = make_mesh(AxisType.Explicit, data=2, seq=2)
    place = lambda x: jax.reshard(x, NamedSharding(mesh, P("data", "seq")))
    with jax.set_mesh(mesh):
        out = jax.jit(lambda q, k, v: distflash_attention(*map(place, (q, k, v)), prefix_lengths=lengths))
        ours = out(*oracle.inputs(case)[:3])
    wanted = lambda **mask: dense.attention(*oracle.inputs(case)[:3], jnp.asarray(visible(case, **mask)), case.H**-0.5)
    np.testing.assert_allclose(ours, wanted(prefix_lengths=lengths)[0], atol=1e-5)
    options = {**AROUND, "global_tokens": 5}
    inside = jax.shard_map(
        functools.partial(distflash_attention, **options),
        mesh=make_mesh(seq=2),
        in_specs=P(None, "seq"),
        out_specs=P(None, "seq"),
    )
    np.testing.assert_allclose(jax.jit(inside)(*oracle.inputs(case)[:3]), wanted(**options)[0], atol=1e-5)


def test_what_is_hidden_has_a_gradient_of_exactly_zero():
    """Of keys beyond a window, behind a query and of other documents."""
    case = Case(T=30, B=1, N=1, K=1)
    options = {"window": 5, "global_tokens": 2, "segment_ids": documents(30, 17, 9)[None]}
    q, k, v, *_ = oracle.inputs(case)
    attention = attend(2, **options)
    gradient = jax.jit(jax.grad(lambda v, row: attention(q, k, v)[0][:, row].sum()))
    for row in (0, 8, 16, 17, 24, 28):
        np.testing.assert_array_equal((gradient(v, row) != 0).any(axis=(2, 3)), visible(case, **options)[:, row])


def test_a_window_of_one_token_returns_its_value():
    q, k, v, *_ = oracle.inputs(Case(T=12))
    out, _ = jax.jit(attend(2, window=1))(q, k, v)
    np.testing.assert_array_equal(out, jnp.repeat(v, 2, axis=2))


def keywords(q, k, mask=None, **options):
    """What distflash_attention makes of these arguments."""
    names = ("global_tokens", "prefix_lengths", "q_offset", "segment_ids", "kv_segment_ids")
    return check_mask(mask, q, k, **dict.fromkeys(("causal", "window", *names)) | options)


IDS, LENGTHS = documents(12, 5, 7)[None].repeat(2, axis=0), jnp.array([4, 0])
COMPOSED = {
    "causal": (CausalMask(), {}),
    "window": (CausalMask() & WindowMask(4), {"window": 4}),
    "around": (WindowMask((3, 1)), {"window": (3, 1), "causal": False}),
    "global": (
        CausalMask() & (WindowMask(4) | GlobalMask(2)) & SegmentMask(IDS),
        {"window": 4, "global_tokens": 2, "segment_ids": IDS},
    ),
    "prefix": (
        SegmentMask(IDS, IDS) & (CausalMask() | PrefixMask(LENGTHS)),
        {"prefix_lengths": LENGTHS, "segment_ids": IDS, "kv_segment_ids": IDS},
    ),
    "across": (CausalMask(q_offset=2) & WindowMask(3, q_offset=2), {"window": 3, "q_offset": 2}),
}


@pytest.mark.parametrize("mask, options", COMPOSED.values(), ids=COMPOSED)
def test_a_composed_mask_is_what_its_short_form_is(mask, options):
    case = Case(T=12)
    q, k, *_ = oracle.inputs(case)
    made = keywords(q, k, **options)
    assert jax.tree.structure(made) == jax.tree.structure(mask) and keywords(q, k, mask=mask) is mask
    assert jax.tree.all(jax.tree.map(jnp.array_equal, made, mask))
    assert (np.broadcast_to(mask.visible(12, 12), (2, 12, 12)) == visible(case, **options)).all()


@pytest.mark.parametrize(
    "compose, message",
    [
        (lambda: CausalMask() & GlobalMask(2), r"GlobalMask: must widen a mask first, WindowMask \| GlobalMask"),
        (lambda: PrefixMask(LENGTHS) & CausalMask(), r"PrefixMask: must widen a mask first, CausalMask \| PrefixMask"),
        (lambda: CausalMask() | SegmentMask(IDS), r"\|: must be one of .*, got is_causal, segment_ids"),
        (lambda: WindowMask(3) & WindowMask(4), "WindowMask: must not be given twice"),
        (lambda: CausalMask(q_offset=1) & WindowMask(4, q_offset=2), "q_offset: must not be given twice"),
        (
            lambda: WindowMask((3, -1)),
            r"window=\(3, -1\): must be a number of tokens, .* or \(left, right\), each at least 0",
        ),
    ],
)
def test_masks_that_do_not_compose_are_refused(compose, message):
    with pytest.raises(ValueError, match=message):
        compose()


def draw_mask(data, T: int, S: int, B: int) -> dict:
    """Keyword arguments of distflash_attention that make any mask for these lengths; S differs from T in some only."""
    draw = lambda *choices: data.draw(st.sampled_from(choices))
    kinds = ("around", "across", "full") + ("causal", "window", "global", "global_causal", "prefix") * (S == T)
    around = lambda: {
        "causal": False,
        "window": tuple(draw(None, 0, 3, 17, data.draw(st.integers(0, 40))) for _ in "lr"),
    }
    tokens = lambda: {"global_tokens": data.draw(st.integers(1, T + 5))}
    lengths = lambda: jnp.asarray(data.draw(st.lists(st.integers(0, T + 3), min_size=B, max_size=B)))
    offset = lambda: {"q_offset": draw(0, S - T, data.draw(st.integers(-20, 40)))}
    options = {
        "causal": dict,
        "full": lambda: {"causal": False},
        "window": lambda: {"window": draw(1, 5, 20, 64)},
        "around": lambda: around() | (offset() if S != T else {}),
        "global": lambda: around() | tokens(),
        "global_causal": lambda: {"window": draw(1, 5, 20)} | tokens(),
        "prefix": lambda: {"prefix_lengths": lengths()},
        "across": lambda: offset() | {"window": draw(None, 5, 20)},
    }[draw(*kinds)]()
    if draw(True, False):
        ends = lambda length: np.cumsum(data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=6))).clip(
            max=length
        )
        pack = lambda length: jnp.broadcast_to(documents(length, *np.diff(ends(length), prepend=0)), (B, length))
        options |= {"segment_ids": pack(T)} | ({"kv_segment_ids": pack(S)} if S != T else {})
    return options


@pytest.mark.timeout(3600)
@hypothesis.settings(max_examples=20 * NUM_EXAMPLES, deadline=None, derandomize=True)
@hypothesis.given(st.data())
def test_the_passes_of_any_mask_have_what_is_visible_once_and_in_their_tables(data):
    """Nothing is compiled but the masks themselves: 20 times as many as DISTFLASH_EXAMPLES."""
    (T, S), P = data.draw(st.sampled_from([(24, 24), (24, 24), (24, 17), (17, 24)])), data.draw(st.integers(1, 8))
    options = draw_mask(data, T, S, B=2)
    mask = keywords(jnp.zeros((2, T, 1, 8)), jnp.zeros((2, S, 1, 8)), **options)
    wanted = np.broadcast_to(visible(Case(T=T, S=S), **options), (2, T, S))
    np.testing.assert_array_equal(np.broadcast_to(mask.visible(T, S), wanted.shape), wanted)
    total, rows, keys = np.zeros(wanted.shape, int), -(-T // P), -(-S // P)
    for band, segments, of, count in mask.passes(S, T):
        seen = np.array(band.mask(0, 0, segments).visible(jnp.arange(T), jnp.arange(S)))
        seen[:, count if of == "queries" else T :] = False
        chunks = {(i // rows, j // keys) for _, i, j in np.argwhere(seen)}
        assert chunks <= band.pairs(P, rows, keys) and (of != "keys" or not seen[:, :, count:].any())
        total += seen
    np.testing.assert_array_equal(total, wanted)


@pytest.mark.timeout(7200)
@hypothesis.settings(max_examples=NUM_EXAMPLES, deadline=None, derandomize=True)
@hypothesis.given(st.data())
def test_any_masks_lengths_and_heads_on_any_workers_equal_dense(data):
    """DISTFLASH_EXAMPLES=1000 tries as many."""
    draw = lambda *choices: data.draw(st.sampled_from(choices))
    num_workers, T, kv_heads = draw(*range(1, 9)), data.draw(st.integers(8, 70)), draw(1, 2, 3)
    S = draw(T, T, data.draw(st.integers(8, 70)))
    dtype, error = draw(("float32", 3e-5), ("float32", 3e-5), ("float32", 3e-5), ("bfloat16", 4e-2))
    case = Case(T=T, S=S, N=kv_heads * draw(1, 2), K=kv_heads, B=draw(1, 2), H=8, dtype=dtype)
    options = draw_mask(data, T, S, case.B) | {"softcap": draw(None, None, 3.0)}
    strategy = draw("balanced", "balanced", "balanced_unsplit", "ring", "burst", "ulysses", "all_gather", "rsa")
    check(case, num_workers, error, strategy=strategy, **options)


def test_a_sink_of_minus_infinity_is_none_also_where_no_key_is_seen():
    q, k, v, *_ = oracle.inputs(Case(T=12, B=1))
    ids = jnp.array([[0] * 4 + [1] * 8])
    without, results = (attend(2, segment_ids=ids, sinks=x)(q, k, v) for x in (None, jnp.full(4, -jnp.inf)))
    for expected, ours in zip(without, results, strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-6)


@pytest.mark.parametrize("count", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("reach", [0, 1, 2, 7])
def test_a_window_leaves_the_pairs_that_it_reaches(count, reach):
    pairs = schedule.visible_pairs(count, 10, 10, first=-10 * reach, last=0)
    table = schedule.choose("balanced", count, kv_heads=2, pairs=pairs)
    tasks = {(task.q, task.kv) for step in table.steps for task in step.tasks if task}
    assert tasks == {(q, kv) for q in range(count) for kv in range(q + 1) if q - kv <= reach}
    assert len(table.steps) <= min(reach, count // 2) + 2


def test_global_tokens_are_copied_where_that_is_cheaper_than_a_table():
    """Then nothing is sent from worker to worker beside what a window takes."""
    q, k, v, *_ = oracle.inputs(Case(T=64, B=1))
    count = lambda tokens: num_messages(jax.make_jaxpr(attend(8, window=1, global_tokens=tokens))(q, k, v))
    assert count(None) == count(8) == 0 < count(9)


def test_what_lies_beyond_a_window_is_not_sent():
    q, k, v, *_ = oracle.inputs(Case(T=64, B=1))
    count = lambda window: num_messages(jax.make_jaxpr(attend(8, window=window))(q, k, v))
    assert count(9) == 2 and count(1) == 0  # k and v of the chunk before; nothing
    assert count(None) > 8
    around = jax.make_jaxpr(attend(8, causal=False, window=(8, 8)))(q, k, v)
    assert num_messages(around) == 4  # k and v of the chunks on either side


@pytest.mark.parametrize(
    "options, message",
    [
        ({"window": 0}, "window=0: must be a number of tokens, at least 1 for the token itself, or"),
        ({"window": 2.5}, "window=2.5: must be a number of tokens"),
        ({"window": [2, 0]}, r"window=\[2, 0\]: must be a number of tokens"),
        ({"window": 2, "global_tokens": 1.5}, "global_tokens=1.5: must be a whole number that is known when it comp"),
        ({"q_offset": jnp.int32(1)}, "q_offset=.*: must be a whole number that is known when it compiles, or None"),
        ({"softcap": float("nan")}, "softcap=nan: must be positive or None"),
        ({"prefix_lengths": 5}, r"prefix_lengths: must be an array of integers of shape \(2,\), got int"),
        ({"window": 3, "causal": False}, r"window=3: needs causal=True, or must be \(left, right\)"),
        ({"window": (3, 1)}, r"window=\(3, 1\): the right side must be 0 with causal=True"),
        ({"global_tokens": 3}, "global_tokens=3: needs a window, beyond which they are seen"),
        ({"global_tokens": -1, "window": 2}, "global_tokens=-1: must be at least 0"),
        ({"prefix_lengths": LENGTHS, "causal": False}, "prefix_lengths: needs causal=True"),
        ({"prefix_lengths": LENGTHS, "window": 3}, "prefix_lengths: must be left out with a window"),
        ({"prefix_lengths": LENGTHS[:1]}, r"prefix_lengths: must be integers of shape \(2,\), got int32\(1,\)"),
        ({"q_offset": 3, "causal": False}, "q_offset=3: needs causal=True or a window"),
        (
            {"q_offset": 3, "prefix_lengths": LENGTHS},
            "prefix_lengths: needs k, v that are as long as q, 12, without q_",
        ),
        ({"mask": CausalMask(), "window": 3}, "window: must be left out where mask is given, which says it all"),
        ({"mask": jnp.ones((12, 12), bool)}, "mask: must be made by distflash_jax.masks, got ArrayImpl; none is dense"),
        ({"mask": CausalMask(), "causal": True}, "causal: must be left out where mask is given"),
        ({"window": 4, "strategy": "zigzag"}, "window: must be left out with strategy='zigzag', which is causal alone"),
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
        ({"sinks": jnp.zeros(3)}, r"sinks: must be floats, one a head, of shape \(4,\), got float32\(3,\)"),
    ],
)
def test_what_a_mask_cannot_be_is_refused(options, message):
    q, k, v, *_ = oracle.inputs(Case(T=12))
    with pytest.raises(ValueError, match=message):
        functools.partial(attend(2, **options))(q, k, v)
