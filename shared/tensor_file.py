"""Tensors in safetensors files, written and read one at a time.

The format: eight bytes with the length of a header, the header (JSON: dtype, shape and place of each tensor), the
numbers (https://huggingface.co/docs/safetensors/index#format). The library of that name puts a whole file together in
memory before it writes it, and its NumPy side does not know bfloat16. Here a tensor is made, written block by block
and let go before the next is made, and bfloat16 comes and goes as float32.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from shared.errors import UserError
from shared.run_directory import reason

DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2"}
DTYPES |= {"I8": "<i1", "U8": "<u1", "BOOL": "?"}
"""How NumPy holds what safetensors calls so; bfloat16 as its 16 bits."""

BLOCK_BYTES = 2**20
"""Of a tensor that is not laid out as the file wants it, so many bytes are turned at a time."""

HEADER_BYTES = 100 * 2**20
"""Longest header; the library's limit."""


@dataclass(frozen=True)
class Entry:
    """A tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """As safetensors calls it, such as ``F32`` or ``BF16``."""
    produce: Callable[[], np.ndarray]
    """Makes the array, in that shape; for ``BF16`` one of float32 whose numbers are bfloat16's."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(DTYPES[self.dtype]).itemsize


def write_tensors(path: Path, entries: Iterable[Entry], metadata: Mapping[str, str] | None = None) -> None:
    """Write a file of these tensors, in this order; one of them is in memory at a time.

    Raises OSError where it cannot be written. The caller syncs.
    """
    entries = list(entries)
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for entry in entries:
        start, end = end, end + entry.num_bytes
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # numbers begin at a multiple of eight bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in entries:
            _write(file, entry)


def _write(file: IO[bytes], entry: Entry) -> None:
    array = entry.produce()
    assert array.shape == entry.shape, (entry.name, array.shape, entry.shape)
    for block in _blocks(array):
        file.write(np.ascontiguousarray(_stored(block, entry.dtype)).data)


def _blocks(array: np.ndarray) -> Iterable[np.ndarray]:
    if array.ndim == 0:
        return [array]
    rows = max(1, BLOCK_BYTES // max(1, array[:1].nbytes))
    return (array[start : start + rows] for start in range(0, len(array), rows))


def _stored(block: np.ndarray, dtype: str) -> np.ndarray:
    if dtype != "BF16":
        return block.astype(DTYPES[dtype], copy=False)
    bits = np.ascontiguousarray(block, "<f4").view("<u4")
    assert not (bits & 0xFFFF).any(), "a number that bfloat16 lacks"
    return (bits >> 16).astype("<u2")


class TensorFile:
    """A safetensors file, of which only the tensors that are asked for are read."""

    def __init__(self, path: Path):
        """Raises UserError for a file that is not one, whatever it holds instead."""
        self.path = path
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                size = path.stat().st_size
                if not 2 <= length <= min(HEADER_BYTES, size - 8):
                    raise _Malformed(f"its header would be {length:,} bytes long")
                header = json.loads(file.read(length))
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {reason(error)}") from None
        except (_Malformed, ValueError, RecursionError) as error:
            raise UserError(f"{path}: is not a whole safetensors file: {reason(error)}") from None
        try:
            self._tensors = _checked(header, size - 8 - length)
        except (_Malformed, TypeError, KeyError, ValueError, AttributeError) as error:
            raise UserError(f"{path}: is not a whole safetensors file: {reason(error)}") from None
        self._start = 8 + length
        self.metadata: dict[str, str] = header.get("__metadata__", {})

    @property
    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def dtype(self, name: str) -> str:
        """As safetensors calls it."""
        return self._tensors[name].dtype

    def read(self, name: str) -> np.ndarray:
        """The tensor, in memory of its own; bfloat16 as float32."""
        place = self._tensors[name]
        with self.path.open("rb") as file:
            array = np.fromfile(
                file, DTYPES[place.dtype], math.prod(place.shape), offset=self._start + place.start
            ).reshape(place.shape)
        if place.dtype != "BF16":
            return array
        wide = array.astype("<u4")
        wide <<= 16
        return wide.view("<f4")


@dataclass(frozen=True)
class _Place:
    dtype: str
    shape: tuple[int, ...]
    start: int


class _Malformed(Exception):
    pass


def _checked(header: Any, num_bytes: int) -> dict[str, _Place]:
    """The tensors that a header tells of. They have to fill the file without gaps: what is left over would be a place
    to hide something, and what overlaps a mistake."""
    places: dict[str, _Place] = {}
    expected = 0
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    for name, entry in sorted(tensors.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if dtype not in DTYPES:
            raise _Malformed(f"{name} has the dtype {dtype}; those that are read: {', '.join(DTYPES)}")
        if not all(type(length) is int and length >= 0 for length in shape):
            raise _Malformed(f"{name} has the shape {list(shape)}")
        if start != expected or end - start != math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize:
            raise _Malformed(f"{name} does not lie where its dtype and shape say")
        places[name] = _Place(dtype, shape, start)
        expected = end
    if expected != num_bytes:
        raise _Malformed(f"its tensors take {expected:,} bytes, and it has {num_bytes:,}")
    return {name: places[name] for name in tensors}
