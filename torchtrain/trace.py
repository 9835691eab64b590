"""A step's tensors in PyTorch, by name: see :mod:`shared.trace`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from shared.batch import Batch
from shared.recording import recorded
from shared.trace import stitched
from torchtrain.accumulation import microbatches
from torchtrain.weights import export_parameters

if TYPE_CHECKING:
    from torchtrain.backend import TorchBackend
    from torchtrain.state import TrainState


def trace(backend: TorchBackend, state: TrainState, batch: Batch) -> Iterator[tuple[str, np.ndarray]]:
    """Everything that the step will compute from this state and batch, up to the gradients."""
    rows, count = backend.place_all(batch), backend.num_microbatches
    numbers = rows._replace(tokens=torch.arange(batch.num_rows, dtype=torch.int32))
    yield "microbatch.rows", np.stack([part.tokens.numpy() for part in microbatches(numbers, count)])

    recordings = []
    for part in microbatches(rows, count):
        with torch.no_grad(), recorded() as values:
            dropout = backend.dropout(part, state.num_updates)
            state.model(part.tokens, part.segments, part.positions, dropout)
        recordings.append(values)
    for name in recordings[0]:
        yield f"forward.{name}", stitched(_host(values[name]) for values in recordings)

    scale = None if state.loss_scale is None else state.loss_scale.scale
    loss, found = backend.gradients(state.model, backend.place(batch), scale, state.num_updates)
    gradients = {name: found[parameter] for name, parameter in state.model.named_parameters()}
    if scale is not None:
        loss = loss / scale
        torch._foreach_div_(list(gradients.values()), scale)
    yield "loss", _host(loss)
    for name, gradient in export_parameters(backend.spec, gradients):
        yield f"gradient.{name}", gradient.copy()
    state.model.zero_grad()


def _host(tensor: torch.Tensor) -> np.ndarray:
    return tensor.float().cpu().numpy() if tensor.dtype == torch.bfloat16 else tensor.cpu().numpy()
