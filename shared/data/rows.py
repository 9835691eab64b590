"""Rows: how a file of tokens is cut into sequences of T tokens, for each way of packing documents.

The file holds document after document, each closed by its end-of-document token. A row is read by its number alone,
so rows can come in any order. Next-token prediction needs T + 1 tokens for T targets: neighbouring rows share one.

    stream    |the cat sat.|EOS|a dog|      one row runs on over the end of a document
    segments  | 0 0 0 0 0 0  0 |1 1 1|      the same row, with the number of the document at each position
    pad       |the cat sat.|EOS|pad pad|    a row never holds more than one document
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from shared.batch import Batch

Packing = Literal["stream", "segments", "pad"]


class Rows:
    """Rows of one split.

    tokens: unsigned integers [N], all documents in order, each ending in ``end_of_text``, which occurs nowhere else.
    offsets: int64 [D + 1]: document d is tokens[offsets[d] : offsets[d + 1]].
    """

    def __init__(
        self, tokens: np.ndarray, offsets: np.ndarray, packing: Packing, sequence_length: int, end_of_text: int
    ) -> None:
        self.tokens = tokens
        self.offsets = offsets
        self.packing = packing
        self.sequence_length = sequence_length
        self.end_of_text = end_of_text
        if packing == "pad":
            num_targets = np.diff(offsets) - 1
            self._first_row = np.concatenate([[0], np.cumsum(-(-num_targets // sequence_length))])
            self.num_rows = int(self._first_row[-1])
        else:
            self.num_rows = max(0, len(tokens) - 1) // sequence_length
            # A view [num_rows, T + 1] in which row i starts at token i * T, so that gathering copies whole rows.
            self._windows = np.lib.stride_tricks.as_strided(
                tokens,
                (self.num_rows, sequence_length + 1),
                (sequence_length * tokens.itemsize, tokens.itemsize),
                writeable=False,
            )

    @property
    def num_targets(self) -> int:
        """Tokens that the split asks a model to predict, were no tail shorter than a row left out."""
        if not len(self.tokens):
            return 0
        return len(self.tokens) - (1 if self.packing == "stream" else len(self.offsets) - 1)

    def gather(self, rows: np.ndarray) -> Batch:
        """The rows with these numbers, in this order. rows: integers [B] in range(num_rows)."""
        if self.packing == "pad":
            return self._gather_padded(rows)
        window_BS = self._windows[rows]  # S = T + 1
        tokens_BT = window_BS[:, :-1].astype(np.int32)
        targets_BT = window_BS[:, 1:].astype(np.int32)
        if self.packing == "stream":
            return Batch(tokens_BT, targets_BT, np.ones(tokens_BT.shape, np.bool_))
        return self._segmented(tokens_BT, targets_BT)

    def _segmented(self, tokens_BT: np.ndarray, targets_BT: np.ndarray) -> Batch:
        last_BT = tokens_BT == self.end_of_text
        first_BT = np.zeros_like(last_BT)
        first_BT[:, 1:] = last_BT[:, :-1]
        segments_BT = np.cumsum(first_BT, axis=1, dtype=np.int32)
        column_T = np.arange(tokens_BT.shape[1], dtype=np.int32)
        start_BT = np.maximum.accumulate(first_BT * column_T, axis=1)
        mask_BT = ~last_BT  # after the end of a document comes a token that nothing in it foretells
        targets_BT *= mask_BT
        return Batch(tokens_BT, targets_BT, mask_BT, segments_BT, column_T - start_BT)

    def _gather_padded(self, rows: np.ndarray) -> Batch:
        document_B = np.searchsorted(self._first_row, rows, side="right") - 1
        start_B = self.offsets[document_B] + (rows - self._first_row[document_B]) * self.sequence_length
        end_B = self.offsets[document_B + 1] - 1  # where the document's end-of-document token stands
        index_BS = start_B[:, None] + np.arange(self.sequence_length + 1)
        np.minimum(index_BS, end_B[:, None], out=index_BS)  # so that token is the padding, too
        window_BS = self.tokens[index_BS]
        mask_BT = np.arange(self.sequence_length) < (end_B - start_B)[:, None]
        targets_BT = window_BS[:, 1:].astype(np.int32)
        targets_BT *= mask_BT
        return Batch(window_BS[:, :-1].astype(np.int32), targets_BT, mask_BT)
