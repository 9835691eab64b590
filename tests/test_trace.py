"""A trace: the tensors of one step, by the same names in both backends, and what a step really computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.batch import Batch
from shared.config.schema import Config
from shared.errors import UserError
from shared.trace import MAX_ELEMENTS, Trace, read_trace, sample, stitched
from tests import backends
from tests.recipes import LLAMA, MODELS, random_batch, recipe

BOTH = pytest.mark.parametrize("name", backends.BACKENDS)


def traced(name: str, config: Config, batch: Batch, path: Path) -> tuple[dict[str, np.ndarray], Any]:
    """(trace of the first step, its metrics)."""
    with backends.make(name, config) as backend:
        state = backend.create_state()
        trace = Trace(backend, state, batch)
        state, pending = backend.train_step(state, batch)
        metrics = pending.read()
        trace.write(state, path / f"{name}.npz")
    return read_trace(path / f"{name}.npz"), metrics


@pytest.mark.parametrize("model", [*MODELS.values(), LLAMA | {"dropout": 0.2}], ids=[*MODELS, "dropout"])
@pytest.mark.parametrize("remat", ["none", "full"])
def test_both_backends_trace_the_same_tensors_in_the_same_order(
    model: dict[str, Any], remat: str, tmp_path: Path
) -> None:
    accumulation = {"microbatch": 2}
    config = recipe(model=model, precision="float64", remat=remat, accumulation=accumulation)
    batch = random_batch(config, ragged=True, segments=True)
    (jax, _), (torch, _) = (traced(name, config, batch, tmp_path) for name in backends.BACKENDS)
    assert list(jax) == list(torch)
    for key, value in jax.items():
        # float64, norm-wise; Adam's first update divides small gradients by themselves.
        limit = 1e-9 if key.startswith(("update.", "parameter.")) else 1e-12
        assert np.linalg.norm(value - torch[key]) <= limit * np.linalg.norm(torch[key]), key


@BOTH
def test_a_trace_is_of_the_step_that_was_taken(name: str, tmp_path: Path) -> None:
    config = recipe(precision="float64", accumulation={"microbatch": 4})
    batch = random_batch(config, ragged=True)
    trace, metrics = traced(name, config, batch, tmp_path)
    assert float(trace["loss"]) == pytest.approx(metrics.loss, rel=1e-14)
    square = sum(np.sum(value**2) for key, value in trace.items() if key.startswith("gradient."))
    assert np.sqrt(square) == pytest.approx(metrics.grad_norm, rel=1e-13)
    with backends.make(name, config) as backend:
        state, _ = backends.steps(backend, [batch])
        for key, value in backend.export_arrays(state):
            np.testing.assert_array_equal(trace[f"parameter.{key}"], value)
        before = dict(backend.export_arrays(backend.create_state()))
    for key, value in before.items():
        np.testing.assert_allclose(trace[f"update.{key}"], trace[f"parameter.{key}"] - value, atol=1e-15)


@BOTH
def test_tracing_a_step_does_not_change_it(name: str) -> None:
    config = recipe(precision="bfloat16", accumulation={"microbatch": 4})
    batches = [random_batch(config, seed=seed) for seed in range(2)]
    with backends.make(name, config) as backend:
        _, plain = backends.steps(backend, batches)
        state, metrics = backend.create_state(), []
        for batch in batches:
            list(backend.trace(state, batch))
            state, pending = backend.train_step(state, batch)
            metrics.append(pending.read())
    assert metrics == plain


@BOTH
def test_the_rows_of_each_microbatch_are_named(name: str) -> None:
    config = recipe(accumulation={"microbatch": 2})
    with backends.make(name, config) as backend:
        rows = dict(backend.trace(backend.create_state(), random_batch(config)))["microbatch.rows"]
    assert rows.tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_microbatches_are_stitched_as_they_were_cut() -> None:
    whole = np.arange(12).reshape(6, 2)
    assert np.array_equal(stitched(whole[a::3] for a in range(3)), whole)


def test_a_large_tensor_is_sampled_at_places_that_its_shape_decides() -> None:
    large = np.arange(3 * MAX_ELEMENTS + 5)
    assert sample(large).size <= MAX_ELEMENTS and np.array_equal(sample(large), large[::4])
    assert np.array_equal(sample(large[:10]), large[:10])
    assert sample(np.ones(3, np.float16)).dtype == np.float32


def test_what_is_no_trace_is_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such trace; --trace STEP writes one"):
        read_trace(tmp_path / "1.npz")
    for content in (b"", b"PK\x03\x04", b"\x80\x04\x95"):
        (tmp_path / "1.npz").write_bytes(content)
        with pytest.raises(UserError, match=r"1\.npz: cannot be read as a trace"):
            read_trace(tmp_path / "1.npz")
