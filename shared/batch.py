"""One global batch (or a process's share of it) as it leaves the data pipeline."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from shared.config.schema import Config


@dataclass(frozen=True)
class Batch:
    """Rows of tokens in host memory. B rows of T tokens each."""

    tokens: np.ndarray
    """int32 [B, T]: what the model reads."""
    targets: np.ndarray
    """int32 [B, T]: the token that follows each position; 0 where ``mask`` is false."""
    mask: np.ndarray
    """bool [B, T]: positions whose target counts in the loss."""
    segments: np.ndarray | None = None
    """int32 [B, T]: number of the document within the row, from 0; attention stays inside a segment. None: one
    segment a row."""
    positions: np.ndarray | None = None
    """int32 [B, T]: position inside the document. None: 0 to T - 1."""

    @property
    def num_rows(self) -> int:
        return len(self.tokens)

    def share(self, replica: int, replicas: int) -> Batch:
        """The rows of one replica: as many for each, in order."""
        rows = slice(replica * self.num_rows // replicas, (replica + 1) * self.num_rows // replicas)
        segments = None if self.segments is None else self.segments[rows]
        positions = None if self.positions is None else self.positions[rows]
        return Batch(self.tokens[rows], self.targets[rows], self.mask[rows], segments, positions)

    @classmethod
    def blank(cls, config: Config) -> Batch:
        """A global batch of the recipe's shape, of zeros that all count: to try a step without data."""
        zeros = np.zeros((config.batch.global_batch, config.batch.sequence_length), np.int32)
        packed = zeros if config.data.packing == "segments" else None
        return cls(zeros, zeros, np.ones(zeros.shape, np.bool_), packed, packed)

    def fingerprint(self) -> str:
        """16 hex digits of all that the batch holds; equal for equal batches on any machine."""
        digest = hashlib.blake2b(digest_size=8)
        for array, dtype in (
            (self.tokens, "<i4"),
            (self.targets, "<i4"),
            (self.mask, "?"),
            (self.segments, "<i4"),
            (self.positions, "<i4"),
        ):
            digest.update(b"none" if array is None else np.ascontiguousarray(array, dtype).tobytes())
        return digest.hexdigest()
