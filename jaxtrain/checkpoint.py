"""A train state on disk in Orbax's format, written while training goes on and read array by array.

Arrays lie in pieces on the disk, so that one layer of those that are stacked over layers can be read without the
others, and a large one little by little.
"""

from __future__ import annotations

import functools
import itertools
import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from shared import weights
from shared.models.spec import Parameter, Piece

NAME = "orbax"

CHUNK_BYTES = 4 * 2**20
"""Largest piece of an array on disk."""

_FORMATS = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def save(arrays: dict[str, Any], directory: Path) -> Callable[[], None]:
    """Start to write the arrays into ``directory``; returns when they may change. What is returned waits for the rest
    and raises what went wrong."""
    _tell_once()
    checkpointer = ocp.StandardCheckpointer()
    chunks = jax.tree.map(_chunks, arrays)
    checkpointer.save(directory.absolute() / NAME, arrays, save_args=chunks)

    def wait() -> None:
        with checkpointer:
            checkpointer.wait_until_finished()

    return wait


@functools.cache
def _tell_once() -> None:
    """What goes wrong with a save is raised, and told by who asked for it. Orbax logs it as well, and its threads, and
    the writes that end when nobody waits for them any more."""
    logging.getLogger("absl").addFilter(lambda record: record.levelno < logging.ERROR or "orbax" not in record.pathname)
    logging.getLogger("asyncio").addFilter(lambda record: "exception was never retrieved" not in record.getMessage())
    warnings.filterwarnings("ignore", r"coroutine '.*write_fragment' was never awaited")
    before = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            before(unraisable)

    sys.unraisablehook = hook


def _chunks(array: jax.Array) -> ocp.SaveArgs:
    if array.nbytes <= CHUNK_BYTES:
        return ocp.SaveArgs()
    stacked = array.ndim > 2
    return ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES, shard_axes=(0,) if stacked else ())


def restore(abstract: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Read arrays of the shapes, dtypes and shardings that ``abstract`` gives."""
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(directory.absolute() / NAME, abstract)


class StoredState:
    """A state that :func:`save` wrote, as a :class:`shared.backend.StateSource`."""

    def __init__(self, directory: Path):
        self._directory = directory.absolute() / NAME
        # No cache: what was read is not asked for again.
        self._context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 0}})
        with ocp.StandardCheckpointer() as checkpointer:
            found = checkpointer.metadata(self._directory).item_metadata.tree
        scalars = ("num_updates", "loss_scale")
        self._dtypes = {role: next(iter(slots.values())).dtype for role, slots in found.items() if role not in scalars}
        self.roles = tuple(self._dtypes)
        self.num_updates = int(self._open("num_updates").read().result())
        self.loss_scale: tuple[float, int] | None = None
        if "loss_scale" in found:
            scale, good = (self._open(f"loss_scale.{name}").read().result() for name in ("scale", "good_updates"))
            self.loss_scale = float(scale), int(good)

    def dtype(self, role: str) -> str:
        return _FORMATS[np.dtype(self._dtypes[role]).name]

    def read(self, role: str, parameter: Parameter) -> np.ndarray:
        def read(piece: Piece) -> np.ndarray:
            stored = self._open(f"{role}.{piece.slot}")
            return _read(stored if piece.layer is None else stored[piece.layer])

        return weights.join(parameter, read)

    def _open(self, name: str) -> Any:
        store = {"driver": "ocdbt", "base": f"file://{self._directory}/", "path": f"{name}/"}
        return tensorstore.open({"driver": "zarr", "kvstore": store}, read=True, context=self._context).result()


def _read(stored: Any) -> np.ndarray:
    """The array, of which no more than a piece is in memory twice; bfloat16 as float32."""
    dtype = stored.dtype.numpy_dtype
    array = np.empty(stored.shape, np.float32 if dtype.name == "bfloat16" else dtype)
    pieces = stored.chunk_layout.read_chunk.shape
    for starts in itertools.product(*(range(0, *sizes) for sizes in zip(array.shape, pieces, strict=True))):
        ends = np.minimum(np.add(starts, pieces), array.shape)
        place = tuple(map(slice, starts, ends))
        array[place] = stored[place].read().result()
    return array
