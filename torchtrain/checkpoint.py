"""A train state on disk, written by ``torch.distributed.checkpoint`` while training goes on.

Its usual files are pickles, which can run code when they are read. Here it writes safetensors, one file for each
process, whose headers say which part of each tensor they hold.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save

from shared import weights
from shared.models.spec import Parameter, Piece
from shared.tensor_file import TensorFile
from torchtrain.weights import parameter_name

NAME = "dcp"

FILE_BYTES = 2**30
"""Tensors of about so many bytes share a file: it is put together in memory before it is written."""

# It warns where it runs without a process group: there one process is all there is.
warnings.filterwarnings("ignore", "torch.distributed is disabled", module="torch.distributed.checkpoint")


def save(tensors: dict[str, torch.Tensor], directory: Path, group: dist.ProcessGroup | None) -> Callable[[], None]:
    """Start to write the tensors into ``directory``; returns when they may change. What is returned waits for the rest
    and raises what went wrong. ``group``: all processes, in a group that nothing else uses; None for one process."""
    files: dict[str, int] = {}
    size = 0
    for name, tensor in tensors.items():
        files[name] = 1 + size // FILE_BYTES
        size += tensor.nbytes
    writer = HuggingFaceStorageWriter(str(directory / NAME), files, save_distributed=True)
    written = async_save({**tensors}, storage_writer=writer, process_group=group, no_dist=group is None)
    assert not isinstance(written, AsyncSaveResponse), "only a stager of one's own gives two futures"

    def wait() -> None:
        try:
            written.result()
        except CheckpointException as error:  # no Exception, and it hides what went wrong in which process
            raise next(iter(error.failures.values()))[0] from None

    return wait


def restore(tensors: dict[str, torch.Tensor], directory: Path) -> None:
    """Fill the tensors, in place, from what ``save`` wrote, on any number of processes."""
    load({**tensors}, storage_reader=HuggingFaceStorageReader(str(directory / NAME)), no_dist=True)


class StoredState:
    """A state that :func:`save` wrote, as a :class:`shared.backend.StateSource`.

    Its files are read here and not by DCP, which holds a tensor twice while it does.
    """

    def __init__(self, directory: Path):
        self._shards: dict[str, list[_Shard]] = {}
        for path in sorted((directory / NAME).glob("*.safetensors")):
            file = TensorFile(path)
            places = json.loads(file.metadata[CUSTOM_METADATA_KEY])
            for name in file.names:
                shard = _Shard(file, tuple(places[name][SAVED_OFFSETS_KEY]))
                self._shards.setdefault(name, []).append(shard)
        self.roles = tuple(dict.fromkeys(name.partition(".")[0] for name in self._shards if "." in name))
        self.num_updates = int(self._read("num_updates"))
        self.loss_scale: tuple[float, int] | None = None
        if "loss_scale" in self._shards:
            self.loss_scale = float(self._read("loss_scale")), int(self._read("good_updates"))

    def dtype(self, role: str) -> str:
        name, shards = next(item for item in self._shards.items() if item[0].startswith(f"{role}."))
        return shards[0].file.dtype(name)

    def read(self, role: str, parameter: Parameter) -> np.ndarray:
        def read(piece: Piece) -> np.ndarray:
            array = self._read(f"{role}.{parameter_name(piece)}")
            return array.T if piece.slot.endswith(".kernel") else array

        return weights.join(parameter, read)

    def _read(self, name: str) -> np.ndarray:
        """The whole tensor from its parts, of which there is one where it was not sharded."""
        shards = self._shards[name]
        if len(shards) == 1:
            return shards[0].file.read(name)
        ends = [np.add(shard.offsets, shard.file.shape(name)) for shard in shards]
        whole: np.ndarray | None = None
        for shard, end in zip(shards, ends, strict=True):
            part = shard.file.read(name)
            if whole is None:
                whole = np.empty(np.max(ends, axis=0), part.dtype)
            whole[tuple(map(slice, shard.offsets, end))] = part
        assert whole is not None
        return whole


@dataclass(frozen=True)
class _Shard:
    """A file that has a part of a tensor, and where the part begins."""

    file: TensorFile
    offsets: tuple[int, ...]
