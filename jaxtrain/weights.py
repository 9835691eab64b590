"""Canonical weights in JAX: a dict of slots, those of the blocks stacked over layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from shared import weights
from shared.models.spec import ModelSpec, Parameter, Piece

Slots = dict[str, jax.Array]


def slot_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Shape of each slot as JAX holds it: [layers, ...] for those of the blocks."""
    return {
        slot: (spec.num_layers, *shape) if slot.startswith("layers.") else shape for slot, shape in spec.slots().items()
    }


def import_slots(
    spec: ModelSpec, read: Callable[[Parameter], np.ndarray], dtype: Any, place: Callable[[str, np.ndarray], jax.Array]
) -> Slots:
    """Slots from canonical arrays; ``place`` puts a finished one on its devices, so that one at a time is on the
    host."""
    fillers: dict[str, list[tuple[Parameter, Piece]]] = {}
    for parameter in spec.parameters:
        for piece in parameter.pieces:
            fillers.setdefault(piece.slot, []).append((parameter, piece))
    slots = {}
    for slot, shape in slot_shapes(spec).items():
        host = np.empty(shape, dtype)
        for parameter, piece in fillers[slot]:
            host[... if piece.layer is None else piece.layer] = weights.part(parameter, read(parameter), piece)
        slots[slot] = place(slot, host)
    return slots


def export_slots(spec: ModelSpec, slots: Mapping[str, jax.Array]) -> Iterator[tuple[str, np.ndarray]]:
    """(canonical name, host array) of every parameter, one at a time; bfloat16, which NumPy lacks, comes as float32."""

    def read(piece: Piece) -> np.ndarray:
        array = slots[piece.slot]
        host = np.asarray(array if piece.layer is None else array[piece.layer])
        return host.astype(np.float32) if host.dtype.name == "bfloat16" else host

    return weights.canonical_arrays(spec, read)
