"""The optimiser in JAX: optax, by the rules of :mod:`shared.optimizer`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shared.config.schema import SGD, AdamW
from shared.models.spec import ModelSpec
from shared.optimizer import CLIP_EPSILON

Tree = Any


def transformation(config: AdamW | SGD, spec: ModelSpec, dtype: Any, stored: Any) -> optax.GradientTransformation:
    """From clipped gradients to the direction that the learning rate multiplies, in ``dtype``; moments are kept in
    ``stored``."""
    inner = _in_one_dtype(config, spec, dtype)
    if stored == dtype:
        return inner

    def cast(tree: Tree, dtype: Any) -> Tree:
        return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)

    def initial(parameters: Tree) -> Tree:
        return cast(inner.init(parameters), stored)

    def update(gradients: Tree, state: Tree, parameters: Tree = None) -> tuple[Tree, Tree]:
        direction, state = inner.update(gradients, cast(state, dtype), parameters)
        return direction, cast(state, stored)

    return optax.GradientTransformation(initial, update)


def _in_one_dtype(config: AdamW | SGD, spec: ModelSpec, dtype: Any) -> optax.GradientTransformation:
    decay = optax.add_decayed_weights(config.weight_decay, mask=_decayed_slots(spec))
    if isinstance(config, AdamW):
        # optax raises the betas to the power of the step. A Python float would do so in float32 whatever the
        # gradients are: at float64 that is an error of 1e-5 in the first steps' bias correction.
        beta1, beta2 = (np.asarray(beta, dtype) for beta in (config.beta1, config.beta2))
        return optax.chain(optax.scale_by_adam(beta1, beta2, config.eps), decay)
    if config.momentum:
        return optax.chain(decay, optax.trace(config.momentum, config.nesterov))
    return decay


def _decayed_slots(spec: ModelSpec) -> dict[str, bool]:
    return {piece.slot: parameter.decayed for parameter in spec.parameters for piece in parameter.pieces}


def moments(state: Tree) -> dict[str, Tree]:
    """The moments in the optimiser's state, by role: those of :class:`shared.backend.StateSource`."""
    found: dict[str, Tree] = {}
    for node in jax.tree.leaves(state, is_leaf=_has_moments):
        match node:
            case optax.ScaleByAdamState():
                found |= {"first_moment": node.mu, "second_moment": node.nu}
            case optax.TraceState():
                found |= {"momentum": node.trace}
    return found


def with_moments(state: Tree, moments: dict[str, Tree], count: jax.Array) -> Tree:
    """The optimiser's state with these moments, after ``count`` updates. ``state`` gives the structure, and where the
    count lies."""

    def replaced(node: Any) -> Any:
        match node:
            case optax.ScaleByAdamState():
                placed = jax.device_put(count, node.count.sharding)
                return optax.ScaleByAdamState(placed, moments["first_moment"], moments["second_moment"])
            case optax.TraceState():
                return optax.TraceState(moments["momentum"])
        return node

    return jax.tree.map(replaced, state, is_leaf=_has_moments)


def _has_moments(node: Any) -> bool:
    return isinstance(node, optax.ScaleByAdamState | optax.TraceState)


def global_norm(gradients: Tree) -> jax.Array:
    """Euclidean norm over all leaves, in their dtype."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(gradients)))


def clipped(gradients: Tree, norm: jax.Array, clip_norm: float | None) -> Tree:
    """Gradients scaled so that their norm is at most ``clip_norm``."""
    if clip_norm is None:
        return gradients
    factor = jnp.minimum(1.0, clip_norm / (norm + CLIP_EPSILON))
    return jax.tree.map(lambda gradient: gradient * factor.astype(gradient.dtype), gradients)


def averaged(average: Tree, parameters: Tree, decay: float | None) -> Tree:
    """The exponential moving average after one more update, computed in the dtype of ``parameters``."""
    if decay is None:
        return average

    def follow(a: jax.Array, p: jax.Array) -> jax.Array:
        return (a.astype(p.dtype) * decay + p * (1.0 - decay)).astype(a.dtype)

    return jax.tree.map(follow, average, parameters)
