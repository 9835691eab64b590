"""Dynamic loss scaling in JAX, by the rule of :class:`shared.config.precision.LossScale`."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from shared.config.schema import LossScale


class LossScaleState(NamedTuple):
    """The scale, and how many good updates in a row it has seen."""

    scale: jax.Array
    good_updates: jax.Array


def initial(rule: LossScale | None) -> LossScaleState | None:
    """The state before the first step; None without loss scaling."""
    return None if rule is None else LossScaleState(jnp.float32(rule.initial), jnp.int32(0))


def updated(state: LossScaleState | None, finite: jax.Array, rule: LossScale | None) -> LossScaleState | None:
    """The state after a step whose gradients were all finite, or not."""
    if state is None or rule is None:
        return None
    good = jnp.where(finite, state.good_updates + 1, 0)
    grow = good >= rule.growth_interval
    scale = jnp.where(finite, jnp.where(grow, state.scale * rule.growth, state.scale), state.scale * rule.backoff)
    return LossScaleState(scale, jnp.where(grow, 0, good))
