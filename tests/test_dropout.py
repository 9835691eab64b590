"""Dropout: one mask in NumPy, JAX and PyTorch, whatever the work is cut into."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.config.schema import Config
from shared.policies.dropout import dropout_key, keep_mask, threshold
from tests import backends
from tests.recipes import ADAMW, GPT2, LLAMA, random_batch, recipe
from tests.test_updates import poisoned

BOTH = pytest.mark.parametrize("name", backends.BACKENDS)
RATE = 0.3
MODELS = {"llama": LLAMA | {"dropout": RATE}, "gpt2": GPT2 | {"dropout": RATE}}


def dropping(family: str = "llama", **sections: Any) -> Config:
    return recipe(**{"model": MODELS[family], "precision": "float64"} | sections)


# ----------------------------------------------------------------------------------------------------------- the mask


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.999])
@pytest.mark.parametrize("update", [0, 7, 2**31 - 1])
def test_the_mask_is_the_same_in_numpy_jax_and_torch(rate: float, update: int) -> None:
    import jax.numpy as jnp
    import torch

    from jaxtrain import dropout as in_jax
    from torchtrain import dropout as in_torch

    key, rows, size = dropout_key(3, "out", 1), np.array([0, 1, 5, 2**20], np.int32), 10_007
    expected = keep_mask(key, update, rows, size, rate)
    jax = in_jax.keep_mask(np.array(key, np.uint32), jnp.int32(update), jnp.asarray(rows), size, rate)
    torch_ = in_torch.keep_mask(key, torch.tensor(update), torch.from_numpy(rows), size, rate)
    assert np.array_equal(expected, np.asarray(jax)) and np.array_equal(expected, torch_.numpy())


def test_the_mask_never_changes_from_one_version_to_the_next() -> None:
    """A run that is resumed tomorrow meets the masks of today."""
    kept = keep_mask(dropout_key(0, "out", 0), 0, np.arange(2), 32, 0.5)
    assert ["".join(str(int(bit)) for bit in row) for row in kept] == GOLDEN


GOLDEN = ["00101110000101110011100011111100", "10001011111110100101101000100101"]


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_the_rate_is_kept_by_each_row_and_each_column(rate: float) -> None:
    kept = keep_mask(dropout_key(0, "down", 2), 11, np.arange(400), 4096, rate)
    deviation = np.sqrt(rate * (1 - rate))
    for axis, count in ((0, 400), (1, 4096)):
        # 4,096 means of independent elements: the largest is about 4 standard deviations off, and 6 is unheard of.
        errors = (kept.mean(axis=axis) - (1 - rate)) / (deviation / np.sqrt(count))
        assert np.max(np.abs(errors)) < 6
        assert 0.9 < np.std(errors) < 1.1, "neither clumped nor spread by design"


def test_masks_of_neighbours_are_independent() -> None:
    """Elements, rows, updates, layers, names and seeds that are next to each other have uncorrelated masks."""
    size = 1 << 16

    def mask(seed: int = 0, name: str = "out", layer: int = 0, update: int = 0, row: int = 0) -> np.ndarray:
        return keep_mask(dropout_key(seed, name, layer), update, np.array([row]), size, 0.5)[0]

    plain = mask()
    others = [mask(seed=1), mask(name="down"), mask(layer=1), *(mask(update=u) for u in range(1, 9))]
    others += [mask(row=row) for row in (*range(1, 9), 64, 2**16)]
    others += [np.roll(plain, shift) for shift in (1, 2, 3, 4, 8, 16, 24, 64, 256, 4096)]
    for other in others:
        correlation = np.corrcoef(plain, other)[0, 1]
        assert abs(correlation) < 5 / np.sqrt(size)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_elements_of_a_row_are_independent_at_every_distance(rate: float) -> None:
    """A bare counter through the finaliser fails this: 10 standard deviations at a distance of 24 * 1024, for one."""
    size, num_lags, num_masks = 1 << 20, 1 << 16, 12
    for update in range(num_masks):
        kept = keep_mask(dropout_key(0, "out", 1), update, np.array([5 * update]), size, rate)[0]
        spectrum = np.fft.rfft((kept - (1 - rate)) / np.sqrt(rate * (1 - rate)), 2 * size)
        sums = np.fft.irfft(np.abs(spectrum) ** 2)[1 : num_lags + 1]
        correlations = sums / np.sqrt(size - np.arange(1, num_lags + 1))
        # Of 786,432 normal numbers the largest is about 5.2, and one beyond 6.5 has a chance of 1 in 16,000.
        assert np.max(np.abs(correlations)) < 6.5
        assert 0.98 < np.std(correlations) < 1.02


def test_the_largest_and_the_smallest_rate() -> None:
    assert threshold(0.0) == 0 and threshold(0.5) == 2**31
    assert keep_mask((1, 2), 0, np.arange(3), 100, 0.0).all()


# ---------------------------------------------------------------------------------------------------------- the model


@functools.cache
def gradients(name: str, family: str, update: int, microbatch: int, remat: str, layers: str) -> dict[str, np.ndarray]:
    execution = {"jax": {"layers": layers}}
    config = dropping(family, accumulation={"microbatch": microbatch}, remat=remat, execution=execution)
    batch = random_batch(config, ragged=True)
    with backends.make(name, config) as backend:
        state, rows = backend.create_state(), backend.place(batch)
        if name == "jax":
            import jax
            import jax.numpy as jnp

            from jaxtrain.weights import export_slots

            _, found = jax.jit(backend.gradients)(state.parameters, rows, None, jnp.int32(update))
            return dict(export_slots(backend.spec, found))
        import torch

        from torchtrain.weights import export_parameters

        backend.gradients(state.model, rows, None, torch.tensor(update))
        grads = {key: p.grad for key, p in state.model.named_parameters()}
        return {key: value.copy() for key, value in export_parameters(backend.spec, grads)}


def error(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> float:
    return max(float(np.linalg.norm(first[key] - second[key]) / np.linalg.norm(second[key])) for key in second)


@pytest.mark.parametrize("family", MODELS)
def test_both_backends_have_the_same_gradient_under_dropout(family: str) -> None:
    jax, torch = (gradients(name, family, 4, 8, "none", "unroll") for name in backends.BACKENDS)
    assert error(jax, torch) < 1e-13  # float64 rounding; one other element in a mask would show as 1e-2


@BOTH
@pytest.mark.parametrize(
    ("microbatch", "remat", "layers"), [(2, "none", "unroll"), (8, "full", "unroll"), (4, "matmuls", "scan")]
)
def test_how_the_work_is_cut_up_does_not_change_the_mask(name: str, microbatch: int, remat: str, layers: str) -> None:
    plain = gradients(name, "llama", 4, 8, "none", "unroll")
    assert error(gradients(name, "llama", 4, microbatch, remat, layers), plain) < 1e-13


def test_a_replica_of_torch_numbers_its_rows_as_the_global_batch_does() -> None:
    """With the mask a function of that number, two processes drop what one does. (JAX: tests/test_replicas.py.)"""
    config = dropping()
    batch = random_batch(config)
    with backends.make("torch", config) as backend:
        for index in range(4):
            backend.replicas = dataclasses.replace(backend.replicas, index=index, count=4)
            placed = backend.place(batch)
            assert placed.rows.tolist() == [2 * index, 2 * index + 1]
            assert np.array_equal(placed.tokens.numpy(), batch.tokens[placed.rows])


@BOTH
def test_each_update_has_its_own_mask(name: str) -> None:
    first, second = (gradients(name, "llama", update, 8, "none", "unroll") for update in (0, 1))
    assert error(first, second) > 1e-2


def test_a_new_mask_compiles_no_new_program_in_jax() -> None:
    config = dropping(execution={"vocab_chunk": 10}, accumulation={"microbatch": 2})
    with backends.make("jax", config) as backend:
        backends.steps(backend, [random_batch(config, seed=seed) for seed in range(3)])
        assert backend.step._cache_size() == 1


@BOTH
def test_a_skipped_update_keeps_the_mask_for_the_next(name: str) -> None:
    config = dropping()
    batch = random_batch(config)
    with backends.make(name, config) as backend:
        state, pending = backend.train_step(backend.create_state(), batch)
        expected = pending.read().loss
        state, pending = backend.train_step(poisoned(backend, backend.create_state()), batch)
        assert pending.read().skipped
        value = float(dict(backend.export_arrays(backend.create_state()))["lm_head.weight"][0, 0])
        _, pending = backend.train_step(poisoned(backend, state, value), batch)
        assert pending.read().loss == expected


@BOTH
def test_an_evaluation_drops_nothing(name: str) -> None:
    losses = []
    for model in (LLAMA, MODELS["llama"]):
        config = recipe(model=model, precision="float64")
        with backends.make(name, config) as backend:
            losses.append(backend.eval_step(backend.create_state(), random_batch(config)).read().loss)
    assert losses[0] == losses[1]


@BOTH
def test_what_stays_is_divided_by_the_rate_of_staying(name: str) -> None:
    """By hand: the embedding's output of a traced step."""
    config = dropping()
    with backends.make(name, config) as backend:
        batch, state = random_batch(config), backend.create_state()
        trace = dict(backend.trace(state, batch))
        table = dict(backend.export_arrays(state))["model.embed_tokens.weight"]
    shape = trace["forward.embedding"].shape
    kept = keep_mask(dropout_key(config.seed, "embedding"), 0, np.arange(shape[0]), shape[1] * shape[2], RATE)
    expected = np.where(kept.reshape(shape), table[batch.tokens] / (1 - RATE), 0)
    np.testing.assert_allclose(trace["forward.embedding"], expected, rtol=1e-14)


@BOTH
def test_a_run_with_dropout_is_resumed_bit_for_bit(name: str, tmp_path: Path) -> None:
    config = dropping(optimizer=ADAMW)
    batches = [random_batch(config, seed=seed) for seed in range(4)]
    with backends.make(name, config) as backend:
        straight, resumed = backends.straight_and_resumed(backend, batches, 2, tmp_path)
    assert resumed == straight
