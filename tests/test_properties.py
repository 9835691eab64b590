"""Properties: whatever the mask, and however an update is split, the gradient is the same."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.batch import Batch
from shared.config.schema import Config
from tests import backends
from tests.recipes import LLAMA
from tests.test_replicas import LIMITS, config_of, error
from tests.torch_replicas import processes

ROWS, LENGTH = 8, 12
PLAIN = (1, 8, "last", "none")
SPLITS = [
    # replicas, microbatch (of 8 rows shared by the replicas), sync, remat
    (1, 1, "last", "none"),
    (1, 2, "every", "full"),
    (1, 4, "last", "matmuls"),
    (1, 8, "last", "full"),
    (2, 1, "every", "none"),
    (2, 2, "last", "full"),
    (2, 4, "every", "full"),
    (4, 1, "last", "none"),
    (4, 2, "every", "full"),
]


def made(split: tuple[int, int, str, str], precision: str) -> Config:
    replicas, microbatch, sync, remat = split
    batch = {"global_batch": ROWS, "sequence_length": LENGTH}
    model = LLAMA | {"num_hidden_layers": 1}
    return config_of(replicas, microbatch, sync, precision, remat=remat, batch=batch, model=model)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Random tokens under a ragged mask: rows may have all, some or none of their targets."""
    seed = draw(st.integers(0, 2**32 - 1))
    valid = draw(st.lists(st.integers(0, LENGTH), min_size=ROWS, max_size=ROWS))
    holes = draw(st.booleans())
    rng = np.random.default_rng(seed)
    tokens, targets = rng.integers(0, LLAMA["vocab_size"], (2, ROWS, LENGTH), dtype=np.int32)
    mask = np.arange(LENGTH)[None] < np.array(valid)[:, None]
    if holes:
        mask &= rng.random(mask.shape) < 0.7
    return Batch(tokens, np.where(mask, targets, 0), mask)


class Gradients:
    """Gradients of one backend for any split, each compiled once."""

    def __init__(self, name: str, precision: str, stack: contextlib.ExitStack):
        self.name, self.precision, self.stack = name, precision, stack
        self.made: dict[Any, Any] = {}

    def __call__(self, split: tuple[int, int, str, str], batch: Batch) -> tuple[float, dict[str, np.ndarray]]:
        replicas = split[0]
        config = made(split, self.precision)
        if self.name == "torch" and replicas > 1:
            if replicas not in self.made:
                self.made[replicas] = self.stack.enter_context(processes(replicas))
            loss, gradients, _ = self.made[replicas].loss_and_gradients(config.model_dump(), batch)[0]
            return loss, gradients
        if split not in self.made:
            backend = self.stack.enter_context(backends.make(self.name, config))
            self.made[split] = backend, self._compiled(backend)
        backend, gradients = self.made[split]
        return gradients(batch)

    def _compiled(self, backend: Any) -> Any:
        if self.name == "torch":
            return lambda batch: backends.loss_and_gradients(backend, batch)
        import jax

        from jaxtrain.weights import export_slots

        state, step = backend.create_state(), jax.jit(backend.gradients)

        def gradients(batch: Batch) -> tuple[float, dict[str, np.ndarray]]:
            loss, found = step(state.parameters, backend.place(batch))
            return float(loss), dict(export_slots(backend.spec, found))

        return gradients


@pytest.fixture(scope="module", params=[(name, p) for name in backends.BACKENDS for p in LIMITS], ids="-".join)
def gradients(request: pytest.FixtureRequest) -> Iterator[Gradients]:
    with contextlib.ExitStack() as stack:
        yield Gradients(*request.param, stack)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=batches(), split=st.sampled_from(SPLITS))
def test_no_split_of_an_update_changes_its_gradient(
    gradients: Gradients, batch: Batch, split: tuple[int, int, str, str]
) -> None:
    expected_loss, expected = gradients(PLAIN, batch)
    loss, found = gradients(split, batch)
    if not batch.mask.any():
        assert loss == expected_loss == 0.0
        assert not any(value.any() for value in found.values())
        return
    limit = LIMITS[gradients.precision]
    assert loss == pytest.approx(expected_loss, rel=limit)
    assert error(found, expected) < limit


def test_the_splits_cover_what_can_be_split() -> None:
    replicas, microbatches, syncs, remats = (set(column) for column in zip(*SPLITS, strict=True))
    assert replicas == {1, 2, 4} and microbatches == {1, 2, 4, 8} and syncs == {"every", "last"}
    assert remats >= {"none", "full", "matmuls"}
