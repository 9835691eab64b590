"""A step's tensors in JAX, by name: see :mod:`shared.trace`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import jax
import numpy as np

from jaxtrain.accumulation import microbatches
from jaxtrain.batch import DeviceBatch
from jaxtrain.models.transformer import Architecture
from jaxtrain.offload import fetched_parameters
from jaxtrain.precision import matmul_precision
from jaxtrain.weights import export_slots
from shared.batch import Batch
from shared.policies.remat import RematPolicy
from shared.recording import recorded
from shared.trace import stitched

if TYPE_CHECKING:
    from jaxtrain.backend import JaxBackend
    from jaxtrain.state import TrainState


def trace(backend: JaxBackend, state: TrainState, batch: Batch) -> Iterator[tuple[str, np.ndarray]]:
    """Everything that the step will compute from this state and batch, up to the gradients."""
    rows, count = backend.place(batch), backend.num_microbatches
    parameters = fetched_parameters(state.parameters, backend.config, backend.placement)
    yield "microbatch.rows", np.asarray(microbatches(np.arange(batch.num_rows, dtype=np.int32), count))

    # Layers that are scanned over, or run twice, would record tracers of an inner function.
    execution = replace(backend.execution, remat=RematPolicy(None), scan_layers=False)
    architecture = Architecture.of(backend.spec, execution)
    names: list[str] = []

    def forward(parameters: dict[str, jax.Array], update: jax.Array, part: DeviceBatch) -> list[jax.Array]:
        model, dropout = architecture.bind(parameters), backend.dropout(part, update)
        with recorded() as values, matmul_precision(backend.policy):
            model(part.tokens, part.segments, part.positions, dropout)
        names[:] = values
        return list(values.values())

    step = jax.jit(backend.placement.on_each_replica(forward, gives_rows=True))
    stacked = microbatches(rows, count)
    parts = [step(parameters, state.num_updates, jax.tree.map(lambda x, a=a: x[a], stacked)) for a in range(count)]
    for index, name in enumerate(names):
        yield f"forward.{name}", stitched(np.asarray(part[index]) for part in parts)

    scale = None if state.loss_scale is None else state.loss_scale.scale
    loss, gradients = jax.jit(backend.gradients)(parameters, rows, scale, state.num_updates)
    if scale is not None:
        loss, gradients = jax.tree.map(lambda x: x / scale, (loss, gradients))
    yield "loss", np.asarray(loss)
    for name, gradient in export_slots(backend.spec, gradients):
        yield f"gradient.{name}", gradient
