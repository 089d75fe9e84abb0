"""train.data, train.tokens: rows, labels, order and resumption, the kinds of sources, and what is refused."""

import itertools
import json
import types

import numpy as np
import pytest

from distflash_jax.packing import idle_share
from distflash_jax.schedule import balanced
from train.config import Config
from train.data import Batches, Rows, Share, Spread, open_data, sample
from train.flags import InputError, MeshShape, Source
from train.loss import IGNORED
from train.sources import map_tokens
from train.tokenizer import SEPARATOR
from train.tokens import Tokens, load, starts_of


def text_of(values) -> bytes:
    return bytes(int(value) for value in values)


def share_of(values, *, seq_len=4, checksum=0, weight=1.0) -> Share:
    tokens = Tokens(np.asarray(values), "here", checksum)
    return Share(tokens, Rows(tokens.values, seq_len), weight)


def batches_over(values, *, seq_len=4, batch_size=2, seed=0, checksum=0, **options) -> Batches:
    shares = [share_of(values, seq_len=seq_len, checksum=checksum)]
    return Batches(shares, batch_size=batch_size, seed=seed, **options)


def test_labels_are_the_next_tokens_and_the_last_position_has_none():
    row = Rows(np.arange(10, 18, dtype=np.uint16), seq_len=4)[1]
    assert row["tokens"].tolist() == [14, 15, 16, 17]
    assert row["labels"].tolist() == [15, 16, 17, IGNORED]
    assert row["tokens"].dtype == row["labels"].dtype == np.int32


def test_a_short_last_row_is_padded_without_labels():
    rows = Rows(np.arange(10, 16), seq_len=4)
    assert len(rows) == 2
    assert rows[1]["tokens"].tolist() == [14, 15, 0, 0]
    assert rows[1]["labels"].tolist() == [15, IGNORED, IGNORED, IGNORED]


def test_packed_documents_are_numbered_in_their_row_and_not_learned_across():
    rows = Rows(np.arange(10, 20), seq_len=6, starts=np.array([0, 2, 5, 6, 9]))
    assert rows[0]["segment_ids"].tolist() == [1, 1, 2, 2, 2, 3]
    assert rows[0]["labels"].tolist() == [11, IGNORED, 13, 14, IGNORED, IGNORED]
    assert rows[1]["segment_ids"].tolist() == [1, 1, 1, 2, 0, 0]
    assert rows[1]["labels"].tolist() == [17, 18, IGNORED, IGNORED, IGNORED, IGNORED]


@pytest.mark.parametrize("groups, accumulate", [(1, 2), (2, 1), (2, 2)])
def test_rows_and_documents_are_ordered_for_the_workers_and_stay_what_they_are(groups, accumulate):
    """Batches on groups of two workers idle less, and hold the same documents and labels, and padding at the end."""
    lengths = np.random.default_rng(0).permutation([40, 21, 3, 17, 9, 1, 30, 12, 2, 7] * 6)
    rows = Rows(np.arange(1, lengths.sum() - 2), seq_len=90, starts=np.cumsum(lengths) - lengths)
    assert [rows.lengths(i).tolist() for i in range(3)] == [
        np.bincount(rows[i]["segment_ids"])[1:].tolist() for i in range(3)
    ]
    share = Share(Tokens(rows.values, "here", 0), rows)
    spread = Spread(balanced(2), num_rows=8 // groups, accumulate=accumulate)
    plain, ordered = (next(Batches([share], batch_size=8, seed=3, spread=x)) for x in (None, spread))
    measure = lambda x: idle_share(x["segment_ids"], balanced(2), groups=groups, accumulate=accumulate)
    assert measure(ordered) < 0.7 * measure(plain)
    for ids in ordered["segment_ids"]:
        used = np.count_nonzero(ids)
        assert (ids[:used] > 0).all() and (np.diff(ids[:used]) >= 0).all()
    assert {documents_in(ordered, row) for row in range(8)} == {documents_in(plain, row) for row in range(8)}


def documents_in(batch, row):
    tokens, labels, ids = (batch[name][row] for name in ("tokens", "labels", "segment_ids"))
    return frozenset((tuple(tokens[ids == number]), tuple(labels[ids == number])) for number in range(1, ids.max() + 1))


@pytest.mark.parametrize("start, end, starts", [([], [7], [2, 5]), ([8], [7], [1, 3]), ([8], [8], [1, 3])])
def test_documents_of_a_token_file_begin_where_the_tokenizer_says(start, end, starts):
    tokens = Tokens(np.array([5, 8, 5, 8, 7, 5]) if start else np.array([5, 7, 5, 5, 7, 5]), "here", 0)
    tokenizer = types.SimpleNamespace(start=frozenset(start), end=frozenset(end))
    assert starts_of(tokens, tokenizer).tolist() == starts
    with pytest.raises(InputError, match="--packing: --tokenizer, which tells what ends a document in here"):
        starts_of(tokens, None)


def test_texts_know_where_their_documents_begin(tmp_path):
    for name, text in (("a.txt", "ab"), ("b.txt", "cde"), ("c.txt", "f")):
        (tmp_path / name).write_text(text)
    tokens = load(tmp_path, 264)
    assert text_of(tokens.values[:2]) + text_of(tokens.values[3:6]) == b"abcde"
    assert tokens.values[[2, 6]].tolist() == [SEPARATOR] * 2 and len(tokens.values) == 8
    assert tokens.starts.tolist() == [0, 3, 7]


def test_a_last_row_of_one_token_has_nothing_to_learn_and_is_left_out():
    assert len(Rows(np.arange(5), seq_len=4)) == 1


def test_an_epoch_holds_each_row_once_and_the_next_one_has_another_order():
    batches = batches_over(np.arange(64), seq_len=4, batch_size=2)
    epochs = [[next(batches)["tokens"][:, 0].tolist() for _ in range(8)] for _ in range(2)]
    for epoch in epochs:
        assert sorted(itertools.chain(*epoch)) == list(range(0, 64, 4))
    assert epochs[0] != epochs[1]


def test_a_batch_larger_than_the_data_repeats_rows():
    assert next(batches_over(np.arange(8), seq_len=4, batch_size=5))["tokens"].shape == (5, 4)


def test_a_batch_is_named_by_its_rows_in_the_sources_though_only_a_part_is_read():
    shares = [share_of(np.arange(40)), share_of(np.arange(100, 180))]
    shares[1] = Share(shares[1].tokens, shares[1].rows.split(0.5, seed=0)[0])
    for part in ((slice(None), slice(None)), (slice(1, 2), slice(0, 2))):
        batches = Batches(shares, batch_size=4, seed=0, part=part)
        whole = Batches(shares, batch_size=4, seed=0)
        firsts = [next(whole)["tokens"][:, 0] for _ in range(3)][-1]
        named = [f"{(first - 100 * (first >= 100)) // 4}" for first in sorted(firsts, key=lambda first: first >= 100)]
        for _ in range(3):
            next(batches)
        here, there = (named[half] for half in (slice(0, 2), slice(2, 4)))
        assert batches.last == f"rows {', '.join(here)} of here and rows {', '.join(there)} of here"


def test_the_seed_decides_the_order():
    def first(seed):
        batches = batches_over(np.arange(400), seed=seed)
        return np.stack([next(batches)["tokens"] for _ in range(5)])

    np.testing.assert_array_equal(first(1), first(1))
    assert (first(1) != first(2)).any()


def test_the_parts_of_several_processes_are_one_batch_and_have_its_position():
    whole = batches_over(np.arange(64))
    rows, columns = (slice(0, 1), slice(1, 2)), (slice(0, 2), slice(2, 4))
    parts = {(i, j): batches_over(np.arange(64), part=(rows[i], columns[j])) for i in (0, 1) for j in (0, 1)}
    for _ in range(5):
        read = {key: next(batches) for key, batches in parts.items()}
        for name, array in next(whole).items():
            np.testing.assert_array_equal(np.block([[read[i, j][name] for j in (0, 1)] for i in (0, 1)]), array)
        assert all(batches.position == whole.position for batches in parts.values())


@pytest.mark.parametrize("num_seen", [0, 1, 7, 8, 9])
def test_a_position_that_went_through_json_resumes_exactly(num_seen):
    undisturbed = batches_over(np.arange(64))
    for _ in range(num_seen):
        next(undisturbed)
    resumed = batches_over(np.arange(64))
    resumed.seek(json.loads(json.dumps(undisturbed.position)))
    for _ in range(12):
        np.testing.assert_array_equal(next(undisturbed)["tokens"], next(resumed)["tokens"])


def test_tokens_that_are_only_read_are_no_labels():
    row = Rows(np.array([~7, ~8, 9, ~3, 4], np.int32), seq_len=5)[0]
    assert row["tokens"].tolist() == [7, 8, 9, 3, 4]
    assert row["labels"].tolist() == [IGNORED, 9, IGNORED, 4, IGNORED]


def firsts(batches, num_batches) -> list[int]:
    return [int(token) for _ in range(num_batches) for token in next(batches)["tokens"][:, 0]]


def mixture(seed=0) -> Batches:
    """Ten rows that begin with 0 to 36, seven parts; three that begin with 100 to 108, three parts."""
    shares = [share_of(np.arange(40), weight=7.0), share_of(np.arange(100, 112), weight=3.0)]
    return Batches(shares, batch_size=10, seed=seed)


def test_weights_are_shares_of_the_samples_and_a_small_source_repeats_in_new_orders():
    batches = mixture()
    drawn = [firsts(batches, 1) for _ in range(10)]
    assert [sum(token < 100 for token in batch) for batch in drawn] == [7] * 10
    large, small = ([t for batch in drawn for t in batch if (t < 100) == is_large] for is_large in (True, False))
    assert all(sorted(large[i : i + 10]) == list(range(0, 40, 4)) for i in range(0, 70, 10))
    assert all(sorted(small[i : i + 3]) == [100, 104, 108] for i in range(0, 30, 3))
    assert len({tuple(small[i : i + 3]) for i in range(0, 30, 3)}) > 1
    assert firsts(mixture(), 5) != firsts(mixture(seed=1), 5)


def test_a_position_in_a_mixture_resumes_exactly_a_second_time_too():
    undisturbed = mixture()
    whole = [firsts(undisturbed, 1) for _ in range(9)]
    position, resumed = mixture().position, []
    for _ in range(3):
        batches = mixture()
        batches.seek(json.loads(json.dumps(position)))
        resumed += [firsts(batches, 1) for _ in range(3)]
        position = batches.position
    assert resumed == whole


def test_a_seed_may_be_as_large_as_the_flag_allows():
    shares = [share_of(np.arange(40)), share_of(np.arange(100, 112))]
    assert len(firsts(Batches(shares, batch_size=2, seed=2**31 - 1), 2)) == 4


def test_held_out_rows_are_chosen_by_the_seed_and_never_trained_on():
    rows = Rows(np.arange(400), seq_len=4)
    kept, held_out = rows.split(0.1, seed=3)
    assert (len(kept), len(held_out)) == (90, 10)
    starts = [[int(some[i]["tokens"][0]) for i in range(len(some))] for some in (kept, held_out)]
    assert sorted(starts[0] + starts[1]) == list(range(0, 400, 4))
    # The choice must be the same in years, or a resumed run trains on what it evaluated.
    assert starts[1] == [68, 88, 164, 240, 252, 272, 328, 344, 364, 368]
    assert rows.split(0.1, seed=4)[1].chosen.tolist() != held_out.chosen.tolist()


def test_a_row_is_held_out_however_often_its_source_is_in_the_mixture(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(200, dtype=np.uint8))
    config = Config(
        mesh=MeshShape(), seq_len=4, data=(Source(tmp_path / "a.npy", 0.5),) * 2, eval_fraction=0.2, batch_size=2
    )
    opened = open_data(config, tmp_path)
    trained = set(firsts(Batches(opened.training, batch_size=2, seed=0), 200))
    evaluated = {int(row["tokens"][0]) for row in sample(opened.held_out, 0)}
    assert len(trained) == 40
    assert evaluated and trained.isdisjoint(evaluated)
    assert opened.num_bytes is None


def test_too_few_rows_to_hold_one_out_are_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"abc")
    config = Config(mesh=MeshShape(), seq_len=4, data=(Source(tmp_path / "a.txt"),), eval_fraction=0.5)
    with pytest.raises(InputError, match=r"--eval-fraction 0\.5: at least 2 rows of 4 tokens, found 1 in "):
        open_data(config, tmp_path)


def test_errors_of_the_evaluated_data_name_their_own_flag(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"abc")
    with pytest.raises(InputError, match=r"--eval-data .*a\.bin: "):
        open_data(Config(eval_data=tmp_path / "a.bin"), tmp_path)


@pytest.mark.parametrize(
    "other, message, accepted",
    [
        ({"checksum": 2}, "--data here: the data of the checkpoint, .*64 tokens, 00000002-00000000 instead", "data"),
        ({"seed": 1}, "--data: rows in the order of the checkpoint", "data"),
        ({"batch_size": 4}, "--data: rows in the order of the checkpoint", "data"),
        ({"tokenizer": "other"}, "--tokenizer: that of the checkpoint", "tokenizer"),
    ],
)
def test_a_position_in_other_data_or_another_order_is_refused_and_may_be_accepted(other, message, accepted):
    position = batches_over(np.arange(64), checksum=1).position
    changed = batches_over(np.arange(64), **{"checksum": 1} | other)
    with pytest.raises(InputError, match=f"{message}.*--accept {accepted} goes on so"):
        changed.seek(position, accepted={"lr"})
    changed.seek(position, accepted={accepted})


def test_the_default_is_the_standard_library_and_always_the_same():
    first, second = load(None, 257), load(None, 257)
    assert first.checksum == second.checksum
    assert len(first.values) > 2_000_000
    assert b"class JSONDecoder" in text_of(first.values[first.values < 256])
    assert (first.values == SEPARATOR).sum() > 100


def test_a_text_file_is_its_bytes(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"h\xc3\xa9\xff\x00")
    assert load(tmp_path / "a.txt", 257).values.tolist() == [104, 195, 169, 255, 0]


def test_a_folder_is_its_files_in_order_with_separators_between(tmp_path):
    (tmp_path / "sub").mkdir()
    for name, content in [("b.txt", b"B"), ("a.md", b"AA"), ("sub/c", b"C"), ("empty", b"")]:
        (tmp_path / name).write_bytes(content)
    (tmp_path / "d.jsonl").write_text('{"text": "D"}\n')
    values = load(tmp_path, 257).values.tolist()
    assert values == [65, 65, SEPARATOR, 66, SEPARATOR, 68, SEPARATOR, 67]


def test_each_line_of_jsonl_is_a_document(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "ab", "id": 1}\n\n{"text": "\\u00e9"}\n')
    assert load(tmp_path / "a.jsonl", 257).values.tolist() == [97, 98, SEPARATOR, 195, 169]


@pytest.mark.parametrize("dtype", ["uint8", "<u2", ">u2", "int32", "int64"])
def test_npy_is_mapped_whatever_its_integer_type(tmp_path, dtype):
    np.save(tmp_path / "a.npy", np.array([5, 200, 7], dtype))
    tokens = load(tmp_path / "a.npy", 201)
    assert isinstance(tokens.values, np.memmap)
    assert Rows(tokens.values, 4)[0]["tokens"].tolist() == [5, 200, 7, 0]


def test_tokens_beyond_16_bits_and_places_beyond_32_are_read(tmp_path):
    values = np.lib.format.open_memmap(tmp_path / "a.npy", "w+", "<u4", (1_300_000_000,))
    values[-3:] = 70_000, 128_255, 7
    values.flush()
    rows = Rows(map_tokens(tmp_path / "a.npy"), 4)
    assert rows[len(rows) - 1]["tokens"].tolist() == [0, 70_000, 128_255, 7]


def test_bin_is_mapped_little_endian_uint16(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"\x01\x00\x00\x02")
    tokens = load(tmp_path / "a.bin", 513)
    assert isinstance(tokens.values, np.memmap)
    assert tokens.values.tolist() == [1, 512]


def npy(array):
    return lambda path: np.save(path, array, allow_pickle=True)


REFUSED = {
    "empty.txt": (lambda path: path.write_bytes(b""), "at least 2 tokens, found 0"),
    "one.txt": (lambda path: path.write_bytes(b"a"), "at least 2 tokens, found 1"),
    "empty.bin": (lambda path: path.write_bytes(b""), "at least 2 tokens, found 0"),
    "odd.bin": (lambda path: path.write_bytes(b"abc"), "its size is odd"),
    "empty.npy": (lambda path: path.write_bytes(b""), "a readable file of tokens"),
    "text.npy": (lambda path: path.write_bytes(b"no numpy"), "a readable file of tokens"),
    "object.npy": (npy(np.array([{}, {}])), "a readable file of tokens"),
    "float.npy": (npy(np.ones(3)), r"one dimension of integers, found float64\[3\]"),
    "square.npy": (npy(np.ones((2, 2), np.int32)), r"one dimension of integers, found int32\[2, 2\]"),
    "negative.npy": (
        npy(np.array([1, -2])),
        r"tokens from 0 to 256 \(--vocab-size 257\), found -2 at position 1",
    ),
    "large.npy": (npy(np.array([1, 2, 300])), r"\(--vocab-size 257\), found 300 at position 2"),
    "notext.jsonl": (
        lambda path: path.write_text('{"text": "a"}\n{"body": "b"}\n'),
        "line 2 is a JSON object",
    ),
    "number.jsonl": (lambda path: path.write_text('{"text": 3}\n'), "line 1 is a JSON object"),
    "list.jsonl": (lambda path: path.write_text("[1]\n"), "line 1 is a JSON object"),
    "cut.jsonl": (lambda path: path.write_text('{"text": "a'), "line 1 is a JSON object"),
    "latin.jsonl": (lambda path: path.write_bytes(b'{"text": "\xe9"}'), "line 1 is a JSON object"),
    "deep.jsonl": (lambda path: path.write_text("[" * 100_000), "line 1 is a JSON object"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unusable_data_are_refused_in_one_line_that_names_the_file(tmp_path, name):
    write, message = REFUSED[name]
    write(tmp_path / name)
    with pytest.raises(InputError, match=message) as refusal:
        load(tmp_path / name, 257)
    assert str(refusal.value).startswith(f"--data {tmp_path / name}: ")
    assert "\n" not in str(refusal.value)


def test_a_token_file_inside_a_folder_is_refused(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"abcd")
    with pytest.raises(InputError, match=r"a folder of text files; pass the token file .*a\.bin by itself"):
        load(tmp_path, 257)


def test_bytes_need_a_vocabulary_that_holds_them(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"ab\xff")
    with pytest.raises(InputError, match=r"tokens from 0 to 127 \(--vocab-size 128\), found 255 at position 2"):
        load(tmp_path / "a.txt", 128)


def test_a_file_that_vanished_is_refused(tmp_path):
    with pytest.raises(InputError, match="a readable file"):
        load(tmp_path / "gone.txt", 257)
