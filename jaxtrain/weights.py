"""Canonical weights in JAX: a dict of slots, those of the blocks stacked over layers."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
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
    spec: ModelSpec, read: Callable[[Parameter], np.ndarray], dtype: Any, sharding: jax.sharding.Sharding | None = None
) -> Slots:
    """Slots on their devices, filled from canonical arrays, of which one or two are on the host at a time: they are
    turned and stacked on the devices."""
    slots = {slot: jnp.zeros(shape, dtype, device=sharding) for slot, shape in slot_shapes(spec).items()}

    def fill(parameter: Parameter, value: np.ndarray) -> None:
        for piece in parameter.pieces:
            part = weights.part(parameter, value, piece)
            turned = part.T.flags.c_contiguous and not part.flags.c_contiguous
            filled = _filled(slots[piece.slot], part.T if turned else part, piece.layer, turned)
            slots[piece.slot] = filled.block_until_ready()

    for parameter in spec.parameters:
        fill(parameter, read(parameter))
        gc.collect(0)  # JAX lets go of the host's arrays that it has read when Python collects
    return slots


@functools.partial(jax.jit, donate_argnums=0, static_argnames="turned")
def _filled(slot: jax.Array, part: jax.Array, layer: jax.Array | None, turned: bool) -> jax.Array:
    """The slot with that part in it: the whole of it, or one layer's."""
    part = (part.T if turned else part).astype(slot.dtype)
    return part if layer is None else slot.at[layer].set(part)


def export_slots(spec: ModelSpec, slots: Mapping[str, jax.Array]) -> Iterator[tuple[str, np.ndarray]]:
    """(canonical name, host array) of every parameter, one at a time; bfloat16, which NumPy lacks, comes as float32."""

    def read(piece: Piece) -> np.ndarray:
        array = slots[piece.slot]
        host = np.asarray(array if piece.layer is None else array[piece.layer])
        return host.astype(np.float32) if host.dtype.name == "bfloat16" else host

    return weights.canonical_arrays(spec, read)
