"""How evenly packed documents spread the work of attention: the table of a schedule cannot know them. Pure NumPy."""

import numpy as np

from distflash_jax.schedule import Schedule, Task


def visible_scores(segment_ids: np.ndarray, num_workers: int) -> np.ndarray:
    """[P, P]: how many queries of each chunk see how many keys of each chunk, causal, in rows of documents [B, T]."""
    chunk = np.arange(segment_ids.shape[1]) // -(-segment_ids.shape[1] // num_workers)
    scores = np.zeros((num_workers, num_workers))
    for ids in segment_ids:
        counts = np.zeros((num_workers, ids.max() + 1))
        np.add.at(counts, (chunk, ids), 1)
        counts = counts[:, 1:]  # 0 is padding
        scores += np.tril(counts @ counts.T, -1) + np.diag((counts * (counts + 1) / 2).sum(axis=1))
    return scores


def idle_share(segment_ids: np.ndarray, table: Schedule, *, groups: int = 1, accumulate: int = 1) -> float:
    """Share of the machine time of attention in which workers wait for a longer task of the same step.

    By visible scores, so as if kernels cost nothing else; half of a pair counts as half of its scores.

    Args:
      segment_ids: [B, T], the documents of a batch.
      groups: of workers, each with so many of the rows, one after the other; all wait for the slowest.
      accumulate: micro-batches of every so many-th row.
    """
    busy, span = 0.0, 0.0
    for first in range(accumulate):
        spans = []
        for rows in np.split(segment_ids, groups):
            scores = visible_scores(rows[first::accumulate], table.num_workers)

            def work(task: Task | None, scores: np.ndarray = scores) -> float:
                return 0.0 if task is None else float(scores[task.q, task.kv]) / task.part.count

            steps = [[work(task) for task in step.tasks] for step in table.steps]
            busy += sum(map(sum, steps))
            spans.append(sum(map(max, steps)))
        span += max(spans)
    return 1 - busy / (groups * table.num_workers * span) if span else 0.0
