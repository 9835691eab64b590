"""The order in which rows are read: a permutation that is computed, never stored.

Position i of an epoch reads row ``permute(i, n, seed, epoch)``. The function has no state, so resuming at any step
costs nothing and every process of every framework sees the same order. It is a Feistel network: an index is cut into
two halves of bits, and in each round one half is changed by a hash of the other. Every round can be undone, whatever
the hash is, so the network is a bijection of the 2^bits indices. Those that land at or above n are sent through again
until they land below it ("cycle walking", Black & Rogaway 2002), which leaves a bijection of range(n); as 2^bits is
below 2n, one pass is enough for more than half of the indices.
"""

from __future__ import annotations

import hashlib

import numpy as np

ROUNDS = 8
BLOCK = 4096


def permute(positions: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """Rows read at ``positions``.

    positions: integers in range(size), any shape. Returns int64 of the same shape. For fixed (size, seed, epoch) it is
    a bijection of range(size).
    """
    assert 0 < size <= 2**62
    rows = np.array(positions, np.uint64).ravel()
    assert not rows.size or int(rows.max()) < size
    bits = (size - 1).bit_length()
    if bits:
        keys = _round_keys(seed, epoch)
        rows = _feistel(rows, bits, keys)
        while (outside := np.flatnonzero(rows >= np.uint64(size))).size:
            rows[outside] = _feistel(rows[outside], bits, keys)
    return rows.astype(np.int64).reshape(np.shape(positions))


def _feistel(index: np.ndarray, bits: int, keys: np.ndarray) -> np.ndarray:
    num_low = np.uint64((bits + 1) // 2)
    low_mask = (np.uint64(1) << num_low) - np.uint64(1)
    high_mask = (np.uint64(1) << (np.uint64(bits) - num_low)) - np.uint64(1)
    high, low = index >> num_low, index & low_mask
    for even, odd in keys.reshape(-1, 2):
        low = low ^ (_mix(high + even) & low_mask)
        high = high ^ (_mix(low + odd) & high_mask)
    return high << num_low | low


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser (Steele, Lea & Flood 2014): every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed


def _round_keys(seed: int, epoch: int) -> np.ndarray:
    digest = hashlib.blake2b(f"row order: seed {seed}, epoch {epoch}".encode(), digest_size=8 * ROUNDS).digest()
    return np.frombuffer(digest, "<u8").astype(np.uint64)


class Order:
    """``permute`` for consecutive positions.

    A batch asks for a few positions, for which NumPy's cost per call would outweigh the work; so a block of them is
    computed at once and kept.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self.seed = seed
        self._kept: tuple[tuple[int, int], np.ndarray] | None = None

    def rows(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """int64 [stop - start]: rows at positions start to stop - 1 of the epoch."""
        assert 0 <= start <= stop <= self.size
        first, last = start // BLOCK, max(start, stop - 1) // BLOCK
        blocks = [self._block(epoch, number) for number in range(first, last + 1)]
        rows = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
        return rows[start - first * BLOCK : stop - first * BLOCK]

    def _block(self, epoch: int, number: int) -> np.ndarray:
        kept = self._kept  # read and replaced as one tuple: threads may share an Order
        if kept is not None and kept[0] == (epoch, number):
            return kept[1]
        positions = np.arange(number * BLOCK, min((number + 1) * BLOCK, self.size), dtype=np.uint64)
        rows = permute(positions, self.size, self.seed, epoch)
        self._kept = (epoch, number), rows
        return rows
