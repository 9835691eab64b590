"""A batch on JAX's devices."""

from __future__ import annotations

from typing import NamedTuple

import jax

from shared.batch import Batch


class DeviceBatch(NamedTuple):
    """The arrays of :class:`shared.batch.Batch`; a pytree."""

    tokens: jax.Array
    targets: jax.Array
    mask: jax.Array
    segments: jax.Array | None
    positions: jax.Array | None


def to_device(batch: Batch, sharding: jax.sharding.Sharding) -> DeviceBatch:
    """Start the transfer; returns at once."""
    host = (batch.tokens, batch.targets, batch.mask, batch.segments, batch.positions)
    return DeviceBatch(*jax.device_put(host, sharding))
