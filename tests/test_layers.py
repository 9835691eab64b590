"""Single layers where the two frameworks' defaults part, against NumPy in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from shared.models.rope import rope_table
from tests.backends import BACKENDS
from tests.recipes import GPT2, LLAMA, recipe


def normalize(name: str, model: dict[str, Any], x: np.ndarray) -> np.ndarray:
    """The backend's norm, with its initial scale of one, on float32 input."""
    config = recipe(model=model)
    if name == "jax":
        from jaxtrain.backend import JaxBackend
        from jaxtrain.models.transformer import Norm

        backend = JaxBackend(config)
        return np.asarray(Norm(backend.spec, backend.execution, x.shape[-1])(x))
    import torch

    from torchtrain.backend import TorchBackend
    from torchtrain.models.transformer import Norm as TorchNorm

    other = TorchBackend(config)
    return TorchNorm(other.spec, other.execution, x.shape[-1])(torch.from_numpy(x)).detach().numpy()


@pytest.mark.parametrize("name", BACKENDS)
def test_layer_norm_survives_a_large_mean(name: str) -> None:
    """E[x^2] - E[x]^2 in float32 would be wrong by a third at a mean of 1,000; two passes are not."""
    x = (1000 + np.random.default_rng(0).standard_normal((1, 4, 24))).astype(np.float32)
    exact = x.astype(np.float64)
    centred = exact - exact.mean(-1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    # The mean itself is rounded to float32: 1000 * 2^-24.
    np.testing.assert_allclose(normalize(name, GPT2, x), expected, atol=5e-4, rtol=0)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=["rmsnorm", "layernorm"])
def test_a_norm_has_its_epsilon_inside_the_root(name: str, model: dict[str, Any]) -> None:
    epsilon = 1e-2
    x = 0.1 * np.random.default_rng(0).standard_normal((1, 4, 24)).astype(np.float32)
    centred = x - x.mean(-1, keepdims=True) if model is GPT2 else x
    expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon)
    key = "layer_norm_epsilon" if model is GPT2 else "rms_norm_eps"
    np.testing.assert_allclose(normalize(name, model | {key: epsilon}, x), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_loss_is_computed_from_logits_raised_to_float32(name: str, dtype: str) -> None:
    import ml_dtypes

    rng = np.random.default_rng(0)
    logits = (4 * rng.standard_normal((2, 5, 61))).astype(np.float32)
    logits = logits.astype(ml_dtypes.bfloat16).astype(np.float32)  # numbers that both dtypes hold
    targets, mask = rng.integers(0, 61, (2, 5)).astype(np.int32), rng.random((2, 5)) < 0.6
    exact = logits.astype(np.float64)
    each = np.log(np.exp(exact).sum(-1)) - np.take_along_axis(exact, targets[..., None], -1)[..., 0]
    if name == "jax":
        import jax.numpy as jnp

        from jaxtrain.loss import cross_entropy_sum

        found = float(cross_entropy_sum(jnp.asarray(logits, dtype), jnp.asarray(targets), mask, jnp.float32))
    else:
        import torch

        from torchtrain.loss import cross_entropy_sum as torch_sum

        tensor = torch.from_numpy(logits).to(getattr(torch, dtype))
        placed = torch.from_numpy(targets).long(), torch.from_numpy(mask)
        found = torch_sum(tensor, *placed, torch.float32).item()
    # A loss in bfloat16 would be off by 1e-2.
    assert found == pytest.approx(each[mask].sum(), rel=1e-6)


def test_rotary_angles_are_exact_at_far_positions() -> None:
    cosines, sines = rope_table(4096, 8, 10000.0)
    assert cosines.dtype == np.float64 and cosines.shape == (4096, 4)
    for i in range(4):
        angle = 4095 * 10000.0 ** (-2 * i / 8)
        assert cosines[4095, i] == pytest.approx(math.cos(angle), abs=1e-9)
        assert sines[4095, i] == pytest.approx(math.sin(angle), abs=1e-9)
