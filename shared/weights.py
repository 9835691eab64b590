"""Canonical parameters to slots and back: how Hugging Face's names and layouts meet a backend's own.

A backend holds its weights in *slots* (see :meth:`shared.models.spec.ModelSpec.slots`), whose kernels are (in, out)
here whatever the canonical layout is. A backend that stores them turned, stacked or fused does so on its side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from shared.models.spec import ModelSpec, Parameter, Piece


def part(parameter: Parameter, value: np.ndarray, piece: Piece) -> np.ndarray:
    """What one piece of a canonical array puts in its slot, kernels as (in, out)."""
    selection: list[slice] = [slice(None)] * value.ndim
    selection[parameter.output_axis] = slice(piece.start, piece.start + piece.size)
    selected = value[tuple(selection)]
    return selected.T if parameter.is_kernel and parameter.output_axis == 0 else selected


def join(parameter: Parameter, read: Callable[[Piece], np.ndarray]) -> np.ndarray:
    """The canonical array, put together from its slots (kernels as (in, out))."""
    parts = [read(piece) for piece in parameter.pieces]
    if parameter.is_kernel and parameter.output_axis == 0:
        parts = [part.T for part in parts]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, parameter.output_axis)


def canonical_arrays(spec: ModelSpec, read: Callable[[Piece], np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """(canonical name, array) of every parameter, one at a time."""
    for parameter in spec.parameters:
        yield parameter.name, join(parameter, read)
