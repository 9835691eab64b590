"""The cache is made once and whole, whatever happens to the processes that make it.

The processes here are real ones, stopped by SIGKILL, which no ``finally`` survives.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shared.config.schema import Config
from shared.data import cache, open_data

REPOSITORY = Path(__file__).parents[3]

CHILD = """
import os, signal, sys, time
from pathlib import Path
from shared.config.schema import Config
from shared.data import cache, open_data, preparation, sources

def say(line):
    print(line, flush=True)

def die(*arguments, **options):
    os.kill(os.getpid(), signal.SIGKILL)

preparation.GROUP_DOCUMENTS = 10
original = sources.Text.documents

def documents(self):
    say("preparing")
    for number, document in enumerate(original(self)):
        yield document
        BEHAVIOUR

sources.Text.documents = documents
EXTRA
data = open_data(Config.model_validate_json(sys.stdin.read()), report=say)
say(f"done {data.fingerprint} {data.batch(0).fingerprint()}")
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(make_config: Callable[..., Config]) -> Iterator[Start]:
    """Starts a process that opens the data; ``each_document`` and ``first`` are statements that it executes."""
    processes: list[subprocess.Popen[str]] = []

    def start(each_document: str = "pass", first: str = "") -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD.replace("BEHAVIOUR", each_document).replace("EXTRA", first)],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        assert process.stdin is not None
        process.stdin.write(make_config().model_dump_json())
        process.stdin.close()
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()


def read_until(process: subprocess.Popen[str], text: str) -> list[str]:
    """Lines of the process's output up to one that contains the text."""
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line.strip())
        if text in line:
            return lines
    raise AssertionError(f"no '{text}' in {lines}")


def what_a_fresh_cache_gives(make_config: Callable[..., Config], tmp_path: Path) -> str:
    data = open_data(make_config(cache_dir=str(tmp_path / "fresh")), report=lambda line: None)
    return f"done {data.fingerprint} {data.batch(0).fingerprint()}"


def leftovers(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "cache").glob("*.partial.*")]


def finished(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "cache").iterdir() if path.is_dir() and ".partial." not in path.name]


def test_of_two_processes_one_prepares_and_the_other_waits(
    start: Start, make_config: Callable[..., Config], tmp_path: Path
) -> None:
    go = tmp_path / "go"
    first = start(each_document=f"while not Path({str(go)!r}).exists(): time.sleep(0.01)")
    read_until(first, "preparing")
    second = start()
    assert read_until(second, "waiting") == ["another process is preparing this data; waiting for it"]
    go.touch()
    lines = read_until(second, "done")
    assert "preparing" not in lines
    assert lines[-1] == read_until(first, "done")[-1] == what_a_fresh_cache_gives(make_config, tmp_path)


def test_processes_that_start_at_once_agree(start: Start, tmp_path: Path) -> None:
    outputs = [read_until(process, "done") for process in [start(each_document="time.sleep(0.002)") for _ in range(3)]]
    assert len({output[-1] for output in outputs}) == 1
    assert sum("preparing" in output for output in outputs) == 1
    assert len(finished(tmp_path)) == 1 and not leftovers(tmp_path)


@pytest.mark.parametrize(
    ("each_document", "first"),
    [
        ("number == 57 and die()", ""),
        ("pass", "preparation._Split.close = die"),
        ("pass", "Path.rename = die"),
    ],
    ids=["among the documents", "before the offsets are written", "before the folder gets its name"],
)
def test_a_killed_preparation_leaves_nothing_that_is_used(
    each_document: str, first: str, start: Start, make_config: Callable[..., Config], tmp_path: Path
) -> None:
    process = start(each_document, first)
    assert process.wait(timeout=60) == -signal.SIGKILL
    assert len(leftovers(tmp_path)) == 1 and not finished(tmp_path)  # it was at work and had not finished
    lines = read_until(start(), "done")
    assert "preparing" in lines
    assert lines[-1] == what_a_fresh_cache_gives(make_config, tmp_path)
    assert len(finished(tmp_path)) == 1 and not leftovers(tmp_path)


def test_who_waits_for_a_process_that_is_killed_takes_over(start: Start, tmp_path: Path) -> None:
    first = start(each_document="number == 30 and (say('half-way'), signal.pause())")
    read_until(first, "half-way")
    second = start()
    read_until(second, "waiting")
    first.kill()
    assert "preparing" in read_until(second, "done")
    assert len(finished(tmp_path)) == 1 and not leftovers(tmp_path)


def test_a_second_start_finds_the_cache(make_config: Callable[..., Config], tmp_path: Path) -> None:
    lines: list[str] = []
    first = open_data(make_config(), report=lines.append)
    assert any(line.startswith("prepared ") for line in lines)
    lines.clear()
    again = open_data(make_config(), report=lines.append)
    assert lines == []
    assert again.batch(3).fingerprint() == first.batch(3).fingerprint()


def damaged_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("{")


def shortened_tokens(folder: Path) -> None:
    with (folder / "train.bin").open("r+b") as file:
        file.truncate(100)


def empty_offsets(folder: Path) -> None:
    (folder / "held_out.offsets.npy").write_bytes(b"")


def missing_tokens(folder: Path) -> None:
    (folder / "held_out.bin").unlink()


@pytest.mark.parametrize("damage", [damaged_manifest, shortened_tokens, empty_offsets, missing_tokens])
def test_a_damaged_cache_is_made_again(
    damage: Callable[[Path], None], make_config: Callable[..., Config], tmp_path: Path
) -> None:
    expected = open_data(make_config(), report=lambda line: None).batch(0).fingerprint()
    damage(finished(tmp_path)[0])
    lines: list[str] = []
    assert open_data(make_config(), report=lines.append).batch(0).fingerprint() == expected
    assert "is damaged; preparing it again" in lines[0]


def test_the_manifest_counts_what_is_there(
    make_config: Callable[..., Config], tmp_path: Path, texts: list[str]
) -> None:
    open_data(make_config(), report=lambda line: None)
    folder = finished(tmp_path)[0]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert sum(manifest[split]["documents"] for split in cache.SPLITS) == len(texts)
    assert sum(manifest[split]["bytes"] for split in cache.SPLITS) == sum(len(text.encode()) for text in texts)
    for split in cache.SPLITS:
        assert (folder / f"{split}.bin").stat().st_size == 2 * manifest[split]["tokens"]
        assert manifest[split]["tokens"] == manifest[split]["bytes"] + manifest[split]["documents"]


def test_another_machine_may_finish_first(tmp_path: Path) -> None:
    """Where a network's file system does not carry locks, two machines may prepare at once: the later one uses what
    the earlier one made."""

    def prepare(folder: Path, by: str) -> dict[str, object]:
        if by == "us":
            other_dir = tmp_path / "elsewhere"
            cache.obtain(other_dir, "key", lambda other: prepare(other, "them"), report=print)
            (other_dir / "key").rename(tmp_path / "cache" / "key")
        for split in cache.SPLITS:
            (folder / f"{split}.bin").write_bytes(b"")
            cache.np.save(folder / f"{split}.offsets.npy", cache.np.zeros(1, cache.np.int64))
        empty = {"documents": 0, "tokens": 0, "bytes": 0}
        return {"format": cache.FORMAT, "dtype": "<u2", "train": empty, "held_out": empty, "by": by}

    found = cache.obtain(tmp_path / "cache", "key", lambda folder: prepare(folder, "us"), report=print)
    assert found.manifest["by"] == "them"
    assert not leftovers(tmp_path)


def test_leftovers_of_others_are_kept_for_a_day(make_config: Callable[..., Config], tmp_path: Path) -> None:
    silent, writing = tmp_path / "cache" / "a.partial.elsewhere.1", tmp_path / "cache" / "b.partial.elsewhere.2"
    two_days_ago = time.time() - 2 * 24 * 3600
    for folder in (silent, writing):
        folder.mkdir(parents=True)
        (folder / "train.bin").write_bytes(b"1")
        os.utime(folder, (two_days_ago, two_days_ago))
    os.utime(silent / "train.bin", (two_days_ago, two_days_ago))
    open_data(make_config(), report=lambda line: None)
    assert leftovers(tmp_path) == [writing.name]


def test_the_cache_is_readable_by_whoever_the_umask_lets_read(
    make_config: Callable[..., Config], tmp_path: Path
) -> None:
    before = os.umask(0o027)
    try:
        open_data(make_config(), report=lambda line: None)
    finally:
        os.umask(before)
    assert finished(tmp_path)[0].stat().st_mode & 0o777 == 0o750
