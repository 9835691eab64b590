"""Every attention implementation computes the textbook formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shared.errors import UserError

B, T, H, K, D = 2, 128, 4, 2, 64


def inputs(dtype: str = "float32") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((B, T, heads, D)).astype(dtype) for heads in (H, K, K))
    return q, k, v


def segment_ids() -> np.ndarray:
    ids = np.zeros((B, T), np.int32)
    ids[0, 50:], ids[0, 90:], ids[1, 1:] = 1, 2, 1
    return ids


def by_hand(q: np.ndarray, k: np.ndarray, v: np.ndarray, segments: np.ndarray | None) -> np.ndarray:
    """One query at a time, in float64."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    out = np.zeros_like(q)
    for b in range(B):
        for h in range(H):
            for t in range(T):
                seen = np.arange(T) <= t
                if segments is not None:
                    seen &= segments[b] == segments[b, t]
                scores = k[b, seen, h // (H // K)] @ q[b, t, h] / np.sqrt(D)
                weights = np.exp(scores - scores.max())
                out[b, t, h] = weights / weights.sum() @ v[b, seen, h // (H // K)]
    return out


def jax_reference(q: Any, k: Any, v: Any, segments: Any) -> np.ndarray:
    import jax.numpy as jnp

    from jaxtrain.attention import reference_attention

    return np.asarray(reference_attention(q, k, v, segments, islands=jnp.float32))


def jax_splash(q: Any, k: Any, v: Any, segments: Any) -> np.ndarray:
    from jaxtrain.attention import splash_attention

    return np.asarray(splash_attention(q, k, v, segments, interpret=True))


def torch_reference(q: Any, k: Any, v: Any, segments: Any) -> np.ndarray:
    import torch

    from torchtrain.attention import reference_attention, visibility

    visible = visibility(None if segments is None else torch.from_numpy(segments))
    return reference_attention(*map(torch.from_numpy, (q, k, v)), visible, islands=torch.float32).numpy()


def torch_fused(q: Any, k: Any, v: Any, segments: Any) -> np.ndarray:
    import torch

    from torchtrain.attention import fused_attention, visibility

    visible = visibility(None if segments is None else torch.from_numpy(segments))
    return fused_attention(*map(torch.from_numpy, (q, k, v)), visible).numpy()


@pytest.mark.parametrize("segments", [None, segment_ids()], ids=["one-document", "segments"])
@pytest.mark.parametrize("implementation", [jax_reference, jax_splash, torch_reference, torch_fused])
def test_attention_is_the_textbook_formula(
    implementation: Callable[..., np.ndarray], segments: np.ndarray | None
) -> None:
    q, k, v = inputs()
    # float32 scores and sums over at most 128 positions.
    np.testing.assert_allclose(implementation(q, k, v, segments), by_hand(q, k, v, segments), atol=3e-6, rtol=0)


@pytest.mark.parametrize("segments", [None, segment_ids()], ids=["one-document", "segments"])
def test_splash_attention_has_the_gradient_of_the_reference(segments: np.ndarray | None) -> None:
    import jax
    import jax.numpy as jnp

    from jaxtrain.attention import reference_attention, splash_attention

    def total(attend: Callable[..., Any]) -> Callable[..., Any]:
        return lambda q, k, v: jnp.sum(jnp.sin(attend(q, k, v, segments)))

    reference = total(lambda *x: reference_attention(*x, islands=jnp.float32))
    splash = total(lambda *x: splash_attention(*x, interpret=True))
    for expected, found in zip(
        jax.grad(reference, (0, 1, 2))(*inputs()), jax.grad(splash, (0, 1, 2))(*inputs()), strict=True
    ):
        # Sums over up to 128 positions in float32, in another order.
        np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("platform", "length", "compute", "reason"),
    [
        ("cpu", 128, "bfloat16", "needs a TPU"),
        ("tpu", 100, "bfloat16", "multiples of 128"),
        ("tpu", 128, "float64", "not float64"),
    ],
)
def test_fused_attention_that_cannot_run_is_refused_and_auto_falls_back(
    platform: str, length: int, compute: str, reason: str
) -> None:
    import jax.numpy as jnp

    from jaxtrain.attention import choose_attention, splash_attention

    with pytest.raises(UserError, match=reason):
        choose_attention("fused", platform, length, jnp.dtype(compute), jnp.float32)
    assert choose_attention("auto", platform, length, jnp.dtype(compute), jnp.float32) is not splash_attention


def test_a_tpu_gets_splash_attention() -> None:
    import jax.numpy as jnp

    from jaxtrain.attention import choose_attention, splash_attention

    assert choose_attention("auto", "tpu", 256, jnp.dtype("bfloat16"), jnp.float32) is splash_attention


def test_splash_attention_is_left_where_its_products_cannot_be_told_their_exactness() -> None:
    """Its compiler stops at the name of an algorithm."""
    import jax.numpy as jnp

    from jaxtrain.attention import choose_attention, splash_attention

    arguments = "tpu", 256, jnp.dtype("float32"), jnp.float32
    assert choose_attention("auto", *arguments) is splash_attention
    assert choose_attention("auto", *arguments, "bfloat16") is not splash_attention
    with pytest.raises(UserError, match=r"precision\.matmul=bfloat16; use auto or reference"):
        choose_attention("fused", *arguments, "bfloat16")
