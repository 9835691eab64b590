"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), in the two-halves form of Hugging Face's Llama.

Element i of a head's first half turns with element i of its second half, by position * theta^(-2i / head_dim). The
table is computed once, in float64, and rounded once: angles computed in bfloat16 would be wrong by a whole radian at
position 2,047, and both backends read the very same numbers.
"""

from __future__ import annotations

import math

import numpy as np

from shared.config.schema import RopeScaling


def rope_table(
    length: int, head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(cosines, sines), float64 [length, head_dim / 2] each."""
    frequencies = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is not None:
        frequencies = _scaled(frequencies, scaling)
    angles = np.arange(length, dtype=np.float64)[:, None] * frequencies[None, :]
    return np.cos(angles), np.sin(angles)


def _scaled(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Llama 3.1's rule: by the turns that a frequency makes within the original length, it is slowed down by the
    factor, left alone, or something in between, linear in the turns (Grattafiori et al. 2024, arXiv:2407.21783, 3.4.2;
    the numbers are those of Meta's ``llama_models``)."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / scaling.factor)
