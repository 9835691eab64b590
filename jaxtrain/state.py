"""What a run of JAX carries from step to step."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax

from jaxtrain.loss_scale import LossScaleState


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["parameters", "optimizer", "average", "num_updates", "loss_scale"],
    meta_fields=[],
)
@dataclass(frozen=True)
class TrainState:
    """Everything that an update changes."""

    parameters: dict[str, jax.Array]
    optimizer: Any
    average: dict[str, jax.Array] | None
    num_updates: jax.Array
    loss_scale: LossScaleState | None
