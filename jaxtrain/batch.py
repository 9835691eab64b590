"""A batch on JAX's devices."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np

from shared.batch import Batch


class DeviceBatch(NamedTuple):
    """The arrays of :class:`shared.batch.Batch`; a pytree."""

    tokens: jax.Array
    targets: jax.Array
    mask: jax.Array
    segments: jax.Array | None
    positions: jax.Array | None
    rows: jax.Array | None
    """int32 [B]: numbers of the rows in the global batch, where dropout needs them."""


def to_device(batch: Batch, sharding: jax.sharding.Sharding, numbered: bool) -> DeviceBatch:
    """Start the transfer; returns at once. ``numbered``: with the numbers of the rows."""
    return DeviceBatch(*jax.device_put(_host(batch, numbered), sharding))


def abstract(batch: Batch, sharding: jax.sharding.Sharding, numbered: bool) -> DeviceBatch:
    """Shapes, dtypes and shardings of what :func:`to_device` would give."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), _host(batch, numbered))
    return DeviceBatch(*shapes)


def _host(batch: Batch, numbered: bool) -> tuple[np.ndarray | None, ...]:
    rows = np.arange(batch.num_rows, dtype=np.int32) if numbered else None
    return batch.tokens, batch.targets, batch.mask, batch.segments, batch.positions, rows
