"""Dropout in JAX, by the rule of :mod:`shared.policies.dropout`."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shared.policies.dropout import GOLDEN, MULTIPLIERS, SHIFTS, dropout_key, threshold

Keys = dict[str, np.ndarray]
"""uint32 [2], or [layers, 2] before a layer's is taken, by the name of the tensor."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=["update", "rows_B"], meta_fields=["rate", "islands"])
@dataclass(frozen=True)
class Dropout:
    """Dropout for the rows of one microbatch in one update."""

    update: jax.Array
    """Completed updates."""
    rows_B: jax.Array
    """int32: numbers of the rows in the global batch."""
    rate: float
    islands: Any

    def __call__(self, x_BTC: jax.Array, key: Any) -> jax.Array:
        """``x`` with elements of each row set to zero, and the others divided by 1 - rate."""
        kept_BTC = keep_mask(key, self.update, self.rows_B, x_BTC[0].size, self.rate).reshape(x_BTC.shape)
        scaled_BTC = (x_BTC.astype(self.islands) * (1.0 / (1.0 - self.rate))).astype(x_BTC.dtype)
        return jnp.where(kept_BTC, scaled_BTC, jnp.zeros((), x_BTC.dtype))


def keep_mask(key: Any, update: jax.Array, rows_B: jax.Array, size: int, rate: float) -> jax.Array:
    """bool [B, size]; see :func:`shared.policies.dropout.keep_mask`."""
    golden = jnp.uint32(GOLDEN)
    key = jnp.asarray(key, jnp.uint32)
    k = _mix(key[0] + update.astype(jnp.uint32) * golden)
    a_B = _mix(k + rows_B.astype(jnp.uint32) * golden)
    b_B = _mix(a_B ^ key[1])
    elements_E = jnp.arange(size, dtype=jnp.uint32) * golden
    bits_BE = _mix(elements_E[None] + a_B[:, None]) ^ b_B[:, None]
    return bits_BE >= jnp.uint32(threshold(rate))


def layer_keys(seed: int, names: tuple[str, ...], num_layers: int) -> Keys:
    """Keys of the tensors of all blocks, [layers, 2] each."""
    return {
        name: np.array([dropout_key(seed, name, layer) for layer in range(num_layers)], np.uint32) for name in names
    }


def _mix(x: jax.Array) -> jax.Array:
    first, second, third = (jnp.uint32(shift) for shift in SHIFTS)
    x = (x ^ (x >> first)) * jnp.uint32(MULTIPLIERS[0])
    x = (x ^ (x >> second)) * jnp.uint32(MULTIPLIERS[1])
    return x ^ (x >> third)
