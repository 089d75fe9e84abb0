"""How evenly packed documents spread the work of attention, and orders that spread it better. Pure NumPy.

The table of a schedule cannot know the documents. But in a row documents that do not see each other may follow each
other in any order: losses and gradients stay what they are, and what moves is which worker has them.
"""

import math
from collections.abc import Sequence

import numpy as np

from distflash_jax.schedule import Schedule

NUM_ORDERS = 256  # that are tried for a row, in 5 ms for 100 documents and 8 workers; 4 times as many idle 1 % less


def visible_scores(segment_ids: np.ndarray, num_workers: int) -> np.ndarray:
    """[P, P]: how many queries of each chunk see how many keys of each chunk, causal, in rows of documents [B, T]."""
    chunk = np.arange(segment_ids.shape[1]) // -(-segment_ids.shape[1] // num_workers)
    counts = np.zeros((len(segment_ids), num_workers, segment_ids.max() + 1))
    np.add.at(counts, (np.arange(len(segment_ids))[:, None], chunk, segment_ids), 1)
    return _scores(counts[..., 1:]).sum(axis=0)  # 0 is padding


def _scores(counts: np.ndarray) -> np.ndarray:
    """[..., P, P]: those of `visible_scores`, where a chunk has so many tokens of each document, [..., P, D]."""
    scores = np.tril(counts @ np.swapaxes(counts, -1, -2), -1)
    diagonal = np.arange(scores.shape[-1])
    scores[..., diagonal, diagonal] = (counts * (counts + 1) / 2).sum(axis=-1)
    return scores


def _span(scores: np.ndarray, table: Schedule) -> np.ndarray:
    """[...]: the sum over the steps of the longest task, in visible scores; half of a pair has half of its scores."""
    of_tasks = lambda value: np.array([[value(task) if task else 0 for task in step.tasks] for step in table.steps])
    q, kv, parts = of_tasks(lambda x: x.q), of_tasks(lambda x: x.kv), of_tasks(lambda x: x.part.count)
    return np.where(parts > 0, scores[..., q, kv] / np.maximum(parts, 1), 0).max(axis=-1).sum(axis=-1)


def idle_share(segment_ids: np.ndarray, table: Schedule, *, groups: int = 1, accumulate: int = 1) -> float:
    """Share of the machine time of attention in which workers wait for a longer task of the same step.

    By visible scores, so as if kernels cost nothing else.

    Args:
      segment_ids: [B, T], the documents of a batch.
      groups: of workers, each with so many of the rows, one after the other; all wait for the slowest.
      accumulate: micro-batches of every so many-th row.
    """
    busy, span = 0.0, 0.0
    for first in range(accumulate):
        scores = [visible_scores(rows[first::accumulate], table.num_workers) for rows in np.split(segment_ids, groups)]
        busy += float(np.sum(scores))
        span += float(_span(np.stack(scores), table).max())
    return 1 - busy / (groups * table.num_workers * span) if span else 0.0


def order_documents(rows: Sequence[Sequence[int] | np.ndarray], table: Schedule, *, seq_len: int) -> list[np.ndarray]:
    """For each row, the numbers of its documents in an order by which workers that share the rows wait little.

    The best of many orders, row after row, each beside what the rows before have made of the workers' tasks; the same
    for the same lengths. Two workers wait for each other next to never then. Among many, documents that are short
    beside a chunk leave the steps of a table that are of far chunks to a few, in every order.

    Args:
      rows: the lengths of the documents of each row.
      table: such as schedule.balanced(num_workers), which tells who has which chunks when.
      seq_len: tokens of a row, with the padding behind its documents.
    """
    edges = np.arange(table.num_workers + 1.0) * -(-seq_len // table.num_workers)
    total, orders = np.zeros((table.num_workers,) * 2), []
    for lengths in rows:
        number = np.arange(len(lengths))
        # The first is the order as it is, the others are as good as random. Processes that share rows have to agree,
        # whatever their processors: a square root is rounded alike everywhere, and whole numbers in float64 are exact.
        keys = np.outer(np.arange(NUM_ORDERS), (number + 1.0) ** 2 * math.sqrt(5)) % 1
        tried = np.argsort(keys, axis=1, kind="stable")
        sizes = np.asarray(lengths, np.float64)[tried]
        stops = np.cumsum(sizes, axis=1)[:, None]
        counts = np.diff(np.clip(edges[:, None], stops - sizes[:, None], stops), axis=1)
        scores = total + _scores(counts)
        best = int(_span(scores, table).argmin())
        total = scores[best]
        orders.append(tried[best])
    return orders
