"""Named tensors in JAX: the values inside the model that remat keeps, offload moves and a trace records.

The names are those of :mod:`shared.policies.remat` for the tensors of a block, and the same in both backends. Inside a
jitted function what is recorded are tracers, to be returned by it; layers must be unrolled, not scanned.
"""

from __future__ import annotations

import jax
from jax.ad_checkpoint import checkpoint_name

from shared.recording import take_note


def named(name: str, value: jax.Array) -> jax.Array:
    """``value``, known by that name to remat and offload policies; recorded if somebody records."""
    return checkpoint_name(record(name, value), name)


def record(name: str, value: jax.Array) -> jax.Array:
    """``value``, after a recording has taken note of it."""
    take_note(name, value)
    return value
