"""Tensor files: what the safetensors library makes of ours, what we make of its, and of what is no such file."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file as save_numpy
from safetensors.torch import load_file, save_file

from shared.errors import UserError
from shared.tensor_file import DTYPES, Entry, TensorFile, write_tensors


def entries(arrays: dict[str, tuple[str, np.ndarray]]) -> list[Entry]:
    return [Entry(name, array.shape, dtype, lambda array=array: array) for name, (dtype, array) in arrays.items()]


def some_array(dtype: str) -> np.ndarray:
    """Numbers that the dtype has exactly, for ``BF16`` as float32."""
    numbers = np.random.default_rng(0).integers(0, 2, (5, 7)) if dtype == "BOOL" else np.arange(35).reshape(5, 7)
    return numbers.astype("<f4" if dtype == "BF16" else DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_library_reads_what_is_written_here(tmp_path: Path, dtype: str) -> None:
    array = some_array(dtype)
    write_tensors(tmp_path / "x", entries({"a": (dtype, array), "b": (dtype, array.T), "c": (dtype, array[0, 1])}))
    found = load_file(tmp_path / "x")
    assert list(found) == ["a", "b", "c"]
    for tensor, expected in zip(found.values(), (array, array.T, array[0, 1]), strict=True):
        assert torch.equal(tensor.to(torch.float64), torch.tensor(np.array(expected, np.float64)))
    assert found["a"].dtype == {"BF16": torch.bfloat16}.get(dtype, torch.from_numpy(array).dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_the_library_writes_is_read_here(tmp_path: Path, dtype: str) -> None:
    array = some_array(dtype)
    tensors = {"a": torch.from_numpy(array), "empty": torch.zeros(0, 3), "scalar": torch.tensor(2.5)}
    if dtype == "BF16":
        tensors["a"] = tensors["a"].bfloat16()
    save_file(tensors, tmp_path / "x", metadata={"format": "pt"})
    file = TensorFile(tmp_path / "x")
    assert set(file.names) == set(tensors)
    assert (file.dtype("a"), file.shape("a")) == (dtype, (5, 7))
    assert np.array_equal(file.read("a"), array) and file.read("a").dtype == array.dtype
    assert file.read("empty").shape == (0, 3) and file.read("scalar") == 2.5


def test_a_number_that_bfloat16_lacks_is_not_rounded_away(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="bfloat16 lacks"):
        write_tensors(tmp_path / "x", entries({"a": ("BF16", np.float32([1.0, 1.001]))}))


def test_one_tensor_at_a_time_is_in_memory(tmp_path: Path) -> None:
    """Also where it has to be turned; 10% is room for a block, and for what Python needs."""
    largest = 64 * 2**20

    def produce() -> np.ndarray:
        return np.ones((4096, 4096), np.float32).T

    def peak(work: Any) -> int:
        tracemalloc.start()
        work()
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    made = [Entry(f"tensor {n}", (4096, 4096), "F32", produce) for n in range(3)]
    assert peak(lambda: write_tensors(tmp_path / "x", made)) < 1.1 * largest
    file = TensorFile(tmp_path / "x")

    def read_all() -> None:
        for name in file.names:
            assert file.read(name)[5, 6] == 1

    assert peak(read_all) < 1.1 * largest


def header_of(entries: dict[str, Any], rest: bytes = b"") -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + rest


def tensor(start: int = 0, end: int = 8, dtype: str = "F32", shape: Any = (2,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "0 bytes long"),
        (b"\x80\x04", "header would be"),  # a pickle
        (bytes([0] * 7 + [16]) + b"{}", "header would be 1,152,921,504,606,846,976 bytes"),
        (header_of({"a": tensor()}), "8 bytes, and it has 0"),
        (header_of({"a": tensor()}, bytes(9)), "8 bytes, and it has 9"),
        (header_of({"a": tensor(), "b": tensor()}, bytes(8)), "b does not lie where"),
        (header_of({"a": tensor(), "b": tensor(12, 20)}, bytes(20)), "b does not lie where"),
        (header_of({"a": tensor(shape=(-1, -2))}, bytes(8)), "the shape [-1, -2]"),
        (header_of({"a": tensor(shape=(1 << 62, 1 << 62))}, bytes(8)), "a does not lie where"),
        (header_of({"a": tensor(dtype="F8_E4M3")}, bytes(8)), "a has the dtype F8_E4M3; those that are read: F64"),
        (header_of({"a": {}}, bytes(8)), "data_offsets"),
        (header_of({"a": 5}), "not"),
        (header_of({"a": tensor(shape=5)}, bytes(8)), "not iterable"),
        (b"\x04\0\0\0\0\0\0\0[[[[", "safetensors"),
        (b"\x02\0\0\0\0\0\0\0[]", "safetensors"),
    ],
)
def test_what_is_no_whole_file_is_one_line_that_names_it(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        TensorFile(path)
    assert str(caught.value).startswith(f"{path}: is not a whole safetensors file: ")
    assert complaint in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_cut_off_anywhere_is_found_out(tmp_path: Path) -> None:
    path = tmp_path / "x"
    save_numpy({"a": np.arange(12, dtype=np.float32), "b": np.ones((3, 2), np.int64)}, path)
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(UserError):
            TensorFile(path)
