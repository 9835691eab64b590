"""Cross entropy in JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def cross_entropy_sum(logits_BTV: jax.Array, targets_BT: jax.Array, mask_BT: jax.Array, dtype: Any) -> jax.Array:
    """Sum over valid positions of -log softmax(logits)[target], in nats; the logits are raised to ``dtype`` first."""
    logits_BTV = logits_BTV.astype(dtype)
    target_BT = jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)[..., 0]
    loss_BT = jax.nn.logsumexp(logits_BTV, axis=-1) - target_BT
    return jnp.sum(jnp.where(mask_BT, loss_BT, 0))
