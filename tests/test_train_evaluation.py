"""train.evaluation: what is averaged over what, with losses made by hand."""

import math

import numpy as np
import pytest

from train.evaluation import Evaluation, cut_losses
from train.loss import IGNORED


def row(labels) -> dict[str, np.ndarray]:
    return {"tokens": np.ones(len(labels), np.int32), "labels": np.array(labels, np.int32)}


def losses_by_position(batch):
    """The loss at position t is t + 1, where there is a label."""
    return np.where(batch["labels"] != IGNORED, np.arange(1, batch["labels"].shape[1] + 1), 0).astype(np.float32)


def test_the_mean_is_over_labels_and_bits_are_over_bytes():
    rows = [row([5, IGNORED, 5, IGNORED]), row([IGNORED, 6, 5, IGNORED])]
    num_bytes = np.array([0, 0, 0, 0, 0, 2, 0])
    metrics = Evaluation(rows, batch_size=1, num_batches=9, num_bytes=num_bytes)(losses_by_position)
    assert metrics["eval_num_tokens"] == 4
    assert metrics["eval_loss"] == (1 + 3 + 2 + 3) / 4
    assert metrics["eval_bits_per_byte"] == pytest.approx(9 / math.log(2) / 6)


def test_positions_are_grouped_by_powers_of_two():
    rows = [row([1] * 8 + [IGNORED])]
    metrics = Evaluation(rows, batch_size=1, num_batches=1, num_bytes=None)(losses_by_position)
    assert "eval_bits_per_byte" not in metrics
    assert {name: value for name, value in metrics.items() if "from" in name} == {
        "eval_loss_from_0": 1.5,
        "eval_loss_from_2": 3.5,
        "eval_loss_from_4": 6.5,
    }


def test_batches_have_the_size_of_the_training_and_are_the_same_each_time():
    seen = []

    def losses(batch):
        if batch["labels"].shape[1] == 2:  # not cut
            seen.append(batch["labels"].copy())
        return losses_by_position(batch)

    rows = [row([number, IGNORED]) for number in range(9)]
    evaluation = Evaluation(rows[:3], batch_size=2, num_batches=5, num_bytes=None)
    assert evaluation(losses)["eval_num_tokens"] == 3
    assert [labels[:, 0].tolist() for labels in seen] == [[0, 1], [2, IGNORED]]
    seen.clear()
    limited = Evaluation(rows, batch_size=2, num_batches=2, num_bytes=None)
    assert limited.num_rows == 4
    assert limited(losses) == limited(losses)
    assert [labels[:, 0].tolist() for labels in seen] == [[0, 1], [2, 3]] * 2


@pytest.mark.parametrize("length", range(1, 20))
def test_every_position_with_a_label_is_in_one_group_that_is_not_empty(length):
    labels = [1] * (length - 1) + [IGNORED]
    metrics = Evaluation([row(labels)], batch_size=1, num_batches=1, num_bytes=None)(losses_by_position)
    groups = [value for name, value in metrics.items() if "from" in name]
    assert all(math.isfinite(value) for value in groups) == (length > 1)
    assert groups == sorted(groups)


def test_what_far_context_gives_is_told_by_the_same_labels_with_and_without_it():
    """The loss is 1 / (tokens seen): at position t of what is read, 1 / (t + 1)."""
    losses = lambda batch: np.where(batch["labels"] == IGNORED, 0, 1 / np.arange(1, batch["labels"].shape[1] + 1))
    labels = [1] * 31 + [IGNORED]
    metrics = Evaluation([row(labels)], batch_size=1, num_batches=1, num_bytes=None)(losses)
    places = [t for t in range(4, 31) if t % 4 >= 2]
    assert metrics["eval_loss_not_cut"] == pytest.approx(np.mean([1 / (t + 1) for t in places]))
    assert metrics["eval_loss_cut_to_4"] == pytest.approx(np.mean([1 / (t % 4 + 1) for t in places]))


@pytest.mark.parametrize(("length", "size"), [(1, 1), (7, 1), (16, 2), (21, 3), (24, 3)])
def test_pieces_hold_every_token_once_with_its_own_label(length, size):
    tokens = np.arange(2 * length, dtype=np.int32).reshape(2, length)
    seen = []

    def losses(batch):
        seen.append(batch)
        return 10.0 * batch["tokens"] + (batch["labels"] - batch["tokens"])

    assert np.array_equal(cut_losses(losses, {"tokens": tokens, "labels": tokens + 3}, 4), 10 * tokens + 3)
    (pieces,) = seen
    assert pieces["tokens"].shape[1] == 4
    assert (pieces["labels"][:, size:] == IGNORED).all() and (pieces["labels"] != IGNORED).sum() == 2 * length
