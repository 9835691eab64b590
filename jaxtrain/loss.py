"""Cross entropy in JAX, from all logits at once or from chunks of the vocabulary."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp


def cross_entropy_sum(logits_BTV: jax.Array, targets_BT: jax.Array, mask_BT: jax.Array, dtype: Any) -> jax.Array:
    """Sum over valid positions of -log softmax(logits)[target], in nats; the logits are raised to ``dtype`` first."""
    logits_BTV = logits_BTV.astype(dtype)
    target_BT = jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)[..., 0]
    loss_BT = jax.nn.logsumexp(logits_BTV, axis=-1) - target_BT
    return jnp.sum(jnp.where(mask_BT, loss_BT, 0))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def chunked_cross_entropy_sum(
    hidden_BTC: jax.Array,
    head_VC: jax.Array,
    targets_BT: jax.Array,
    mask_BT: jax.Array,
    chunk: int,
    logits: Any,
    islands: Any,
) -> jax.Array:
    """:func:`cross_entropy_sum` of the logits ``hidden head^T``, of which each position has no more than ``chunk`` at a
    time.

    The forward pass keeps a running log-sum-exp (Milakov & Gimelshein 2018, arXiv:1805.02867); the backward pass makes
    each chunk's logits again. ``logits`` and ``islands`` are the dtypes of those roles.
    """
    return _forward(hidden_BTC, head_VC, targets_BT, mask_BT, chunk, logits, islands)[0]


def _chunk(
    hidden_BTC: jax.Array, head_VC: jax.Array, turn: jax.Array, chunk: int, logits: Any, islands: Any
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(logits, columns, rows of the head, first row) of one chunk. The last one overlaps the one before; what that one
    had is minus infinity."""
    start = jnp.minimum(turn * chunk, head_VC.shape[0] - chunk)
    rows_KC = jax.lax.dynamic_slice_in_dim(head_VC, start, chunk).astype(hidden_BTC.dtype)
    logits_BTK = jnp.einsum("btc,kc->btk", hidden_BTC, rows_KC, preferred_element_type=logits).astype(islands)
    columns_K = start + jnp.arange(chunk)
    return jnp.where(columns_K >= turn * chunk, logits_BTK, -jnp.inf), columns_K, rows_KC, start


def _forward(
    hidden_BTC: jax.Array,
    head_VC: jax.Array,
    targets_BT: jax.Array,
    mask_BT: jax.Array,
    chunk: int,
    logits: Any,
    islands: Any,
) -> tuple[jax.Array, Any]:
    chunk = min(chunk, head_VC.shape[0])

    def turn(carry: Any, index: jax.Array) -> tuple[Any, None]:
        largest_BT, total_BT, target_BT = carry
        logits_BTK, columns_K, _, _ = _chunk(hidden_BTC, head_VC, index, chunk, logits, islands)
        larger_BT = jnp.maximum(largest_BT, jnp.max(logits_BTK, axis=-1))
        total_BT = total_BT * jnp.exp(largest_BT - larger_BT) + jnp.sum(
            jnp.exp(logits_BTK - larger_BT[..., None]), axis=-1
        )
        is_target_BTK = (columns_K == targets_BT[..., None]) & (columns_K >= index * chunk)
        target_BT = target_BT + jnp.sum(jnp.where(is_target_BTK, logits_BTK, 0), axis=-1)
        return (larger_BT, total_BT, target_BT), None

    zeros_BT = jnp.zeros(targets_BT.shape, islands)
    num_chunks = -(-head_VC.shape[0] // chunk)
    start = jnp.full(targets_BT.shape, -jnp.inf, islands), zeros_BT, zeros_BT
    (largest_BT, total_BT, target_BT), _ = jax.lax.scan(turn, start, jnp.arange(num_chunks))
    logsumexp_BT = largest_BT + jnp.log(total_BT)
    loss = jnp.sum(jnp.where(mask_BT, logsumexp_BT - target_BT, 0))
    return loss, (hidden_BTC, head_VC, targets_BT, mask_BT, logsumexp_BT)


def _backward(chunk: int, logits: Any, islands: Any, residuals: Any, gradient: jax.Array) -> tuple[Any, ...]:
    hidden_BTC, head_VC, targets_BT, mask_BT, logsumexp_BT = residuals
    chunk = min(chunk, head_VC.shape[0])
    weight_BT1 = jnp.where(mask_BT, gradient, 0)[..., None]

    def turn(carry: Any, index: jax.Array) -> tuple[Any, None]:
        hidden_gradient_BTC, head_gradient_VC = carry
        logits_BTK, columns_K, rows_KC, start = _chunk(hidden_BTC, head_VC, index, chunk, logits, islands)
        is_target_BTK = (columns_K == targets_BT[..., None]) & (columns_K >= index * chunk)
        gradient_BTK = (jnp.exp(logits_BTK - logsumexp_BT[..., None]) - is_target_BTK) * weight_BT1
        gradient_BTK = gradient_BTK.astype(hidden_BTC.dtype)
        hidden_gradient_BTC += jnp.einsum("btk,kc->btc", gradient_BTK, rows_KC, preferred_element_type=islands)
        rows_gradient_KC = jnp.einsum("btk,btc->kc", gradient_BTK, hidden_BTC, preferred_element_type=islands)
        before_KC = jax.lax.dynamic_slice_in_dim(head_gradient_VC, start, chunk)
        return (
            hidden_gradient_BTC,
            jax.lax.dynamic_update_slice_in_dim(head_gradient_VC, before_KC + rows_gradient_KC, start, axis=0),
        ), None

    zeros = jnp.zeros(hidden_BTC.shape, islands), jnp.zeros(head_VC.shape, islands)
    (hidden_gradient_BTC, head_gradient_VC), _ = jax.lax.scan(turn, zeros, jnp.arange(-(-head_VC.shape[0] // chunk)))
    return hidden_gradient_BTC.astype(hidden_BTC.dtype), head_gradient_VC.astype(head_VC.dtype), None, None


chunked_cross_entropy_sum.defvjp(_forward, _backward)
