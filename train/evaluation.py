"""Loss on rows that are set aside: the mean, bits per byte, how it falls with the position in a row, and what far
context has to do with it.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from train.loss import IGNORED

Batch = dict[str, np.ndarray]
_FILLERS = {"labels": IGNORED}
PIECES = 8
"""Into so many a row is cut to tell what far context gives."""


class Evaluation:
    """The same first rows each time, in batches of the training's size; the last one is filled up without labels.

    Args:
      rows: what is evaluated; more than num_batches * batch_size rows are left out.
      num_bytes: of text for each token, or None where that is not known.
      num_workers: over whom a sequence is spread, and who therefore have to divide its length.
    """

    def __init__(
        self,
        rows: Sequence[Batch],
        *,
        batch_size: int,
        num_batches: int,
        num_bytes: np.ndarray | None,
        num_workers: int = 1,
    ) -> None:
        self._rows = rows
        self._batch_size = batch_size
        self._num_bytes = num_bytes
        self._num_workers = num_workers
        self.num_rows = min(len(rows), num_batches * batch_size)

    def __call__(self, token_losses: Callable[[Batch], np.ndarray]) -> dict[str, float]:
        """Returns eval_loss and eval_num_tokens, the mean loss in nats and the number of labels it is over;
        eval_bits_per_byte, all bits / bytes of the labels' text; and eval_loss_from_N for N = 0, 2, 4, 8, ...,
        the mean over the positions from N to below the next. A mean over no labels is nan.

        eval_loss_cut_to_N is the mean where only a piece of N tokens of the row is seen, one of eight, over the labels
        in the last halves of all pieces but the first, and eval_loss_not_cut over the same labels with the whole row:
        by their difference context helps that is more than N / 2 to N tokens away.

        Args:
          token_losses: cross entropy [B T] of a batch in nats, 0 where the label is ignored; of any B and T here.
        """
        loss_at = cut_at = count_at = np.zeros(1)
        num_bytes = 0
        for batch in self._batches():
            counts = batch["labels"] != IGNORED
            loss_at = loss_at + token_losses(batch).astype(np.float64).sum(axis=0)
            cut_at = cut_at + cut_losses(token_losses, batch, self._num_workers).astype(np.float64).sum(axis=0)
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
        size = piece_size(len(loss_at))
        scored = is_cut(len(loss_at))
        for name, at in ((f"eval_loss_cut_to_{size}", cut_at), ("eval_loss_not_cut", loss_at)):
            metrics[name] = _ratio(at[scored].sum(), count_at[scored].sum())
        return metrics

    def _batches(self) -> Iterator[Batch]:
        for start in range(0, self.num_rows, self._batch_size):
            numbers = range(start, min(start + self._batch_size, self.num_rows))
            rows = [self._rows[number] for number in numbers]
            blank = {name: np.full_like(values, _FILLERS.get(name, 0)) for name, values in rows[0].items()}
            rows += [blank] * (self._batch_size - len(rows))
            yield {name: np.stack([row[name] for row in rows]) for name in blank}


def piece_size(length: int) -> int:
    """Tokens in a piece of a row of this length, of which the last piece may have less."""
    return math.ceil(length / PIECES)


def is_cut(length: int) -> np.ndarray:
    """bool [T]: which positions see much less in their piece than in the row, but half a piece at least."""
    positions, size = np.arange(length), piece_size(length)
    return (positions >= size) & (positions % size >= size // 2)


def cut_losses(token_losses: Callable[[Batch], np.ndarray], batch: Batch, num_workers: int) -> np.ndarray:
    """Cross entropy [B T] of the same labels, where each piece of a row is read by itself."""
    num_rows, length = batch["tokens"].shape
    size = piece_size(length)
    num_pieces, padded = math.ceil(length / size), math.ceil(size / num_workers) * num_workers

    def cut(values: np.ndarray, filler: int) -> np.ndarray:
        rows = np.pad(values, ((0, 0), (0, num_pieces * size - length)), constant_values=filler)
        return np.pad(rows.reshape(-1, size), ((0, 0), (0, padded - size)), constant_values=filler)

    losses = token_losses({name: cut(values, _FILLERS.get(name, 0)) for name, values in batch.items()})
    return losses[:, :size].reshape(num_rows, -1)[:, :length]


def _ratio(total: float, count: float) -> float:
    return float(total / count) if count > 0 else math.nan
