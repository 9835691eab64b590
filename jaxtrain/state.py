"""What a run of JAX carries from step to step, and the roles that its arrays have."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain import optimizer
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


def arrays(state: TrainState) -> dict[str, Any]:
    """All arrays of the state, by role and slot, without optax's structure; a state of shapes gives shapes."""
    found: dict[str, Any] = {"num_updates": state.num_updates, "parameters": state.parameters}
    found |= optimizer.moments(state.optimizer)
    if state.average is not None:
        found["average"] = state.average
    if state.loss_scale is not None:
        found["loss_scale"] = state.loss_scale._asdict()
    return found


def state_of(arrays: dict[str, Any], like: TrainState) -> TrainState:
    """The state that has these arrays. ``like``: shapes and shardings of the whole state, for its structure."""
    # A copy, since a step may not be given one array twice to use up.
    count = jnp.copy(arrays["num_updates"])
    return TrainState(
        parameters=arrays["parameters"],
        optimizer=optimizer.with_moments(like.optimizer, arrays, count),
        average=arrays.get("average"),
        num_updates=arrays["num_updates"],
        loss_scale=LossScaleState(**arrays["loss_scale"]) if "loss_scale" in arrays else None,
    )
