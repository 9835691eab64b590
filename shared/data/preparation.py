"""Preparation: documents are tokenised once, split in two, and written to files that rows are read from.

Everything streams: documents are read, tokenised and written in groups of a few megabytes, so the corpus may be larger
than memory. Which split a document belongs to depends on nothing but its text, so it stays there when documents are
added, when the seed changes and on any machine; and copies of one document never lie on both sides.
"""

from __future__ import annotations

import hashlib
import os
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from shared.data.cache import FORMAT, SPLITS
from shared.data.sources import Document, Source
from shared.data.tokenizers import Tokenizer
from shared.errors import UserError

GROUP_CHARACTERS = 4_000_000
GROUP_DOCUMENTS = 4096


def prepare(
    folder: Path,
    source: Source,
    tokenizer: Tokenizer,
    held_out_fraction: float,
    progress: Callable[[float], None],
    report: Callable[[str], None],
) -> dict[str, Any]:
    """Writes both splits to ``folder`` and returns the manifest (see :mod:`shared.data.cache`).

    Raises UserError naming the document for text or token ids that cannot be stored.
    """
    started = time.perf_counter()
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")
    content = hashlib.blake2b(digest_size=16)
    num_empty = num_quoting = 0
    splits = {name: _Split(folder, name, dtype) for name in SPLITS}
    for group in _groups(source.documents()):
        encoded = [_utf8(document) for document in group]
        for document, text, ids in zip(group, encoded, tokenizer.encode_batch([d.text for d in group]), strict=True):
            if not len(ids):  # no text, or none that the tokenizer keeps
                num_empty += 1
                continue
            _validate(document, ids, tokenizer)
            num_quoting += tokenizer.end_of_text_string is not None and tokenizer.end_of_text_string in document.text
            digest = hashlib.blake2b(text, digest_size=32).digest()
            content.update(digest)
            held_out = int.from_bytes(digest[:8], "big") / 2**64 < held_out_fraction
            splits["held_out" if held_out else "train"].append(ids, tokenizer.end_of_text, num_bytes=len(text))
        progress(group[-1].done)
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "content": content.hexdigest(),
        "source": source.identity,
        "tokenizer": tokenizer.identity,
        "dtype": dtype.str,
        "held_out_fraction": held_out_fraction,
        "empty_documents": num_empty,
    }
    for name, split in splits.items():
        manifest[name] = split.close()
    num_tokens = sum(manifest[name]["tokens"] for name in SPLITS)
    report(
        f"prepared {num_tokens:,} tokens in {time.perf_counter() - started:.1f} s; documents: "
        f"{manifest['train']['documents']:,} to train on, {manifest['held_out']['documents']:,} held out"
    )
    if num_empty:
        report(f"empty documents, left out: {num_empty:,}")
    if num_quoting:
        report(f"documents that contain '{tokenizer.end_of_text_string}', read as plain text: {num_quoting:,}")
    return manifest


class _Split:
    """Writes one split."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype) -> None:
        self._tokens = (folder / f"{name}.bin").open("wb")
        self._offsets_path = folder / f"{name}.offsets.npy"
        self._offsets = array("q", [0])
        self._dtype = dtype
        self._num_bytes = 0

    def append(self, ids: np.ndarray, end_of_text: int, num_bytes: int) -> None:
        stored = np.empty(len(ids) + 1, self._dtype)
        stored[:-1] = ids
        stored[-1] = end_of_text
        self._tokens.write(stored.data)
        self._offsets.append(self._offsets[-1] + len(stored))
        self._num_bytes += num_bytes

    def close(self) -> dict[str, int]:
        with self._offsets_path.open("wb") as file:
            np.save(file, np.array(self._offsets, "<i8"))
            _sync(file)
        _sync(self._tokens)
        self._tokens.close()
        return {"documents": len(self._offsets) - 1, "tokens": self._offsets[-1], "bytes": self._num_bytes}


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _groups(documents: Iterable[Document]) -> Iterator[list[Document]]:
    group: list[Document] = []
    size = 0
    for document in documents:
        group.append(document)
        size += len(document.text)
        if size >= GROUP_CHARACTERS or len(group) >= GROUP_DOCUMENTS:
            yield group
            group, size = [], 0
    if group:
        yield group


def _utf8(document: Document) -> bytes:
    try:
        return document.text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{document.name}: character {error.start} is half of a surrogate pair "
            f"(\\u{ord(document.text[error.start]):04x}), which is no text"
        ) from None


def _validate(document: Document, ids: np.ndarray, tokenizer: Tokenizer) -> None:
    outside = np.flatnonzero(ids >= tokenizer.vocab_size)
    if outside.size:
        position = int(outside[0])
        raise UserError(
            f"{document.name}: token {ids[position]} at position {position} is outside the tokenizer's vocabulary "
            f"of {tokenizer.vocab_size}"
        )
    closing = np.flatnonzero(ids == tokenizer.end_of_text)
    if closing.size:
        raise UserError(
            f"{document.name}: the text itself gives the end-of-text token '{tokenizer.end_of_text_string}' at "
            f"position {int(closing[0])}; data.tokenizer.end_of_text must be a token that no text gives"
        )
