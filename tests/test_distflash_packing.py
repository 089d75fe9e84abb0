"""How evenly documents spread the work over workers, and orders that spread it better."""

import numpy as np
import pytest

from distflash_jax.packing import idle_share, order_documents, visible_scores
from distflash_jax.schedule import balanced, ring


def test_scores_of_chunks_are_those_of_the_mask():
    ids = np.array([[1, 1, 2, 2, 2, 3, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1]])
    chunk, position = np.arange(8) // 2, np.arange(8)
    seen = (ids[:, :, None] == ids[:, None]) & (ids[:, :, None] > 0) & (position[:, None] >= position)
    wanted = [[seen[:, chunk == q][:, :, chunk == kv].sum() for kv in range(4)] for q in range(4)]
    assert visible_scores(ids, 4).tolist() == wanted


@pytest.mark.parametrize("num_workers", [2, 5, 8])
def test_one_document_idles_as_the_table_says_in_long_rows(num_workers):
    ids = np.ones((2, 4096 * num_workers), int)
    for table in (balanced(num_workers), ring(num_workers)):
        assert idle_share(ids, table) == pytest.approx(float(table.idle_fraction), abs=1e-3)


def test_short_documents_beside_a_long_one_leave_workers_idle():
    ids = np.repeat([1, *range(2, 34)], [512, *[16] * 32])[None]
    assert idle_share(ids, balanced(2)) == pytest.approx(1 - (512 * 513 / 2 + 32 * 16 * 17 / 2) / (512 * 513))
    assert idle_share(np.zeros((1, 64), int), balanced(2)) == 0


def test_groups_wait_for_each_other_and_micro_batches_follow_each_other():
    long, short = np.ones(64, int), np.arange(1, 65)
    alone = idle_share(long[None], balanced(2))
    assert idle_share(np.stack([long, long]), balanced(2), groups=2) == pytest.approx(alone)
    assert idle_share(np.stack([long, short]), balanced(2), groups=2) > 0.4
    assert idle_share(np.stack([long, long, short, short]), balanced(2), accumulate=2) < 0.1


def numbered(lengths):
    return np.repeat(np.arange(1, len(lengths) + 1), lengths)[None]


def long_tailed(generator, count, total):
    sizes = np.exp(1.3 * generator.normal(size=count))
    return np.diff(np.round(np.cumsum(sizes) / sizes.sum() * total), prepend=0).astype(int)


@pytest.mark.parametrize("num_workers, share", [(2, 0.05), (4, 0.9), (8, 0.95)])
@pytest.mark.parametrize("count", [12, 100])
def test_ordered_documents_with_a_long_tail_leave_workers_less_idle(num_workers, share, count):
    generator, table, idle = np.random.default_rng(count), balanced(num_workers), []
    for _ in range(8):
        lengths = long_tailed(generator, count, 4096)
        (order,) = order_documents([lengths], table, seq_len=4096)
        assert sorted(order) == list(range(count))
        idle.append([idle_share(numbered(x), table) for x in (lengths, lengths[order])])
    before, after = np.mean(idle, axis=0)
    assert before > 0.1 and after < share * before and all(after <= before for before, after in idle)


def test_rows_that_share_workers_are_ordered_beside_each_other():
    """One long and two short documents: a row alone leaves a worker idle, two rows do not."""
    rows, table = [[600, 200, 224]] * 2, balanced(2)
    orders = order_documents(rows, table, seq_len=1024)
    ids = np.concatenate([numbered(np.array(x)[order]) for x, order in zip(rows, orders, strict=True)])
    assert max(idle_share(ids[i : i + 1], table) for i in range(2)) > 5 * idle_share(ids, table)
    assert order_documents([[], [7]], table, seq_len=64)[0].size == 0
