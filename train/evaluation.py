"""Loss on rows that are set aside: the mean, bits per byte, and how it falls with the position in a row."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from train.loss import IGNORED

Batch = dict[str, np.ndarray]


class Evaluation:
    """The same first rows each time, in batches of the training's size; the last one is filled up without labels.

    Args:
      rows: what is evaluated; more than num_batches * batch_size rows are left out.
      num_bytes: of text for each token, or None where that is not known.
    """

    def __init__(
        self,
        rows: Sequence[Batch],
        *,
        batch_size: int,
        num_batches: int,
        num_bytes: np.ndarray | None,
    ) -> None:
        self._rows = rows
        self._batch_size = batch_size
        self._num_bytes = num_bytes
        self.num_rows = min(len(rows), num_batches * batch_size)

    def __call__(self, token_losses: Callable[[Batch], np.ndarray]) -> dict[str, float]:
        """Returns eval_loss and eval_num_tokens, the mean loss in nats and the number of labels it is over;
        eval_bits_per_byte, all bits / bytes of the labels' text; and eval_loss_from_N for N = 0, 2, 4, 8, ...,
        the mean over the positions from N to below the next. A mean over no labels is nan.

        Args:
          token_losses: cross entropy [B T] of a batch in nats, 0 where the label is ignored.
        """
        loss_at = count_at = np.zeros(1)
        num_bytes = 0
        for batch in self._batches():
            counts = batch["labels"] != IGNORED
            loss_at = loss_at + token_losses(batch).astype(np.float64).sum(axis=0)
            count_at = count_at + counts.sum(axis=0)
            if self._num_bytes is not None:
                num_bytes += int(self._num_bytes[batch["labels"][counts]].sum())
        loss, count = loss_at.sum(), count_at.sum()
        metrics = {"eval_loss": _ratio(loss, count), "eval_num_tokens": float(count)}
        if self._num_bytes is not None:
            metrics["eval_bits_per_byte"] = _ratio(loss / math.log(2), num_bytes)
        # The last position has no label: a bucket for it alone would be empty.
        edges = [0, *(2**k for k in range(1, max(len(loss_at) - 2, 0).bit_length())), len(loss_at)]
        for start, end in itertools.pairwise(edges):
            metrics[f"eval_loss_from_{start}"] = _ratio(loss_at[start:end].sum(), count_at[start:end].sum())
        return metrics

    def _batches(self) -> Iterator[Batch]:
        for start in range(0, self.num_rows, self._batch_size):
            numbers = range(start, min(start + self._batch_size, self.num_rows))
            rows = [self._rows[number] for number in numbers]
            blank = {"tokens": np.zeros_like(rows[0]["tokens"]), "labels": np.full_like(rows[0]["labels"], IGNORED)}
            rows += [blank] * (self._batch_size - len(rows))
            yield {name: np.stack([row[name] for row in rows]) for name in blank}


def _ratio(total: float, count: float) -> float:
    return float(total / count) if count > 0 else math.nan
