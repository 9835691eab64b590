"""Causal attention in JAX behind one interface: a plain reference, and splash attention on a TPU.

Shapes: B rows, T positions, S positions that they see, H query heads, K key and value heads (H a multiple of K), D
elements a head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from shared.errors import UserError

Attention = Callable[[jax.Array, jax.Array, jax.Array, jax.Array | None], jax.Array]
"""(q_BTHD, k_BTKD, v_BTKD, segments_BT or None) -> context_BTHD."""

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""The same, with what a position sees already settled."""

SPLASH_BLOCK = 128
"""Splash attention works on blocks of at least this many positions."""


def choose_attention(
    wanted: Literal["auto", "reference", "fused"],
    platform: str,
    sequence_length: int,
    compute: Any,
    islands: Any,
    matmul: str = "exact",
) -> Attention:
    """The implementation to use on that platform.

    Raises UserError when ``fused`` is asked for and cannot run.
    """
    obstacle = _splash_obstacle(platform, sequence_length, compute, matmul)
    if wanted == "fused" and obstacle:
        raise UserError(f"execution.attention=fused cannot run in jaxtrain here: {obstacle}; use auto or reference")
    if wanted == "reference" or obstacle:
        return functools.partial(reference_attention, islands=islands)
    return splash_attention


def _splash_obstacle(platform: str, sequence_length: int, compute: Any, matmul: str) -> str | None:
    if platform != "tpu":
        return f"splash attention needs a TPU, and this is a {platform}"
    if sequence_length % SPLASH_BLOCK:
        return f"splash attention needs a sequence_length in multiples of {SPLASH_BLOCK}, not {sequence_length}"
    if compute not in (jnp.dtype("bfloat16"), jnp.dtype("float32")):
        return f"splash attention computes in bfloat16 or float32, not {compute}"
    if matmul != "exact":
        # Mosaic, which compiles the kernel, knows precisions and no algorithms (jax 0.10.2).
        return f"splash attention cannot be told precision.matmul={matmul}"
    return None


def reference_attention(
    q_BTHD: jax.Array, k_BTKD: jax.Array, v_BTKD: jax.Array, segments_BT: jax.Array | None, *, islands: Any
) -> jax.Array:
    """Causal attention, inside segments where there are any."""
    T = q_BTHD.shape[1]
    visible_BTT = jnp.tril(jnp.ones((T, T), bool))[None]
    if segments_BT is not None:
        visible_BTT = visible_BTT & (segments_BT[:, :, None] == segments_BT[:, None, :])
    return attention_where(visible_BTT, q_BTHD, k_BTKD, v_BTKD, islands)


def attention_where(
    visible_BTS: jax.Array, q_BTHD: jax.Array, k_BSKD: jax.Array, v_BSKD: jax.Array, islands: Any
) -> jax.Array:
    """softmax(q k^T / sqrt(D)) v with scores and softmax in the islands' dtype (Vaswani et al. 2017, eq. 1), where a
    position (row) sees another (column).

    Heads come before positions and the softmax's division after the product with v: a pass over the [T, S] scores
    less, which takes an eighth off a CPU's step.
    """
    B, T, H, D = q_BTHD.shape
    K = k_BSKD.shape[2]
    q_BKGTD = jnp.swapaxes(q_BTHD, 1, 2).reshape(B, K, H // K, T, D)
    k_BKSD, v_BKSD = (jnp.swapaxes(x, 1, 2) for x in (k_BSKD, v_BSKD))
    scores_BKGTS = mixed_product("bkgtd,bksd->bkgts", q_BKGTD, k_BKSD, islands) * D**-0.5
    scores_BKGTS = jnp.where(visible_BTS[:, None, None], scores_BKGTS, jnp.finfo(islands).min)
    largest_BKGT1 = jax.lax.stop_gradient(jnp.max(scores_BKGTS, axis=-1, keepdims=True))
    weights_BKGTS = jnp.exp(scores_BKGTS - largest_BKGT1)
    context_BKGTD = mixed_product("bkgts,bksd->bkgtd", weights_BKGTS.astype(v_BKSD.dtype), v_BKSD, islands)
    context_BKGTD = _normalized(context_BKGTD, jnp.sum(weights_BKGTS, axis=-1, keepdims=True), q_BTHD.dtype)
    return jnp.swapaxes(context_BKGTD.reshape(B, H, T, D), 1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def mixed_product(formula: str, a: jax.Array, b: jax.Array, dtype: Any) -> jax.Array:
    """An einsum of compute-dtype operands whose sums come out unrounded, in ``dtype``.

    Its gradient rounds what comes back to the operands' dtype first. JAX's own would multiply in ``dtype``: twice the
    memory traffic, and on a GPU another kind of product than the one asked for.
    """
    return jnp.einsum(formula, a, b, preferred_element_type=dtype)


def _mixed_forward(formula: str, a: jax.Array, b: jax.Array, dtype: Any) -> tuple[jax.Array, Any]:
    return mixed_product(formula, a, b, dtype), (a, b)


def _mixed_backward(formula: str, dtype: Any, operands: Any, gradient: jax.Array) -> Any:
    a, b = operands
    _, pull_back = jax.vjp(functools.partial(jnp.einsum, formula), a, b)
    return pull_back(gradient.astype(a.dtype))


mixed_product.defvjp(_mixed_forward, _mixed_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _normalized(sums: jax.Array, total: jax.Array, dtype: Any) -> jax.Array:
    """sums / total in ``dtype``, named ``context``.

    Its gradient reads the quotient and not ``sums``, as flash attention's does, so that a remat policy that keeps
    ``context`` need not run the product again.
    """
    return (sums / total).astype(dtype)


def _normalized_forward(sums: jax.Array, total: jax.Array, dtype: Any) -> tuple[jax.Array, Any]:
    context = checkpoint_name(_normalized(sums, total, dtype), "context")
    return context, (context, total)


def _normalized_backward(dtype: Any, residuals: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    context, total = residuals
    share = gradient.astype(total.dtype) / total
    return share, -jnp.sum(share * context.astype(total.dtype), axis=-1, keepdims=True)


_normalized.defvjp(_normalized_forward, _normalized_backward)


def splash_attention(
    q_BTHD: jax.Array,
    k_BTKD: jax.Array,
    v_BTKD: jax.Array,
    segments_BT: jax.Array | None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """The Pallas kernel for TPUs that never holds the scores; ``interpret`` runs it anywhere, slowly, for tests."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as mask

    _, T, H, D = q_BTHD.shape
    K = k_BTKD.shape[2]
    causal = mask.MultiHeadMask([mask.CausalMask((T, T)) for _ in range(H // K)])
    attend = kernel.make_splash_mqa_single_device(causal, interpret=interpret, residual_checkpoint_name="context")
    q_BKGTD = jnp.transpose((q_BTHD * D**-0.5).reshape(-1, T, K, H // K, D), (0, 2, 3, 1, 4))
    k_BKTD, v_BKTD = (jnp.swapaxes(x, 1, 2) for x in (k_BTKD, v_BTKD))
    over_heads = jax.vmap(attend, in_axes=(0, 0, 0, None))
    if segments_BT is None:
        context_BKGTD = jax.vmap(over_heads, in_axes=(0, 0, 0, None))(q_BKGTD, k_BKTD, v_BKTD, None)
    else:
        segment_ids = kernel.SegmentIds(q=segments_BT, kv=segments_BT)
        context_BKGTD = jax.vmap(over_heads)(q_BKGTD, k_BKTD, v_BKTD, segment_ids)
    return jnp.transpose(context_BKGTD, (0, 3, 1, 2, 4)).reshape(q_BTHD.shape).astype(q_BTHD.dtype)
