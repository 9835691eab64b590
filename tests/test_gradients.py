"""Gradients: equal in both backends, to an independent autograd, and under every policy that must not change them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shared.config.schema import Config
from tests import backends
from tests.recipes import ADAMW, MODELS, random_batch, recipe
from tests.test_logits import oracle


def gradients(name: str, config: Config, **batch: Any) -> tuple[float, dict[str, np.ndarray]]:
    with backends.make(name, config) as backend:
        return backends.loss_and_gradients(backend, random_batch(config, **batch))


def largest_error(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """Largest difference in any parameter's gradient, relative to that gradient's own largest element."""
    assert found.keys() == expected.keys()
    return max(float(np.max(np.abs(found[k] - expected[k])) / np.max(np.abs(expected[k]))) for k in expected)


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_both_backends_have_the_same_gradients_in_float64(model: str, segments: bool) -> None:
    config = recipe(model=MODELS[model], precision="float64")
    jax_loss, jax_gradients = gradients("jax", config, ragged=True, segments=segments)
    torch_loss, torch_gradients = gradients("torch", config, ragged=True, segments=segments)
    assert jax_gradients["transformer.ln_f.weight" if model == "gpt2" else "model.norm.weight"].dtype == np.float64
    # float64 has 16 digits; sums over a few hundred terms lose about two of them.
    assert jax_loss == pytest.approx(torch_loss, rel=1e-14)
    assert largest_error(jax_gradients, torch_gradients) < 1e-12


@pytest.mark.parametrize("model", MODELS)
def test_both_backends_train_every_family_alike_in_float64(model: str) -> None:
    """Five updates of AdamW, with an average and clipping: the losses, and what a sixth would be evaluated at."""
    config = recipe(model=MODELS[model], precision="float64", optimizer=ADAMW | {"ema_decay": 0.9})
    batches = [random_batch(config, seed, ragged=True, segments=True) for seed in range(6)]
    found = []
    for name in backends.BACKENDS:
        with backends.make(name, config) as backend:
            state, metrics = backends.steps(backend, batches[:5])
            sums = backend.eval_step(state, batches[5]).read()
            found.append([*(step.loss for step in metrics), sums.loss / sums.tokens])
    assert found[0] == pytest.approx(found[1], rel=1e-12)
    assert found[0][4] != found[0][0]


@pytest.mark.parametrize("name", backends.BACKENDS)
@pytest.mark.parametrize("model", MODELS)
def test_gradients_equal_those_of_transformers(name: str, model: str) -> None:
    import torch

    config = recipe(model=MODELS[model], precision="float64")
    batch = random_batch(config, ragged=True)
    other = oracle(config).double()
    logits = other(torch.from_numpy(batch.tokens).long()).logits
    mask = torch.from_numpy(batch.mask)
    theirs = torch.nn.functional.cross_entropy(logits[mask], torch.from_numpy(batch.targets).long()[mask])
    theirs.backward()
    loss, found = gradients(name, config, ragged=True)
    # transformers computes its rotary angles in float32 whatever the model's dtype: about 1e-7.
    limit = 1e-12 if model == "gpt2" else 1e-6
    assert loss == pytest.approx(theirs.item(), rel=limit)
    assert largest_error(found, {k: p.grad.numpy() for k, p in other.named_parameters()}) < limit


@pytest.mark.parametrize("name", backends.BACKENDS)
@pytest.mark.parametrize("microbatch", [1, 2, 4])
def test_the_microbatch_does_not_change_the_gradient(name: str, microbatch: int) -> None:
    """With ragged masks a mean of microbatch means would be wrong by tens of per cent."""
    whole_loss, whole = gradients(name, recipe(precision="float64"), ragged=True)
    config = recipe(precision="float64", accumulation={"microbatch": microbatch})
    loss, parts = gradients(name, config, ragged=True)
    assert loss == pytest.approx(whole_loss, rel=1e-13)
    assert largest_error(parts, whole) < 1e-12


@pytest.mark.parametrize("name", backends.BACKENDS)
def test_microbatch_a_of_A_holds_rows_a_plus_multiples_of_A(name: str) -> None:
    config = recipe(batch={"global_batch": 6, "sequence_length": 4})
    batch = random_batch(config)
    with backends.make(name, config) as backend:
        placed = backend.place(batch)
    if name == "jax":
        from jaxtrain.accumulation import microbatches

        found = list(np.asarray(microbatches(placed, 3).tokens))
    else:
        from torchtrain.accumulation import microbatches as split

        found = [part.tokens.numpy() for part in split(placed, 3)]
    for index, part in enumerate(found):
        assert np.array_equal(part, batch.tokens[index::3])


@pytest.mark.parametrize("name", backends.BACKENDS)
def test_no_valid_token_gives_a_zero_gradient(name: str) -> None:
    config = recipe()
    batch = random_batch(config)
    nothing = type(batch)(batch.tokens, np.zeros_like(batch.targets), np.zeros_like(batch.mask))
    with backends.make(name, config) as backend:
        loss, found = backends.loss_and_gradients(backend, nothing)
    assert loss == 0.0
    assert all(not gradient.any() for gradient in found.values())


def test_a_layer_scan_has_the_gradient_of_the_unrolled_layers() -> None:
    found = [
        gradients("jax", recipe(precision="float64", execution={"jax": {"layers": layers}}))[1]
        for layers in ("scan", "unroll")
    ]
    assert largest_error(*found) < 1e-12
