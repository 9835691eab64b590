"""Content hashes follow the content, and files that did not change are not read again."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import pytest

from shared.data import content as subject
from shared.data.content import content_hashes
from shared.errors import UserError


def write(path: Path, text: str, age: float = 100.0) -> Path:
    path.write_text(text)
    os.utime(path, (time.time() - age, time.time() - age))
    return path


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were read, as they are."""
    names: list[str] = []
    original = subject._hash

    def recorded(path: Path) -> str:
        names.append(path.name)
        return original(path)

    monkeypatch.setattr(subject, "_hash", recorded)
    return names


def test_a_hash_is_that_of_the_bytes(tmp_path: Path) -> None:
    files = [write(tmp_path / "a", "one"), write(tmp_path / "b", "two"), write(tmp_path / "c", "one")]
    expected = [hashlib.blake2b(text, digest_size=16).hexdigest() for text in (b"one", b"two", b"one")]
    assert content_hashes(files, tmp_path / "known.json") == expected
    assert content_hashes(files, tmp_path / "known.json") == expected


def test_only_changed_files_are_read_again(tmp_path: Path, read: list[str]) -> None:
    files = [write(tmp_path / "a", "one"), write(tmp_path / "b", "two")]
    before = content_hashes(files, tmp_path / "known.json")
    read.clear()
    assert content_hashes(files, tmp_path / "known.json") == before and read == []
    write(files[1], "owt", age=50)
    after = content_hashes(files, tmp_path / "known.json")
    assert read == ["b"] and after[0] == before[0] and after[1] != before[1]


def test_a_file_that_was_only_just_written_is_not_trusted(tmp_path: Path, read: list[str]) -> None:
    file = write(tmp_path / "a", "one", age=0)
    content_hashes([file], tmp_path / "known.json")
    content_hashes([file], tmp_path / "known.json")
    assert read == ["a", "a"]


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"x": 1}', '{"x": [1]}', "\x00"])
def test_a_damaged_memory_is_forgotten(tmp_path: Path, damage: str) -> None:
    file = write(tmp_path / "a", "one")
    expected = content_hashes([file], tmp_path / "known.json")
    (tmp_path / "known.json").write_text(damage)
    assert content_hashes([file], tmp_path / "known.json") == expected


def test_a_memory_that_cannot_be_written_does_no_harm(tmp_path: Path) -> None:
    file = write(tmp_path / "a", "one")
    assert len(content_hashes([file], file / "in a file" / "known.json")) == 1


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="gone: cannot be read: No such file"):
        content_hashes([tmp_path / "gone"], tmp_path / "known.json")
