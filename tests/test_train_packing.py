"""train.packing: how evenly documents spread the work over workers."""

import numpy as np
import pytest

from distflash_jax.schedule import balanced, ring
from train.packing import idle_share, visible_scores


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
