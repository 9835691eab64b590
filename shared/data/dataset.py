"""Training data, from the config's ``data`` section to batches.

Batch k of a run is a pure function of the recipe: with n rows in the training split and B in a batch, an epoch has
n // B steps; step k belongs to epoch k // (n // B), in which the rows come in the order of a permutation drawn for
that epoch (:mod:`shared.data.order`). The n % B rows at the end of each order are left out, others in each epoch.
Nothing is remembered from batch to batch: a run resumes anywhere, and each of several processes reads its own rows.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from shared.batch import Batch
from shared.config.schema import Config
from shared.data import cache, preparation
from shared.data.content import content_hashes, stamp_of
from shared.data.order import Order
from shared.data.preparation_progress import shown_progress
from shared.data.rows import Rows
from shared.data.sources import Source, open_source
from shared.data.tokenizers import Tokenizer, open_tokenizer
from shared.errors import UserError


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def open_data(config: Config, *, report: Callable[[str], None] = _to_stderr) -> Data:
    """The data of a run; tokenised now if it never was.

    report: takes lines that tell a person what is going on. Raises UserError for everything that is the user's to
    mend: files, tokenizer, sizes.
    """
    tokenizer = open_tokenizer(config.data.tokenizer)
    if config.model.vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"model.vocab_size ({config.model.vocab_size}) is smaller than the vocabulary of data.tokenizer "
            f"({tokenizer.vocab_size}); use {tokenizer.vocab_size} or more"
        )
    cache_dir = Path(os.path.expanduser(config.data.cache_dir))
    try:
        found = _obtain(config, open_source(config.data.source), tokenizer, cache_dir, report)
        return Data(config, found, tokenizer)
    except OSError as error:
        raise UserError(f"data.cache_dir: cannot keep data in {cache_dir}: {error.strerror or error}") from None


def _obtain(
    config: Config, source: Source, tokenizer: Tokenizer, cache_dir: Path, report: Callable[[str], None]
) -> cache.Cache:
    before = [stamp_of(path) for path in source.files]
    hashes = content_hashes(source.files, cache_dir / "content_hashes.json")
    origin = [cache.FORMAT, source.identity, hashes, tokenizer.identity, config.data.held_out_fraction]
    key = hashlib.sha256(json.dumps(origin).encode()).hexdigest()[:16]

    def prepare(folder: Path) -> dict[str, Any]:
        with shown_progress("preparing data", report) as progress:
            manifest = preparation.prepare(folder, source, tokenizer, config.data.held_out_fraction, progress, report)
        for path, stamp in zip(source.files, before, strict=True):
            if stamp_of(path) != stamp:
                raise UserError(f"{path}: changed while it was read; run again when it is complete")
        _check_split(manifest, config.data.held_out_fraction)
        return manifest

    return cache.obtain(cache_dir, key, prepare, report)


def _check_split(manifest: dict[str, Any], fraction: float) -> None:
    num_train, num_held_out = manifest["train"]["documents"], manifest["held_out"]["documents"]
    num_documents = num_train + num_held_out
    if not num_documents:
        raise UserError("data.source: holds no text: every document is empty")
    if not num_train:
        raise UserError(
            f"data.held_out_fraction ({fraction}) leaves none of the {num_documents} documents to train on; "
            "lower it, or give more documents"
        )
    if fraction and not num_held_out:
        raise UserError(
            f"data.held_out_fraction ({fraction}) holds out none of the {num_documents} documents; raise it, give more "
            "documents, or set it to 0 for no held-out loss"
        )


class Data:
    """The rows of one run, as batches; made by :func:`open_data`."""

    def __init__(self, config: Config, found: cache.Cache, tokenizer: Tokenizer) -> None:
        manifest = found.manifest
        length = config.batch.sequence_length
        self.global_batch = config.batch.global_batch
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size
        self.fingerprint = hashlib.sha256(
            json.dumps([cache.FORMAT, manifest["content"], tokenizer.identity]).encode()
        ).hexdigest()[:16]
        """16 hex digits; equal when the documents and their tokens are, wherever they came from."""

        self._train, self._held_out = (
            Rows(found.tokens(split), found.offsets(split), config.data.packing, length, tokenizer.end_of_text)
            for split in cache.SPLITS
        )
        self.num_rows = self._train.num_rows
        """Rows of the training split."""
        self.held_out_rows = self._held_out.num_rows
        """Rows of the held-out split; 0 when ``data.held_out_fraction`` is."""
        self.steps_per_epoch = self.num_rows // self.global_batch
        _check_rows(config, manifest, self.num_rows, self.held_out_rows)

        measured, split = (self._held_out, "held_out") if self.held_out_rows else (self._train, "train")
        self.bytes_per_token: float = manifest[split]["bytes"] / measured.num_targets
        """UTF-8 bytes of text for each target token of the held-out split (of the training split when nothing is held
        out): a loss in nats a token, divided by it, is one in nats a byte, which no tokenizer can flatter."""

        self._order = Order(self.num_rows, config.seed)
        # One order for all seeds, so that the first rows of it are a fair sample, and the same one in every run.
        self._held_out_order = Order(self.held_out_rows, seed=0)

    def batch(self, step: int, process: int = 0, processes: int = 1) -> Batch:
        """The rows of global batch ``step`` (from 0) that belong to ``process``, in order: B / processes of them."""
        if self.global_batch % processes:
            raise UserError(
                f"batch.global_batch ({self.global_batch}) must be a multiple of the number of processes ({processes})"
            )
        assert step >= 0 and 0 <= process < processes
        share = self.global_batch // processes
        epoch, step_of_epoch = divmod(step, self.steps_per_epoch)
        start = step_of_epoch * self.global_batch + process * share
        return self._train.gather(self._order.rows(epoch, start, start + share))

    def described_rows(self, step: int) -> list[dict[str, Any]]:
        """The rows of global batch ``step`` for a person: ``row``, its number in the training split, and ``text``."""
        epoch, step_of_epoch = divmod(step, self.steps_per_epoch)
        start = step_of_epoch * self.global_batch
        rows = self._order.rows(epoch, start, start + self.global_batch)
        texts = (self.tokenizer.decode(tokens) for tokens in self._train.gather(rows).tokens)
        return [{"row": int(row), "text": text} for row, text in zip(rows, texts, strict=True)]

    def held_out_batches(self, max_rows: int | None = None) -> Iterator[Batch]:
        """The first ``max_rows`` (or all) held-out rows of an order that never changes, in batches of the global size.
        Rows of the last batch beyond the end are wholly masked."""
        if max_rows is not None and max_rows <= 0:
            raise UserError(f"evaluation.max_rows ({max_rows}) must be above 0")
        num_rows = self.held_out_rows if max_rows is None else min(max_rows, self.held_out_rows)
        for start in range(0, num_rows, self.global_batch):
            rows = self._held_out_order.rows(0, start, min(start + self.global_batch, num_rows))
            batch = self._held_out.gather(np.resize(rows, self.global_batch))
            yield batch if len(rows) == self.global_batch else _masked_after(batch, len(rows))


def _masked_after(batch: Batch, num_rows: int) -> Batch:
    batch.mask[num_rows:] = False
    batch.targets[num_rows:] = 0
    return batch


def _check_rows(config: Config, manifest: dict[str, Any], num_rows: int, held_out_rows: int) -> None:
    length, global_batch = config.batch.sequence_length, config.batch.global_batch
    if num_rows < global_batch:
        raise UserError(
            f"batch.global_batch ({global_batch}) is more than the {num_rows} rows of {length} tokens that the "
            f"training text gives ({manifest['train']['tokens']:,} tokens in {manifest['train']['documents']:,} "
            "documents); lower it or batch.sequence_length, or give more text"
        )
    if config.data.held_out_fraction and not held_out_rows:
        raise UserError(
            f"batch.sequence_length ({length}) is too long for the held-out text: {manifest['held_out']['tokens']:,} "
            f"tokens in {manifest['held_out']['documents']:,} documents, not one row; raise data.held_out_fraction "
            f"({config.data.held_out_fraction}), give more text, or lower batch.sequence_length"
        )
