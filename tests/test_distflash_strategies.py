"""Strategies that are no table, and the choice among all: numbers, remat, bytes, predictions, refusals."""

import csv
import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from counting import collective_bytes, equations, num_collectives, num_forward_launches
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import Case
from test_distflash_attention import assert_matches, attend, make_mesh
from test_distflash_remat import WITH_POLICY, gradient_jaxpr

from benchmarks.cases import ATTENTION
from benchmarks.predict import measured_rows
from distflash_jax import attention, distflash_attention, explain_strategy, strategies, unzigzag, zigzag
from distflash_jax.cost import MACHINES, Shape
from distflash_jax.schedule import STRATEGIES, choose, split_heads
from distflash_jax.spread import Spread
from distflash_jax.timeline import predict, simulate
from pallas_kernels import BlockAttention, Choice, dense

ROWS = Path(__file__).parent.parent / "benchmarks/results/attention.csv"
COLLECTIVE = ("ulysses", "all_gather", "hybrid", "zigzag", "rsa", "burst")
NODES = ("node", "gpu")


def spread(strategy, workers, **options):
    """distflash_attention on a mesh of these sizes, from and to natural order."""
    sizes = workers if isinstance(workers, tuple) else (workers,)
    if len(sizes) == 1:
        attention = attend(workers, strategy=strategy, **options)
    else:
        options = {"mesh": make_mesh(node=sizes[0], gpu=sizes[1]), "axis": NODES, "strategy": strategy} | options
        attention = functools.partial(distflash_attention, return_lse=True, **options)
    if strategy != "zigzag":
        return attention

    def ordered(q, k, v):
        out, lse = attention(*(zigzag(x, workers) for x in (q, k, v)))
        return unzigzag(out, workers, length=q.shape[1]), unzigzag(lse, workers, length=q.shape[1])

    return ordered


@pytest.mark.parametrize(
    "strategy, workers, heads",
    [
        *(("ulysses", 3, (4, 2)), ("ulysses", 4, (33, 11)), ("ulysses", 8, (4, 1))),
        *(("all_gather", 2, (4, 2)), ("all_gather", 5, (4, 2))),
        *(("zigzag", 1, (4, 2)), ("zigzag", 2, (4, 2)), ("zigzag", 5, (2, 1))),
        *(("hybrid", (2, 2), (4, 2)), ("hybrid", (3, 2), (3, 1)), ("ring", (2, 2), (4, 2))),
        *(("rsa", P, (4, 2)) for P in (1, 2, 3, 4, 5, 8)),
    ],
    ids=lambda x: "x".join(map(str, x)) if isinstance(x, tuple) else str(x),
)
def test_causal_attention_and_all_gradients_equal_dense(strategy, workers, heads):
    assert_matches(Case(T=43, N=heads[0], K=heads[1], B=1), spread(strategy, workers))


@pytest.mark.parametrize("strategy, workers", [("ulysses", 3), ("all_gather", 3), ("hybrid", (2, 2)), ("rsa", 3)])
def test_full_attention_across_lengths_equals_dense(strategy, workers):
    case = Case(T=29, S=43, B=1, is_causal=False)
    assert_matches(case, spread(strategy, workers, causal=False))


def dense_forward(queries, keys, mask, scale, softcap=None, dtype=jnp.float32):
    (q,), (k, v) = queries.read(), keys.read()
    seen = mask.visible(jnp.arange(q.shape[1]), jnp.arange(k.shape[1]))
    out, lse = dense.attention(q, k, v, seen, scale, softcap)
    return out.astype(dtype), lse


def dense_backward(queries, keys, mask, scale, softcap=None, dtype=jnp.float32, deterministic=False):
    (q, dout, lse, delta), (k, v) = queries.read(), keys.read()
    q, dout, lse, delta = (x.reshape(*x.shape[:2], k.shape[2], -1, *x.shape[3:]) for x in (q, dout, lse, delta))
    seen = mask.visible(jnp.arange(q.shape[1]), jnp.arange(k.shape[1]))[:, :, None, None]
    dot = functools.partial(jnp.einsum, precision="highest")
    finite = jnp.where(lse == -jnp.inf, 0.0, lse)[..., None]
    scores, slope = dot("btkgh,bskh->btkgs", q, k) * scale, scale
    if softcap is not None:
        scores, slope = softcap * jnp.tanh(scores / softcap), scale * (1 - jnp.tanh(scores / softcap) ** 2)
    weights = jnp.where(seen, jnp.exp(scores - finite), 0.0)
    dscores = weights * (dot("btkgh,bskh->btkgs", dout, v) - delta[..., None]) * slope
    dq = dot("btkgs,bskh->btkgh", dscores, k).reshape(q.shape[0], q.shape[1], -1, q.shape[-1])
    dk, dv = dot("btkgs,btkgh->bskh", dscores, q), dot("btkgs,btkgh->bskh", weights, dout)
    return tuple(x.astype(dtype) for x in (dq, dk, dv))


@pytest.mark.parametrize("strategy, workers, heads, options", [
    *(("burst", (2, 4), (8, 4), {}), ("burst", (3, 2), (3, 3), {}), ("burst", (2, 2), (4, 4), {"causal": False})),
    ("hybrid", (2, 4), (8, 4), {}),
], ids=str)  # fmt: skip
def test_who_sends_what_is_right_around_a_kernel_that_is_quick_to_compile(
    strategy, workers, heads, options, monkeypatch
):
    monkeypatch.setitem(attention.IMPLEMENTATIONS, "xla", BlockAttention(dense_forward, dense_backward))
    is_causal = options.get("causal", True)
    case = Case(T=43, N=heads[0], K=heads[1], S=None if is_causal else 29, B=1, is_causal=is_causal)
    assert_matches(case, spread(strategy, workers, **options))


def test_what_goes_between_nodes_is_sent_with_each_step_within_one(monkeypatch):
    """k, v and q with the three steps of the diagonal before theirs, and out and lse with those of the one behind."""
    monkeypatch.setitem(attention.IMPLEMENTATIONS, "xla", BlockAttention(fake_forward, fake_backward))
    q = jax.ShapeDtypeStruct((1, 24, 4, 8), jnp.float32)
    sent = [e.params for _, e in equations(jax.make_jaxpr(spread("burst", (2, 2)))(q, q, q)) if "perm" in e.params]
    assert sum("node" in params["axis_name"] for params in sent) == 3 * (3 + 2)


MASKS = {
    "window": {"window": 9, "softcap": 3.0},
    "around": {
        "causal": False,
        "window": (12, 3),
        "segment_ids": jnp.repeat(jnp.array([[1, 2, 3, 0]]), jnp.array([7, 20, 8, 5]), axis=1),
    },
    "global": {"window": 3, "global_tokens": 22},
    "across": {"q_offset": 7},
}


@pytest.mark.parametrize("options", MASKS.values(), ids=MASKS)
def test_burst_and_the_double_ring_and_rsa_take_the_masks_of_balanced(options, monkeypatch):
    monkeypatch.setitem(attention.IMPLEMENTATIONS, "xla", BlockAttention(dense_forward, dense_backward))
    q, k, v, dout, _ = oracle.inputs(Case(T=40, S=33 if "q_offset" in options else None, B=1))

    def results(strategy, workers):
        out, pull_back = jax.vjp(lambda *x: spread(strategy, workers, **options)(*x)[0], q, k, v)
        return out, *pull_back(dout)

    wanted = jax.jit(lambda: results("balanced", 1))()
    for strategy, workers in (("burst", 4), ("burst", (2, 2)), ("rsa", 2)):
        for ours, theirs in zip(jax.jit(functools.partial(results, strategy, workers))(), wanted, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("strategy", ["ulysses", "all_gather", "zigzag", "rsa"])
def test_bfloat16_stays_within_twice_the_plain_error(strategy):
    assert_matches(Case(B=1, T=136, N=4, K=1, H=32, dtype="bfloat16"), spread(strategy, 2))


def test_inside_the_users_own_shard_map_over_two_axes():
    tokens = P(None, NODES)
    inside = functools.partial(distflash_attention, axis=NODES, strategy="hybrid", return_lse=True)
    mesh = make_mesh(node=2, gpu=2)
    assert_matches(Case(T=44), jax.shard_map(inside, mesh=mesh, in_specs=tokens, out_specs=tokens))
    with pytest.raises(
        ValueError, match=r"all of them or none must be axes of the shard_map around, which has \['node'"
    ):
        q = jnp.zeros((1, 16, 4, 8))
        axes = frozenset({"node"})
        jax.shard_map(inside, mesh=mesh, in_specs=P(None, "node"), out_specs=P(None, "node"), axis_names=axes)(q, q, q)


@pytest.mark.parametrize("strategy", COLLECTIVE)
def test_with_the_policy_nothing_of_a_forward_runs_again(strategy):
    options = {"strategy": strategy}
    if strategy == "hybrid":
        options |= {"mesh": make_mesh(node=2, gpu=2), "axis": NODES}
    counts = {}
    for name, wrap in (("none", lambda f: f), ("save", WITH_POLICY["save"]), ("plain", jax.checkpoint)):
        jaxpr = gradient_jaxpr(2, wrap, **options)
        counts[name] = num_forward_launches(jaxpr), num_collectives(jaxpr)
    assert counts["save"] == counts["none"]
    assert (counts["none"][0] > 0) == (strategy != "rsa")
    assert counts["plain"][0] == 2 * counts["none"][0] and counts["plain"][1] > counts["none"][1]


def fake_forward(queries, keys, mask, scale, softcap=None, dtype=jnp.float32):
    (q,), (k, v) = queries.read(), keys.read()
    return (q * (k * v).sum()).astype(dtype), q[..., 0] * (k * v).sum()


def fake_backward(queries, keys, mask, scale, softcap=None, dtype=jnp.float32, deterministic=False):
    (q, dout, lse, delta), (k, v) = queries.read(), keys.read()
    dq = q * dout * (lse * delta)[..., None]
    return tuple(x.astype(dtype) for x in (dq * (k * v).sum(), k * dq.sum(), v * dq.sum()))


@pytest.mark.parametrize("strategy, workers, heads", [
    *((strategy, (P,), (4, 2)) for strategy in ("ulysses", "all_gather", "zigzag", "rsa") for P in (2, 3, 4, 8)),
    *((strategy, (P,), (4, 2)) for strategy in ("balanced", "burst") for P in (2, 3, 4)),
    *((strategy, (8,), (4, 4)) for strategy in ("balanced", "burst")),
    *(("hybrid", (2, 2), (4, 2)), ("hybrid", (2, 4), (6, 3)), ("hybrid", (3, 2), (6, 2))),
    *(("burst", (2, 4), (8, 8)), ("burst", (3, 2), (3, 3))),
])  # fmt: skip
def test_compiled_collectives_carry_the_bytes_of_the_closed_forms(strategy, workers, heads, monkeypatch):
    """Around a kernel that is quick to compile, and reads all that it is given.

    The paper's appendix D has Nd forward and 2 Nd backward, for as many key/value heads; tables stay below both.
    """
    monkeypatch.setitem(attention.IMPLEMENTATIONS, "xla", BlockAttention(fake_forward, fake_backward))
    num_workers, (N, K), H = int(np.prod(workers)), heads, 8
    cost = Spread(strategy, Shape(6 * num_workers, N, K, H, itemsize=4), workers)
    q, k = (jax.ShapeDtypeStruct((1, 6 * num_workers, n, H), jnp.float32) for n in heads)
    if len(workers) == 1:
        attend_ = attend(num_workers, strategy=strategy)
    else:
        attend_ = spread(strategy, workers)
    pull_back = jax.eval_shape(lambda *x: jax.vjp(lambda *x: attend_(*x)[0], *x)[1], q, k, k)
    forward = jax.jit(attend_).lower(q, k, k).compile().as_text()
    backward = jax.jit(lambda pull_back, dout: pull_back(dout)).lower(pull_back, q).compile().as_text()
    assert collective_bytes(forward) == pytest.approx(float(cost.traffic("forward").size))
    assert collective_bytes(backward) == pytest.approx(float(cost.traffic("backward").size))
    if heads[0] == heads[1]:
        elements = 6 * num_workers * N * H
        assert collective_bytes(forward) <= 4 * elements and collective_bytes(backward) <= 2 * 4 * elements


@pytest.mark.parametrize("strategy", ["ulysses", "all_gather"])
def test_both_passes_in_one_program_exchange_q_k_and_v_once(strategy, monkeypatch):
    monkeypatch.setitem(attention.IMPLEMENTATIONS, "xla", BlockAttention(fake_forward, fake_backward))
    cost = Spread(strategy, Shape(24, 8, 4, H=8, itemsize=4), (4,), is_one_program=True)
    q, k = (jax.ShapeDtypeStruct((1, 24, n, 8), jnp.float32) for n in (8, 4))
    attend_ = lambda *x: attend(4, strategy=strategy)(*x)[0]
    both = jax.jit(lambda q, k, v, dout: jax.vjp(attend_, q, k, v)[1](dout)).lower(q, k, k, q).compile().as_text()
    once = float((cost.traffic("forward") + cost.traffic("backward")).size)
    assert once < float(
        (cost.traffic("forward") + dataclasses.replace(cost, is_one_program=False).traffic("backward")).size
    )
    assert collective_bytes(both) <= once


def test_elements_are_those_of_the_papers_closed_forms():
    """In chunks of k: (2g + 2) (P-1)/P for Ulysses, 3/2 (P-1) for zigzag, 2 (P-1) for RSA, and all-gather unmasked.

    RSA backward: 4 (P-1). A double ring: what its nodes send each other is that of burst between so many workers.
    """
    for P_ in (2, 4, 8):
        for g in (1, 2, 4):
            shape = Shape(T=12 * P_, N=8 * g, K=8, H=4096)  # a head dim against which statistics are nothing
            chunk = 12 * 8 * 4096
            found = {s: float(Spread(s, shape, (P_,), s == "zigzag").traffic("forward").elements) / chunk
                     for s in ("ulysses", "zigzag", "all_gather", "rsa")}  # fmt: skip
            assert found["ulysses"] == pytest.approx((2 * g + 2) * (P_ - 1) / P_, rel=1e-3)
            assert found["zigzag"] == 1.5 * (P_ - 1) and found["all_gather"] == found["rsa"] == 2 * (P_ - 1)
            assert Spread("rsa", shape, (P_,)).traffic("backward").elements == 4 * (P_ - 1) * chunk
            between, alone = (Spread("burst", shape, workers).table for workers in ((P_, 3), (P_,)))
            assert 3 * between.elements("backward") == alone.elements("backward")


@pytest.mark.parametrize(
    "heads, num_workers, q_heads, kv_heads",
    [
        ((8, 8), 4, 2, 2),
        ((8, 2), 4, 2, 1),
        ((33, 11), 4, 9, 3),
        ((4, 1), 8, 1, 1),
        ((6, 6), 4, 2, 2),
        ((8, 1), 1, 8, 1),
    ],
)
def test_heads_are_dealt_to_any_number_of_workers(heads, num_workers, q_heads, kv_heads):
    split = split_heads(*heads, num_workers)
    assert (split.q_heads, split.kv_heads) == (q_heads, kv_heads)


def test_zigzag_gives_each_worker_two_chunks_and_unzigzag_gives_them_back():
    x = jnp.arange(1, 11)[None]
    y = zigzag(x, 2, fill=-1)
    assert y.tolist() == [[1, 2, 3, 10, -1, -1, 4, 5, 6, 7, 8, 9]]
    assert unzigzag(y, 2, length=10).tolist() == x.tolist()


@pytest.mark.parametrize("strategy", ["ulysses", "all_gather", "zigzag"])
def test_the_hopper_kernels_lower_on_a_mesh(strategy, monkeypatch):
    monkeypatch.setattr(attention, "which_implementation", lambda *_, **__: Choice("hopper", "for the test"))
    q, k = (jax.ShapeDtypeStruct((1, 2048, heads, 64), jnp.bfloat16) for heads in (4, 2))
    loss = lambda q, k, v: spread(strategy, 2)(q, k, v)[0].astype(jnp.float32).sum()
    text = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(q, k, k).lower(lowering_platforms=("cuda",)).as_text()
    assert "hopper_forward" in text and "hopper_backward" in text


# The choice


def test_predictions_of_collectives_are_within_five_percent_of_their_rows():
    """From 32K tokens on."""
    found = {row: x for row, x in measured_rows().items() if row.implementation in ("ulysses", "all_gather", "zigzag")}
    found = {row: seconds for row, seconds in found.items() if ATTENTION[row.case].T >= 32768}
    assert len(found) >= 9
    for row, measured in found.items():
        case = ATTENTION[row.case]
        cost = Spread(row.implementation, Shape(case.T, case.N, case.K, case.H), (2,))
        directions = ("forward",) if row.mode == "forward" else ("forward", "backward")
        assert predict(cost, MACHINES["h200-nvlink"], directions) == pytest.approx(measured, rel=0.05), row


def shapes(T, N, K, H=128):
    return tuple(jax.ShapeDtypeStruct((1, T, heads, H), jnp.bfloat16) for heads in (N, K))


def test_auto_takes_balanced_unless_another_is_clearly_faster():
    seq, nodes = make_mesh(seq=8), make_mesh(node=2, gpu=4)
    explain = lambda machine, **options: explain_strategy(*shapes(65536, 32, 8), machine=MACHINES[machine], **options)
    assert explain("h200-nvlink", mesh=seq).chosen == "balanced"
    assert explain("h200-400g", mesh=seq).chosen == "ulysses"
    assert explain("h200-nodes", mesh=make_mesh(node=2, gpu=4), axis=NODES).chosen == "balanced"
    pairs = dataclasses.replace(MACHINES["h200-nodes"], workers_per_node=4)
    assert explain_strategy(*shapes(65536, 32, 8), machine=pairs, mesh=nodes, axis=NODES).chosen == "hybrid"
    assert explain_strategy(*shapes(65536, 32, 8), mesh=make_mesh(seq=1)).chosen == "balanced"


def test_an_explanation_finds_its_mesh_as_attention_does():
    mesh = jax.make_mesh((2, 4), ("data", "seq"), devices=jax.devices()[:8])  # its axes are Explicit
    q = jax.device_put(jnp.ones((2, 64, 4, 8)), NamedSharding(mesh, P("data", "seq")))
    assert (explain_strategy(q, q).workers, explain_strategy(q, q).shape.B) == ((4,), 1)
    with pytest.raises(ValueError, match="mesh=None: no mesh given and none set"):
        explain_strategy(*shapes(64, 4, 4))
    with pytest.raises(ValueError, match="q: must have 4 dimensions"):
        explain_strategy(jnp.ones((64, 4, 8)), q, mesh=mesh)


def test_the_explanation_is_a_table_of_times_bytes_and_memory():
    mesh = make_mesh(tensor=2, seq=4)
    explanation = explain_strategy(*shapes(65536, 64, 16), mesh=mesh, spec=P(None, "seq", "tensor"))
    lines = str(explanation).splitlines()
    assert lines[0] == "65536 tokens, 32/8 heads of dim 128 on 4 workers of h200-nvlink, each with 1 x 16384 tokens:"
    assert [line.split()[0] for line in lines[2:]].count("balanced") == 1 and len(lines) == 2 + 8
    assert sum(line.endswith("<- auto") for line in lines) == 1
    balanced = next(x for x in explanation.estimates if x.strategy == "balanced")
    shape, both = Shape(65536, 32, 8), ("forward", "backward")
    assert (
        balanced.seconds == simulate(choose("balanced", 4, kv_heads=8), shape, MACHINES["h200-nvlink"], both).makespan
    )
    assert balanced.received > 0 and balanced.held > 0


def test_auto_would_have_taken_one_within_three_percent_of_the_fastest_measured():
    """Of our strategies in the newest rows of each case and mode, all of one commit."""
    with ROWS.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["workers"] == "2" and row["implementation"] in STRATEGIES]
    newest = {(row["case"], row["mode"]): row["commit"] for row in rows}
    compared = 0
    for (name, mode), commit in newest.items():
        group = [row for row in rows if (row["case"], row["mode"], row["commit"]) == (name, mode, commit)]
        seconds, case = {row["implementation"]: float(row["p50"]) for row in group}, ATTENTION[name]
        chosen = explain_strategy(*shapes(case.T, case.N, case.K), mesh=make_mesh(seq=2)).chosen
        assert seconds[chosen] <= 1.03 * min(seconds.values()), (name, mode, chosen)
        compared += len(seconds) > 1
    assert compared >= 6


def test_auto_runs_what_the_explanation_names(monkeypatch):
    monkeypatch.setattr(strategies, "MARGIN", 0.0)
    nodes = dataclasses.replace(MACHINES["h200-nodes"], workers_per_node=2)
    monkeypatch.setattr(strategies, "_find_machine", lambda *_: nodes)
    q, mesh = jnp.ones((1, 32, 4, 8)), make_mesh(node=2, gpu=2)
    chosen = explain_strategy(q, q, mesh=mesh, axis=NODES).chosen
    attention = functools.partial(distflash_attention, mesh=mesh, axis=NODES)
    run = lambda name: str(jax.make_jaxpr(functools.partial(attention, strategy=name))(q, q, q))
    assert chosen != "balanced" and run("auto") == run(chosen) != run("balanced")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"strategy": "hybrid"}, r"axis='seq': must be two axes with strategy='hybrid'"),
        ({"strategy": "zigzag", "causal": False}, "causal=False: must be True with strategy='zigzag'"),
        ({"strategy": "zigzag", "T": 12}, r"q: sequence length 12 must be a multiple of 8, two .* pads"),
        (
            {"strategy": "hybrid", "axis": NODES, "mesh": (2, 4), "N": 2},
            r"q: number of heads 2 must be at least the size 4 of mesh axis 'gpu'",
        ),
        ({"axis": ("seq", "gpu")}, r"axis=\('seq', 'gpu'\): must be one of the mesh's axes"),
    ],
)  # fmt: skip
def test_bad_arguments_get_one_line(options, message):
    options = {"T": 16, "N": 4, "mesh": (4,)} | options
    sizes = options.pop("mesh")
    mesh = make_mesh(seq=4) if len(sizes) == 1 else make_mesh(node=sizes[0], gpu=sizes[1])
    q = jnp.zeros((1, options.pop("T"), options.pop("N"), 8))
    with pytest.raises(ValueError, match=message) as error:
        distflash_attention(q, q, q, mesh=mesh, **options)
    assert "\n" not in str(error.value)


def test_unzigzag_refuses_what_zigzag_cannot_have_made():
    with pytest.raises(ValueError, match="x: sequence length 10 must be a multiple of 4"):
        unzigzag(jnp.zeros((1, 10)), 2)
