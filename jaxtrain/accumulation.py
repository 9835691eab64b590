"""Gradient accumulation in JAX: a scan over microbatches inside the jitted step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

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
) -> tuple[jax.Array, Tree]:
    """Sums of the values and gradients over the batch's microbatches, in ``dtype``.

    ``value_and_grad(parameters, microbatch)`` must be additive over rows: already divided by a count that does not
    depend on the microbatch.
    """
    if count == 1:
        return jax.tree.map(lambda x: x.astype(dtype), value_and_grad(parameters, batch))

    def add(total: Tree, microbatch: Tree) -> tuple[Tree, None]:
        part = value_and_grad(parameters, microbatch)
        return jax.tree.map(lambda a, b: a + b.astype(dtype), total, part), None

    zeros = jnp.zeros((), dtype), jax.tree.map(lambda p: jnp.zeros(p.shape, dtype), parameters)
    total, _ = jax.lax.scan(add, zeros, microbatches(batch, count))
    return total
