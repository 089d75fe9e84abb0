"""FLOPs, bytes and rates: against closed forms, against what is traced, and against the rows they come from."""

import csv
import dataclasses
import statistics
from fractions import Fraction
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from counting import equations
from test_distflash_attention import attend

from distflash_jax.cost import MACHINES, Cost, Shape, flops
from distflash_jax.schedule import balanced, choose, ring, visible_pairs
from distflash_jax.timeline import simulate

ROWS = Path(__file__).parent.parent / "benchmarks/results/kernel.csv"


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("is_causal", [True, False])
def test_the_flops_of_all_tasks_are_those_of_the_whole(direction, is_causal):
    shape = Shape(T=240, N=8, K=4, H=16, B=3)
    num_scores = 3 * (240 * 241 // 2 if is_causal else 240**2)
    for P in (1, 2, 3, 4, 5, 8):
        for schedule in (
            ring(P, is_causal=is_causal),
            *(balanced(P, is_causal=is_causal, cut=c) for c in ("heads", "rows", None)),
        ):
            cost = Cost(schedule, shape)
            total = sum(cost.flops(direction, task) for step in schedule.steps for task in step.tasks)
            assert (
                total
                == flops(direction, 8, 16, num_scores)
                == (2 if direction == "forward" else 5) * 2 * 8 * 16 * num_scores
            )


@pytest.mark.parametrize("window", [1, 7, 30, 60, 100, 500])
def test_the_flops_of_a_window_are_those_of_its_scores(window):
    shape = Shape(T=240, N=8, K=4, H=16, window=window)
    num_scores = sum(min(row + 1, window) for row in range(240))
    for P in (1, 2, 3, 4, 8):
        pairs = visible_pairs(P, 240 // P, 240 // P, first=1 - window, last=0)
        table = choose("balanced", P, kv_heads=4, pairs=pairs)
        total = sum(Cost(table, shape).flops("forward", task) for step in table.steps for task in step.tasks)
        assert total == flops("forward", 8, 16, num_scores)


def chunks_fetched(P, cut):
    """Chunks of q, and of k or v, that a worker of the balanced table fetches on average."""
    if P % 2:
        return Fraction(P * P - 1, 8 * P), Fraction((P - 1) * (3 * P - 1), 8 * P)
    q, kv = Fraction(P - 2, 8), Fraction(3 * P - 2, 8)
    return {None: (q, kv), "heads": (q + Fraction(1, 4), kv - Fraction(1, 4)), "rows": (q + Fraction(1, 4), kv)}[cut]


def test_traffic_equals_the_closed_forms():
    rows, K, H = 6, 2, 16
    for P in (*range(2, 18), 64):
        for g in (1, 2, 4, 8):
            for cut in ("heads", "rows", None):
                cost = Cost(balanced(P, cut=cut), Shape(rows * P, g * K, K, H, itemsize=2))
                q, kv = chunks_fetched(P, cut)
                queries, keys = rows * g * K, rows * K * H
                # bfloat16: q, k, v, dout; float32: what is returned, and lse and delta, one a row and head.
                assert cost.traffic("forward") == q * queries * (H * (2 + 4) + 4) + 2 * kv * keys * 2
                assert cost.traffic("backward") == q * queries * (H * (2 + 2 + 4) + 8) + 2 * kv * keys * (2 + 4)


@pytest.mark.parametrize("num_workers, kv_heads", [(2, 2), (4, 1)])
def test_traced_messages_of_bfloat16_carry_the_tables_bytes_and_no_more(num_workers, kv_heads):
    T, N, H = 6 * num_workers, 4, 8
    q, k = (jax.ShapeDtypeStruct((1, T, heads, H), jnp.bfloat16) for heads in (N, kv_heads))
    attention = lambda q, k, v: attend(num_workers)(q, k, v)[0]
    jaxpr = jax.make_jaxpr(lambda q, k, v, dout: jax.vjp(attention, q, k, v)[1](dout))(q, k, k, q)
    sent = [equation for _, equation in equations(jaxpr) if equation.primitive.name == "ppermute"]
    size = sum(len(x.params["perm"]) * x.invars[0].aval.size * x.invars[0].aval.dtype.itemsize for x in sent)
    cost = Cost(choose("balanced", num_workers, kv_heads=kv_heads), Shape(T, N, kv_heads, H))
    assert size == num_workers * (cost.traffic("forward") + cost.traffic("backward"))


def test_memory_counts_what_each_merge_reads_and_writes():
    """P = 2: at the end two results of each half are read. P = 4: two of the first half before step 3, then what they
    made of it with two others, and four of the second half. q, k and v of step P / 2 are cut in half before.
    """
    shape = Shape(T=20, N=4, K=4, H=8)
    cost = Cost(balanced(2), shape)
    half, cut = cost.size("out") // 2 + cost.size("lse") // 2, 3 * cost.size("q") // 2
    cast = (cost.size("out") + cost.size("lse")) // 2
    assert cost.memory("forward") == (2 * cut, 0, 0, 4 * half + cast)
    assert Cost(balanced(4), dataclasses.replace(shape, T=40)).memory("forward") == (
        0,
        2 * cut,
        0,
        3 * half,
        7 * half + cast,
    )
    assert Cost(balanced(1), shape).memory("forward") == (0, 0)


def test_rates_are_least_squares_of_their_rows():
    machine = MACHINES["h200-nvlink"]
    with ROWS.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["implementation"] == "hopper"]
    for direction in ("forward", "backward"):
        for visible in ("causal", "full"):
            points = {}
            for row in rows:
                length, _, rest = row["case"].partition("k_")
                is_meant = (row["commit"], row["mode"], rest) == ("f9889ab", direction, f"d128_mha_{visible}")
                if is_meant and int(length) >= 4:
                    points[1024 * int(length)] = 1e12 * float(row["p50"])
            line = statistics.linear_regression([1 / T for T in points], [1 / rate for rate in points.values()])
            rate = getattr(getattr(machine, direction), visible)
            assert rate.peak == pytest.approx(1 / line.intercept, rel=1e-3)
            assert rate.half == pytest.approx(line.slope / line.intercept, rel=2e-3)
            for T, measured in points.items():
                assert rate.at(T) == pytest.approx(measured, rel={"forward": 0.02, "backward": 0.03}[direction])


def test_the_link_passes_through_its_two_measurements():
    machine = MACHINES["h200-nvlink"]
    for size, measured in ((2**24, 123e9), (2**29, 382e9)):
        assert size / (machine.latency + size / machine.link) == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize(
    "wrong, message",
    [({"T": 0}, "T=0: must be at least 1"), ({"T": 8, "N": 4, "K": 3}, "N=4: must be a multiple of K=3")],
)
def test_an_impossible_shape_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Shape(**wrong)


def test_a_head_dim_without_rates_is_refused():
    with pytest.raises(ValueError, match="H=64: the rates of h200-nvlink are those of head dim 128"):
        simulate(balanced(2), Shape(8192, H=64), MACHINES["h200-nvlink"])
