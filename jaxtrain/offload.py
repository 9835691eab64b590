"""Host offload in JAX: state that lives in the host's memory between updates, by memory kinds.

A step copies it to the device, computes as ever, and its outputs go back: the compiler schedules the copies. Which
activations wait in host memory is a matter of remat (:mod:`jaxtrain.remat`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax

from jaxtrain.parallel import Placement
from jaxtrain.state import TrainState
from shared.config.precision import roles
from shared.config.schema import Config
from shared.errors import UserError


def require(config: Config, placement: Placement) -> None:
    """Raise UserError when something is to live in host memory and cannot here: the CPU's compiler of older versions of
    JAX knows one memory."""
    wanted = [name for name in ("optimizer", "parameters") if getattr(config.offload, name) == "host"]
    if not wanted or placement.mesh.devices.flat[0].platform != "cpu":
        return
    try:
        jax.jit(lambda x: x, out_shardings=placement.host).lower(0.0).compile()
    except jax.errors.JaxRuntimeError as error:
        raise UserError(
            f"offload.{wanted[0]}=host: jax {jax.__version__} knows one memory on a CPU "
            f"({str(error).splitlines()[0]}); nearest valid: offload.{wanted[0]}=device"
        ) from None


def state_shardings(config: Config, placement: Placement) -> Any:
    """Where each part of the state lives between steps: a TrainState of shardings."""
    device, host = placement.replicated, placement.host
    parameters = host if config.offload.parameters == "host" else device
    shardings: dict[str, Any] = {
        "parameters": parameters,
        "optimizer": host if config.offload.optimizer == "host" else device,
        "average": None if config.optimizer.ema_decay is None else parameters,
        "num_updates": device,
        "loss_scale": None if roles(config.precision)["loss_scale"] is None else device,
    }
    return TrainState(**shardings)


def fetched(state: TrainState, config: Config, placement: Placement) -> TrainState:
    """The state with everything on the device; inside a jitted function."""
    if config.offload.optimizer == "host":
        state = replace(state, optimizer=jax.device_put(state.optimizer, placement.on_device))
    if config.offload.parameters == "host":
        parameters, average = jax.device_put((state.parameters, state.average), placement.on_device)
        state = replace(state, parameters=parameters, average=average)
    return state


def fetched_parameters(parameters: Any, config: Config, placement: Placement) -> Any:
    """Parameters, or their average, on the device; inside a jitted function or out of it."""
    return jax.device_put(parameters, placement.on_device) if config.offload.parameters == "host" else parameters
