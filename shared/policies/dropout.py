"""Dropout (Srivastava et al. 2014) by a counter-based mask: the same elements in both backends, however work is cut up.

A random stream depends on who draws first. Here nothing is drawn: whether an element stays is a hash of where it is -
the run's seed, the number of completed updates, the row's number in the global batch, the tensor's name and layer, and
the element's number within its row. So the mask does not change with the microbatch, the number of devices or the
framework, and a block that is recomputed meets it again.

    keep  <=>  (mix(element * GOLDEN + a) ^ b) >= rate * 2^32          in 32-bit unsigned integers
    a = mix(k + row * GOLDEN),  b = mix(a ^ key1),  k = mix(key0 + update * GOLDEN)

with ``mix`` the finaliser *lowbias32* (C. Wellons, "Prospecting for Hash Functions", 2018), a bijection in which every
input bit reaches every output bit, and (key0, key1) from a SHA-256 of seed, name and layer. GOLDEN is 2^32 over the
golden ratio: its multiples are spread evenly (a Weyl sequence, as in SplitMix; Steele et al. 2014). Of consecutive
numbers the finaliser alone makes bits that correlate by up to 0.02 at some distances. What stays is divided by
1 - rate, in the islands' dtype. An update that is skipped does not advance the count, nor the mask.
"""

from __future__ import annotations

import hashlib

import numpy as np

GOLDEN = 0x9E3779B9
MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
SHIFTS = (16, 15, 16)

EMBEDDING = "embedding"
IN_BLOCKS = ("out", "down")
"""What is dropped: the embedding's output, and what attention and feed-forward add to the residual stream."""


def dropout_key(seed: int, name: str, layer: int | None = None) -> tuple[int, int]:
    """(key0, key1) of a tensor, 32 bits each."""
    digest = hashlib.sha256(f"dropout {seed}:{name}:{'' if layer is None else layer}".encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


def threshold(rate: float) -> int:
    """Hashes below it are dropped."""
    return round(rate * 2**32)


def keep_mask(key: tuple[int, int], update: int, rows: np.ndarray, size: int, rate: float) -> np.ndarray:
    """bool [B, size]: which elements of each row stay. rows: integers [B], numbers in the global batch.

    The definition, in NumPy; the backends compute the same.
    """
    with np.errstate(over="ignore"):
        k = _mix(np.asarray(np.uint32(key[0]) + np.uint32(update) * np.uint32(GOLDEN)))
        a_B = _mix(k + np.asarray(rows, np.uint32) * np.uint32(GOLDEN))
        b_B = _mix(a_B ^ np.uint32(key[1]))
        elements_E = np.arange(size, dtype=np.uint32) * np.uint32(GOLDEN)
        bits_BE = _mix(elements_E[None] + a_B[:, None]) ^ b_B[:, None]
    kept: np.ndarray = bits_BE >= np.uint32(threshold(rate))
    return kept


def _mix(x: np.ndarray) -> np.ndarray:
    first, second, third = (np.uint32(shift) for shift in SHIFTS)
    x = (x ^ (x >> first)) * np.uint32(MULTIPLIERS[0])
    x = (x ^ (x >> second)) * np.uint32(MULTIPLIERS[1])
    mixed: np.ndarray = x ^ (x >> third)
    return mixed
