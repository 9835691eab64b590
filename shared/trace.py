"""One step of a run, tensor by tensor: what to look at when two runs part and nobody knows where.

A trace holds, under names that are the same in both backends and in the order in which they are computed: the rows of
each microbatch, the activations of the forward pass (``forward.layers.0.q``), the loss, every gradient as it enters
clipping (``gradient.NAME``), what the update added to every parameter (``update.NAME``) and what came out
(``parameter.NAME``). Large tensors are sampled, in every backend at the same places.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from shared.backend import Backend, State
from shared.batch import Batch
from shared.errors import UserError
from shared.run_directory import writing

MAX_ELEMENTS = 1 << 18
"""Elements of one tensor that a trace holds at most."""


def sample(array: np.ndarray) -> np.ndarray:
    """The array itself, or evenly spaced elements of one that is too large; half precision comes out as float32."""
    if array.dtype.itemsize == 2:
        array = array.astype(np.float32)
    if array.size <= MAX_ELEMENTS:
        return np.array(array)
    return np.array(array.reshape(-1)[:: -(-array.size // MAX_ELEMENTS)])


def stitched(parts: Iterable[np.ndarray]) -> np.ndarray:
    """[B, ...] from its microbatches: the a-th of A holds rows a::A."""
    parts = list(parts)
    whole = np.empty((sum(map(len, parts)), *parts[0].shape[1:]), parts[0].dtype)
    for index, part in enumerate(parts):
        whole[index :: len(parts)] = part
    return whole


class Trace:
    """The trace of one step, while that step is taken."""

    def __init__(self, backend: Backend, state: State, batch: Batch):
        """To be made just before the step; the state is only read."""
        self._backend = backend
        self._tensors = {name: sample(array) for name, array in backend.trace(state, batch)}
        self._before = {name: sample(array) for name, array in backend.export_arrays(state)}

    def write(self, state: State, path: Path) -> None:
        """Complete it with the state after the step, and write it."""
        after = {name: sample(array) for name, array in self._backend.export_arrays(state)}
        self._tensors |= {f"update.{name}": after[name] - self._before[name] for name in after}
        self._tensors |= {f"parameter.{name}": array for name, array in after.items()}
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            # Through a file object: savez would add a suffix of its own to a temporary name.
            partial = path.with_suffix(".partial")
            with partial.open("wb") as file:
                np.savez(file, **self._tensors)  # type: ignore[arg-type]  # its stubs know only one keyword
            partial.replace(path)


def read_trace(path: Path) -> dict[str, np.ndarray]:
    """Tensors by name, in the order in which they were computed.

    Raises UserError where there is none, or where it is damaged.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except FileNotFoundError:
        raise UserError(f"{path}: no such trace; --trace STEP writes one") from None
    except (ValueError, OSError, EOFError, zipfile.BadZipFile):
        raise UserError(f"{path}: cannot be read as a trace") from None
