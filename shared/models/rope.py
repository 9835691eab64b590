"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), in the two-halves form of Hugging Face's Llama.

Element i of a head's first half turns with element i of its second half, by position * theta^(-2i / head_dim). The
table is computed once, in float64, and rounded once: angles computed in bfloat16 would be wrong by a whole radian at
position 2,047, and both backends read the very same numbers.
"""

from __future__ import annotations

import numpy as np


def rope_table(length: int, head_dim: int, theta: float) -> tuple[np.ndarray, np.ndarray]:
    """(cosines, sines), float64 [length, head_dim / 2] each."""
    frequencies = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    angles = np.arange(length, dtype=np.float64)[:, None] * frequencies[None, :]
    return np.cos(angles), np.sin(angles)
