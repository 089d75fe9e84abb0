"""The table, exhaustively and in pure Python."""

from fractions import Fraction

import pytest

from distflash_jax.schedule import Part, Schedule, Step, Task, balanced, burst, choose, ring, visible_pairs

ALL_P = range(1, 65)
CAUSAL = [(f"balanced_{cut}", lambda P, cut=cut: balanced(P, cut=cut)) for cut in ("heads", "rows", None)] + [
    ("ring", ring),
    ("mirrored", lambda P: burst(P).towards("backward")),
    ("mirrored_rows", lambda P: burst(P, cut="rows").towards("backward")),
]


@pytest.mark.parametrize("build", [b for _, b in CAUSAL], ids=[name for name, _ in CAUSAL])
def test_every_causal_pair_is_computed_once(build):
    for P in ALL_P:
        shares: dict[tuple[int, int], Fraction] = {}
        for step in build(P).steps:
            for task in filter(None, step.tasks):
                shares[task.q, task.kv] = shares.get((task.q, task.kv), Fraction(0)) + Fraction(1, task.part.count)
        assert shares == {(q, kv): 1 for q in range(P) for kv in range(q + 1)}


@pytest.mark.parametrize("build", [balanced, ring])
def test_every_pair_is_computed_once_without_a_causal_mask(build):
    for P in ALL_P:
        shares: dict[tuple[int, int], Fraction] = {}
        for task in (task for step in build(P, is_causal=False).steps for task in step.tasks):
            shares[task.q, task.kv] = shares.get((task.q, task.kv), Fraction(0)) + Fraction(1, task.part.count)
        assert shares == {(q, kv): 1 for q in range(P) for kv in range(P)}
        assert build(P, is_causal=False).idle_fraction == 0


@pytest.mark.parametrize("build", [b for _, b in CAUSAL], ids=[name for name, _ in CAUSAL])
def test_fetches_are_partial_bijections_and_returns_their_inverse(build):
    for P in ALL_P:
        for step in build(P).steps:
            for side in (step.q, step.kv):
                for ends in zip(*side.fetch, strict=True):
                    assert len(set(ends)) == len(ends)
                assert {(b, a) for a, b in side.returns} == set(side.fetch)


def test_no_worker_idles_in_the_balanced_table():
    for P in ALL_P:
        for cut in ("heads", "rows"):
            assert balanced(P, cut=cut).idle_fraction == 0
            assert balanced(P, cut=cut).makespan == Fraction(P, 2)
            mirrored = burst(P, cut=cut).towards("backward")
            assert (mirrored.idle_fraction, mirrored.makespan) == (0, Fraction(P, 2))


def test_in_the_backward_of_burst_queries_travel_where_keys_did():
    for P in ALL_P:
        there, back = burst(P), burst(P).towards("backward")
        assert there.towards("forward") is there and there.steps == balanced(P).steps
        for a, b in zip(there.steps, back.steps, strict=True):
            assert sorted(filter(None, a.tasks)) == sorted(filter(None, b.tasks))
            assert a.q.fetch == tuple(sorted(b.kv.returns, key=lambda pair: pair[1])) or P == 1
            assert len(b.q.fetch) == len(a.kv.fetch) and len(b.kv.fetch) == len(a.q.fetch)


def test_idle_share_of_the_papers_own_table_and_of_the_ring():
    for P in ALL_P:
        assert balanced(P, cut=None).idle_fraction == (0 if P % 2 else Fraction(1, P + 1))
        assert ring(P).idle_fraction == Fraction(P - 1, 2 * P - 1)
        assert ring(P).makespan == P - Fraction(1, 2)


def test_half_of_the_diagonal_hides_the_first_fetch_and_half_the_last_return():
    for P in range(2, 65):
        for is_causal in (True, False):
            steps = balanced(P, is_causal=is_causal).steps
            for index, step in ((0, steps[0]), (1, steps[-1])):
                assert step.tasks == tuple(Task(w, w, Part("heads", index, 2)) for w in range(P))


@pytest.mark.parametrize("first, last", [(None, 0), (0, None), (-30, 14), (-9, 0), (4, 25), (None, -200)])
def test_the_pairs_of_a_mask_are_those_with_a_visible_token(first, last):
    """The table has them, and the diagonal; Schedule itself checks that it has each once."""
    for P, rows, keys, stop in ((1, 4, 4, 4), (3, 7, 7, 20), (4, 5, 9, 36), (8, 9, 4, 25)):
        is_seen = lambda q, k: (first is None or k - q >= first) and (last is None or k - q <= last)
        wanted = {(q // rows, k // keys) for q in range(P * rows) for k in range(stop) if is_seen(q, k)}
        pairs = visible_pairs(P, rows, keys, first=first, last=last, stop=stop)
        assert pairs == wanted
        for strategy in ("balanced", "balanced_unsplit", "ring"):
            table = choose(strategy, P, kv_heads=2, pairs=pairs)
            tasks = {(task.q, task.kv) for step in table.steps for task in step.tasks if task}
            assert tasks == wanted | {(w, w) for w in range(P)}


def test_what_comes_after_takes_as_many_steps_as_what_comes_before():
    for P in range(1, 18):
        ahead = choose("balanced", P, kv_heads=2, pairs=visible_pairs(P, 8, 8, first=1))
        assert len(ahead.steps) == len(balanced(P).steps)


GOLDEN = {
    1: """
step 0  q0.k0
""",
    2: """
step 0  q0.k0/heads0  q1.k1/heads0
step 1  q1.k0/heads1  q1.k0/heads0
step 2  q0.k0/heads1  q1.k1/heads1
""",
    3: """
step 0  q0.k0/heads0  q1.k1/heads0  q2.k2/heads0
step 1  q2.k0         q1.k0         q2.k1
step 2  q0.k0/heads1  q1.k1/heads1  q2.k2/heads1
""",
    8: """
step 0  q0.k0/heads0  q1.k1/heads0  q2.k2/heads0  q3.k3/heads0  q4.k4/heads0  q5.k5/heads0  q6.k6/heads0  q7.k7/heads0
step 1  q7.k0         q1.k0         q2.k1         q3.k2         q4.k3         q5.k4         q6.k5         q7.k6
step 2  q6.k0         q7.k1         q2.k0         q3.k1         q4.k2         q5.k3         q6.k4         q7.k5
step 3  q5.k0         q6.k1         q7.k2         q3.k0         q4.k1         q5.k2         q6.k3         q7.k4
step 4  q4.k0/heads1  q5.k1/heads1  q6.k2/heads1  q7.k3/heads1  q4.k0/heads0  q5.k1/heads0  q6.k2/heads0  q7.k3/heads0
step 5  q0.k0/heads1  q1.k1/heads1  q2.k2/heads1  q3.k3/heads1  q4.k4/heads1  q5.k5/heads1  q6.k6/heads1  q7.k7/heads1
""",
}


@pytest.mark.parametrize("P", GOLDEN)
def test_table_as_text(P):
    assert str(balanced(P)) == GOLDEN[P].strip("\n")


def diagonal(P):
    return Step(tuple(Task(w, w) for w in range(P)))


@pytest.mark.parametrize(
    "steps, message",
    [
        ((Step((Task(1, 1), Task(0, 0))),), "owns neither operand"),
        ((Step((Task(0, 0), Task(1, 0))), diagonal(2)), "step 0 must be of the diagonal"),
        ((diagonal(2),), "missing pairs {\\(1, 0\\)}"),
        ((diagonal(2), Step((Task(0, 1), Task(1, 0)))), "pairs that the mask hides {\\(0, 1\\)}"),
        ((diagonal(2), Step((Task(1, 0), Task(1, 0)))), "exactly once"),
        (
            (diagonal(2), Step((Task(1, 0, Part("heads", 0, 2)), Task(1, 0, Part("heads", 0, 2))))),
            "exactly once",
        ),
        (
            (diagonal(2), Step((Task(1, 0, Part("heads", 0, 2)), Task(1, 0, Part("heads", 1, 2))))),
            "step 1: q1.k0/heads0 takes a part, but the diagonal",
        ),
        ((diagonal(2), Step((None,))), "1 tasks for 2 workers"),
        (
            (diagonal(3), Step((None, Task(1, 0), Task(2, 0))), Step((None, None, Task(2, 1)))),
            "sends the same chunk twice",
        ),
        (
            (diagonal(3), Step((None, Task(1, 0, Part("rows", 0, 2)), Task(2, 1, Part("rows", 1, 2))))),
            "must take the same part",
        ),
    ],
)
def test_an_invalid_table_is_refused(steps, message):
    with pytest.raises(ValueError, match=message):
        Schedule("broken", True, steps)
