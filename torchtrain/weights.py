"""Canonical weights in PyTorch: named parameters, kernels as [out, in]."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch

from shared import weights
from shared.models.spec import ModelSpec, Parameter, Piece


def parameter_name(piece: Piece) -> str:
    """The name in :class:`torchtrain.models.transformer.Transformer` of the parameter that holds a piece."""
    slot = piece.slot if piece.layer is None else piece.slot.replace("layers.", f"layers.{piece.layer}.", 1)
    return slot.removesuffix(".kernel") + ".weight" if slot.endswith(".kernel") else slot


@torch.no_grad()
def import_parameters(
    spec: ModelSpec, read: Callable[[Parameter], np.ndarray], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Fill the tensors from canonical arrays, one array at a time on the host."""

    def fill(parameter: Parameter, value: np.ndarray) -> None:
        for piece in parameter.pieces:
            part = weights.part(parameter, value, piece)
            tensors[parameter_name(piece)].copy_(torch.from_numpy(part.T if parameter.is_kernel else part))

    for parameter in spec.parameters:
        fill(parameter, read(parameter))


def export_parameters(spec: ModelSpec, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, np.ndarray]]:
    """(canonical name, host array) of every parameter, one at a time; bfloat16, which NumPy lacks, comes as float32."""

    def read(piece: Piece) -> np.ndarray:
        tensor = tensors[parameter_name(piece)].detach().cpu()
        array = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
        return array.T if piece.slot.endswith(".kernel") else array

    return weights.canonical_arrays(spec, read)
