"""Initial weights: the same numbers in both backends, on any machine.

Each parameter is drawn by NumPy's counter-based Philox generator, keyed by the seed and the parameter's canonical
name. So no order of drawing exists to get wrong: a process can draw only the parameters it holds, and adding a
parameter changes no other. Draws are float64, rounded once to float32; a run in any precision starts from these
float32 numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np

from shared.models.spec import ModelSpec, Parameter


def initial_value(parameter: Parameter, seed: int) -> np.ndarray:
    """The float32 array, in canonical shape, that a parameter starts from."""
    if parameter.std is None:
        return np.full(parameter.shape, parameter.constant, np.float32)
    key = hashlib.sha256(f"{seed}:{parameter.name}".encode()).digest()
    generator = np.random.Generator(np.random.Philox(key=np.frombuffer(key[:16], "<u8")))
    draws = generator.standard_normal(parameter.shape)
    draws *= parameter.std
    return draws.astype(np.float32)


class FirstDraws:
    """The state before the first step, as a :class:`shared.backend.StateSource`: parameters alone."""

    roles = ("parameters",)
    num_updates = 0
    loss_scale = None

    def __init__(self, seed: int):
        self._seed = seed

    def dtype(self, role: str) -> str:
        return "F32"

    def read(self, role: str, parameter: Parameter) -> np.ndarray:
        return initial_value(parameter, self._seed)


def weights_fingerprint(spec: ModelSpec, read: Callable[[Parameter], np.ndarray]) -> str:
    """16 hex digits of all initial weights: names, shapes and numbers."""
    digest = hashlib.sha256()
    for parameter in sorted(spec.parameters, key=lambda parameter: parameter.name):
        digest.update(f"{parameter.name}{parameter.shape}".encode())
        digest.update(read(parameter).astype("<f4", copy=False).tobytes())
    return digest.hexdigest()[:16]
