"""Both backends behind one face, for tests that make the same claim of each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from shared.batch import Batch
from shared.config.schema import Config

BACKENDS = ("jax", "torch")


@contextlib.contextmanager
def make(name: str, config: Config) -> Iterator[Any]:
    """A backend for that config. For float64, JAX runs in its 64-bit mode until the context ends."""
    if name == "torch":
        from torchtrain.backend import TorchBackend

        yield TorchBackend(config)
        return
    import jax

    from jaxtrain.backend import JaxBackend

    before = jax.config.jax_enable_x64
    try:
        yield JaxBackend(config)
    finally:
        jax.config.update("jax_enable_x64", before)


def logits(backend: Any, batch: Batch, source: Any = None) -> np.ndarray:
    """[B, T, V] at the weights of a source, or at the initial ones."""
    state = backend.create_state(source)
    rows = backend.place(batch)
    inputs = rows.tokens, rows.segments, rows.positions
    if backend.name == "jax":
        import jax

        return np.asarray(jax.jit(lambda p, *i: backend.architecture.bind(p)(*i))(state.parameters, *inputs))
    return state.model(*inputs).detach().numpy()


def loss_and_gradients(backend: Any, batch: Batch) -> tuple[float, dict[str, np.ndarray]]:
    """(mean loss, gradient by canonical name) at the initial weights."""
    state = backend.create_state()
    rows = backend.place(batch)
    if backend.name == "jax":
        import jax

        from jaxtrain.weights import export_slots

        loss, gradients = jax.jit(backend.gradients)(state.parameters, rows)
        return float(loss), dict(export_slots(backend.spec, gradients))
    from torchtrain.weights import export_parameters

    loss, found = backend.gradients(state.model, rows)
    gradients = {name: found[parameter] for name, parameter in state.model.named_parameters()}
    return loss.item(), {k: v.copy() for k, v in export_parameters(backend.spec, gradients)}


def steps(backend: Any, batches: list[Batch]) -> tuple[Any, list[Any]]:
    """(state, metrics of each step) after training on the batches from the initial weights."""
    state, metrics = backend.create_state(), []
    for batch in batches:
        state, pending = backend.train_step(state, batch)
        metrics.append(pending.read())
    return state, metrics


def straight_and_resumed(backend: Any, batches: list[Batch], at: int, directory: Path) -> tuple[list[Any], list[Any]]:
    """Metrics of the steps after ``at``: of a run never stopped, and of one that was saved there and resumed."""
    _, straight = steps(backend, batches)
    state, _ = steps(backend, batches[:at])
    backend.save(state, directory)()
    state, resumed = backend.restore(directory), []
    for batch in batches[at:]:
        state, pending = backend.train_step(state, batch)
        resumed.append(pending.read())
    return straight[at:], resumed
