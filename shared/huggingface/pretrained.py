"""The weights of a Hugging Face checkpoint: read as a state to begin with, and written."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from shared.backend import StateSource
from shared.config.schema import GPT2, Config, FileTokenizer, RotaryDecoder
from shared.data.tokenizers import open_tokenizer
from shared.errors import UserError
from shared.huggingface.settings import model_section, read_settings, settings_of
from shared.manifest import filling
from shared.models import ModelSpec, Parameter
from shared.tensor_file import Entry, TensorFile, write_tensors

SHARD_BYTES = 5 * 10**9
"""Size at which the weights are split over several files, as Hugging Face's libraries do."""

INDEX = "model.safetensors.index.json"

_IGNORED = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
"""Ends of names that older versions of transformers saved beside the weights: masks and tables."""

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class Pretrained:
    """The weights in a folder; a :class:`shared.backend.StateSource` of parameters alone."""

    roles = ("parameters",)
    num_updates = 0
    loss_scale = None

    def __init__(self, folder: Path, model: RotaryDecoder | GPT2, spec: ModelSpec):
        """Raises UserError for what is not a checkpoint of this model."""
        self._require_same_model(folder, model)
        self._files = {name: file for file in _files(folder) for name in file.names}
        self._names = {parameter.name: self._find(folder, parameter) for parameter in spec.parameters}
        known = {*self._names.values(), "lm_head.weight"} if spec.tied else set(self._names.values())
        for name in self._files.keys() - known:
            if not name.endswith(_IGNORED):
                raise UserError(f"{folder}: has a tensor {name}, which a {spec.family} of this recipe has not")

    @staticmethod
    def _require_same_model(folder: Path, model: RotaryDecoder | GPT2) -> None:
        where = str(folder / "config.json")
        theirs = model_section(read_settings(folder), where)
        ours = model.model_dump() | ({"head_dim": model.width_of_head} if isinstance(model, RotaryDecoder) else {})
        if theirs["family"] != model.family:
            raise UserError(f"model.family is {model.family}, and {where} describes a {theirs['family']}")
        # How the first weights were drawn does not matter to weights that are there.
        for key in sorted(theirs.keys() - {"family", "initializer_range"}):
            if ours[key] != theirs[key]:
                raise UserError(
                    f"model.{key} is {ours[key]}, and {where} says {theirs[key]}; the section that belongs to it: "
                    f"python -m shared.huggingface {folder}"
                )

    def _find(self, folder: Path, parameter: Parameter) -> str:
        # The base model of GPT-2, without its head, was saved without the prefix.
        for name in (parameter.name, parameter.name.removeprefix("transformer.")):
            if name in self._files:
                found = self._files[name].shape(name)
                if found != parameter.shape:
                    raise UserError(
                        f"{folder}: {name} has the shape {list(found)}, and the recipe's has {list(parameter.shape)}"
                    )
                return name
        raise UserError(f"{folder}: has no tensor {parameter.name}")

    def dtype(self, role: str) -> str:
        name, file = next(iter(self._files.items()))
        return file.dtype(name)

    def read(self, role: str, parameter: Parameter) -> np.ndarray:
        name = self._names[parameter.name]
        return self._files[name].read(name)


def _files(folder: Path) -> list[TensorFile]:
    """The safetensors files of a folder, as its index names them."""
    whole, index = folder / "model.safetensors", folder / INDEX
    if whole.exists():
        return [TensorFile(whole)]
    if not index.exists():
        pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        why = f"{pickles[0]} is a pickle, which could run code when it is read; " if pickles else ""
        raise UserError(
            f"{folder}: has neither model.safetensors nor {INDEX}; {why}save it with safe_serialization=True"
        )
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        # A name from a file must not lead out of the folder.
        return [TensorFile(folder / Path(name).name) for name in names]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index}: is not an index of safetensors files: {error}") from None


def write_pretrained(
    folder: Path, config: Config, spec: ModelSpec, source: StateSource, role: str, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write the arrays of a role as a checkpoint that ``transformers`` loads, tensor by tensor.

    A ``tokenizer.json`` that the recipe reads goes with it. Raises UserError where it cannot be written.
    """
    dtype = source.dtype(role)
    entries = [Entry(p.name, p.shape, dtype, partial(source.read, role, p)) for p in spec.parameters]
    shards: list[list[Entry]] = [[]]
    for entry in entries:
        if shards[-1] and sum(other.num_bytes for other in shards[-1]) + entry.num_bytes > shard_bytes:
            shards.append([])
        shards[-1].append(entry)
    tokenizer = config.data.tokenizer
    end_of_text = open_tokenizer(tokenizer).end_of_text
    with filling(folder) as draft:
        settings = settings_of(config.model, _DTYPES[dtype], config.batch.sequence_length, end_of_text)
        _write_json(draft / "config.json", settings)
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(shards, start=1):
            several = f"model-{number:05}-of-{len(shards):05}.safetensors"
            name = "model.safetensors" if len(shards) == 1 else several
            write_tensors(draft / name, shard, {"format": "pt"})
            weight_map |= {entry.name: name for entry in shard}
        if len(shards) > 1:
            total = sum(entry.num_bytes for entry in entries)
            _write_json(draft / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        if isinstance(tokenizer, FileTokenizer):
            shutil.copyfile(Path(tokenizer.path).expanduser(), draft / "tokenizer.json")
            _write_json(
                draft / "tokenizer_config.json",
                {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.end_of_text},
            )


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
