"""Rows against the same rows built token by token from the definition of each way of packing."""

from __future__ import annotations

import numpy as np
import pytest

from shared.data.rows import Packing, Rows

EOS = 99


def corpus(lengths: list[int], dtype: type = np.uint16) -> tuple[list[list[int]], np.ndarray, np.ndarray]:
    """Documents of the given numbers of tokens (without end-of-text), no two tokens alike, and their file."""
    names = iter(range(1000, 65_000))
    documents = [[next(names) for _ in range(length)] for length in lengths]
    closed = [[*document, EOS] for document in documents]
    offsets = np.cumsum([0, *map(len, closed)])
    return documents, np.array([token for document in closed for token in document], dtype), offsets


LENGTHS = {
    "mixed": [5, 1, 30, 8, 7, 16, 2, 9, 1, 1, 24],
    "one long document": [100],
    "documents as long as a row, one less, one more": [8, 7, 9, 8, 7, 9],
    "single tokens": [1] * 20,
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("length", [1, 3, 8, 11])
def test_stream_rows_follow_each_other_and_share_one_token(lengths: list[int], length: int) -> None:
    _, tokens, offsets = corpus(lengths)
    rows = Rows(tokens, offsets, "stream", length, EOS)
    assert rows.num_rows == len(range(0, len(tokens) - length, length))  # as many starts as leave length + 1 tokens
    batch = rows.gather(np.arange(rows.num_rows))
    assert batch.tokens.ravel().tolist() == tokens[: rows.num_rows * length].tolist()
    assert batch.targets.ravel().tolist() == tokens[1 : rows.num_rows * length + 1].tolist()
    assert batch.mask.all()
    assert batch.segments is None and batch.positions is None


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("length", [1, 3, 8, 11])
def test_segments_count_documents_within_the_row_and_never_look_across(lengths: list[int], length: int) -> None:
    _, tokens, offsets = corpus(lengths)
    rows = Rows(tokens, offsets, "segments", length, EOS)
    batch = rows.gather(np.arange(rows.num_rows))
    assert batch.segments is not None and batch.positions is not None
    stream = Rows(tokens, offsets, "stream", length, EOS).gather(np.arange(rows.num_rows))
    assert np.array_equal(batch.tokens, stream.tokens)
    for row in range(rows.num_rows):
        segment, position = 0, 0
        for column in range(length):
            token = batch.tokens[row, column]
            assert (batch.segments[row, column], batch.positions[row, column]) == (segment, position)
            assert batch.mask[row, column] == (token != EOS)
            assert batch.targets[row, column] == (0 if token == EOS else stream.targets[row, column])
            segment, position = (segment + 1, 0) if token == EOS else (segment, position + 1)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("length", [1, 3, 8, 11])
def test_padded_rows_hold_one_document_and_cover_each_target_once(lengths: list[int], length: int) -> None:
    documents, tokens, offsets = corpus(lengths)
    expected = []
    for document in documents:
        closed = [*document, EOS]
        for start in range(0, len(closed) - 1, length):
            inputs, targets = closed[:-1][start : start + length], closed[1:][start : start + length]
            padding = length - len(inputs)
            expected.append((inputs + [EOS] * padding, targets + [0] * padding, [1] * len(inputs) + [0] * padding))
    rows = Rows(tokens, offsets, "pad", length, EOS)
    assert rows.num_rows == len(expected)
    batch = rows.gather(np.arange(rows.num_rows))
    assert batch.tokens.tolist() == [row[0] for row in expected]
    assert batch.targets.tolist() == [row[1] for row in expected]
    assert batch.mask.tolist() == [row[2] for row in expected]
    assert batch.segments is None and batch.positions is None


@pytest.mark.parametrize("packing", ["stream", "segments", "pad"])
def test_rows_come_in_the_order_asked_for(packing: Packing) -> None:
    _, tokens, offsets = corpus(LENGTHS["mixed"])
    rows = Rows(tokens, offsets, packing, 8, EOS)
    every = rows.gather(np.arange(rows.num_rows))
    chosen = np.array([3, 0, rows.num_rows - 1, 3])
    batch = rows.gather(chosen)
    for name in ("tokens", "targets", "mask", "segments", "positions"):
        array, expected = getattr(batch, name), getattr(every, name)
        assert array is None if expected is None else np.array_equal(array, expected[chosen])


@pytest.mark.parametrize("packing", ["stream", "segments", "pad"])
@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_batches_have_the_dtypes_that_backends_expect(packing: Packing, dtype: type) -> None:
    _, tokens, offsets = corpus(LENGTHS["mixed"], dtype)
    batch = Rows(tokens, offsets, packing, 8, EOS).gather(np.arange(2))
    arrays = [batch.tokens, batch.targets, batch.segments, batch.positions]
    assert all(array.dtype == np.int32 and array.shape == (2, 8) for array in arrays if array is not None)
    assert batch.mask.dtype == np.bool_ and batch.mask.shape == (2, 8)
    assert all(type(array) is np.ndarray and array.flags.writeable for array in arrays if array is not None)


@pytest.mark.parametrize("packing", ["stream", "segments", "pad"])
def test_a_batch_is_a_copy(packing: Packing) -> None:
    _, tokens, offsets = corpus(LENGTHS["mixed"])
    before = tokens.copy()
    batch = Rows(tokens, offsets, packing, 8, EOS).gather(np.arange(2))
    batch.tokens[:] = 0
    batch.targets[:] = 0
    assert np.array_equal(tokens, before)


@pytest.mark.parametrize("packing", ["stream", "segments", "pad"])
def test_num_targets_counts_what_the_rows_ask_for_when_no_tail_is_left_out(packing: Packing) -> None:
    _, tokens, offsets = corpus([5, 1, 30, 8])  # 48 tokens with their ends
    rows = Rows(tokens, offsets, packing, 47 if packing != "pad" else 8, EOS)
    assert rows.num_targets == rows.gather(np.arange(rows.num_rows)).mask.sum()


@pytest.mark.parametrize("packing", ["stream", "segments", "pad"])
def test_no_tokens_give_no_rows(packing: Packing) -> None:
    rows = Rows(np.zeros(0, np.uint16), np.zeros(1, np.int64), packing, 8, EOS)
    assert rows.num_rows == 0 and rows.num_targets == 0


def test_a_row_beyond_the_last_is_refused() -> None:
    _, tokens, offsets = corpus(LENGTHS["mixed"])
    rows = Rows(tokens, offsets, "stream", 8, EOS)
    with pytest.raises(IndexError):
        rows.gather(np.array([rows.num_rows]))
