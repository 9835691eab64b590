"""Gradient accumulation in JAX: a scan over microbatches inside the jitted step.

With several replicas that scan runs on each of them over its own rows (``shard_map``), and the gradients are summed
by an explicit collective: so their number and format are what the recipe says, not what a partitioner thinks best.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp

from jaxtrain.devices import memory_bytes
from shared.config.schema import Config
from shared.errors import UserError

Tree = Any


def microbatches(batch: Tree, count: int) -> Tree:
    """[B, ...] arrays as [count, B / count, ...]; microbatch a holds rows a::count.

    Rows are split as (B / count, count): the leading part keeps the order of the devices, so no row moves.
    """
    return jax.tree.map(lambda x: jnp.swapaxes(x.reshape(-1, count, *x.shape[1:]), 0, 1), batch)


def accumulate(
    value_and_grad: Callable[[Tree, Tree], tuple[jax.Array, Tree]],
    parameters: Tree,
    batch: Tree,
    count: int,
    dtype: Any,
    over_replicas: Callable[[Tree], Tree] = lambda sums: sums,
    sync: Literal["every", "last"] = "last",
) -> tuple[jax.Array, Tree]:
    """Sums of the values and gradients over the batch's microbatches, in ``dtype``, and over replicas.

    ``value_and_grad(parameters, microbatch)`` must be additive over rows: already divided by a count that does not
    depend on the microbatch. ``over_replicas`` is applied to what every microbatch gives, or once to the sums.
    """
    every = over_replicas if sync == "every" else lambda part: part
    last = over_replicas if sync == "last" else lambda sums: sums
    if count == 1:
        return over_replicas(jax.tree.map(lambda x: x.astype(dtype), value_and_grad(parameters, batch)))

    def add(total: Tree, microbatch: Tree) -> tuple[Tree, None]:
        part = every(jax.tree.map(lambda x: x.astype(dtype), value_and_grad(parameters, microbatch)))
        return jax.tree.map(jnp.add, total, part), None

    zeros = jnp.zeros((), dtype), jax.tree.map(lambda p: jnp.zeros(p.shape, dtype), parameters)
    total, _ = jax.lax.scan(add, zeros, microbatches(batch, count))
    return last(total)


class Measured(Protocol):
    """A backend whose step can be compiled to see what memory it takes."""

    def compiled_bytes(self) -> int: ...


def fits(config: Config, devices: Sequence[jax.Device], made: Callable[[Config], Measured]) -> bool:
    """Whether the step of a config's backend, which ``made`` gives, fits the device: for ``microbatch: auto``.

    Found ahead of time: the step is compiled, and its memory held against the device's. A compiler that knows its
    device (a TPU's) says itself when a program does not fit.

    Raises UserError where the device does not say how much memory it has.
    """
    device = devices[0]
    limit = memory_bytes(device)
    if limit is None and device.platform != "tpu":
        raise UserError(
            f"accumulation.microbatch=auto: {device.device_kind} does not say how much memory it has; state a number"
        )
    try:
        needed = made(config).compiled_bytes()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            return False
        raise
    return limit is None or needed <= limit
