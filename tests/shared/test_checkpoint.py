"""A checkpoint is whole or it is not used; which ones are kept; and what a person is told."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shared.checkpoint import Checkpoints
from shared.config.schema import Checkpoint as Rule
from shared.errors import UserError
from shared.manifest import DIGEST, MANIFEST


def begin(directory: Path) -> Callable[[], None]:
    (directory / "part").mkdir()
    (directory / "part" / "state").write_text("numbers")
    return lambda: None


def saved(directory: Path, *steps: int, losses: dict[int, float] | None = None, **rule: Any) -> Checkpoints:
    checkpoints = Checkpoints(directory, Rule(**{"keep": 5, **rule}))
    for step in steps:
        held_out = {"held_out_loss": losses[step]} if losses and step in losses else {}
        checkpoints.save(step, begin, {"backend": "jax", **held_out})
        assert checkpoints.settle() is None
    return checkpoints


def names(directory: Path) -> list[str]:
    return sorted((path.name for path in directory.iterdir()), key=lambda name: (len(name), name))


def notes(checkpoints: Checkpoints) -> tuple[int | None, list[str]]:
    """(step of the checkpoint that would be restored, what was told)."""
    told: list[str] = []
    found = checkpoints.restorable(told.append)
    return (None if found is None else found.step), told


def test_the_newest_is_the_one_of_the_highest_step(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "none", Rule()).latest() is None
    checkpoints = saved(tmp_path, 9, 10, 100)
    latest = checkpoints.latest()
    assert latest is not None and latest.step == 100 and latest.manifest["backend"] == "jax"
    assert (latest.directory / "part" / "state").read_text() == "numbers"
    assert notes(checkpoints) == (100, [])


def test_the_newest_those_of_certain_steps_and_the_best_are_kept(tmp_path: Path) -> None:
    saved(tmp_path / "newest", 1, 2, 3, 4, keep=2)
    assert names(tmp_path / "newest") == ["3", "4"]
    saved(tmp_path / "every", *range(1, 8), keep=1, keep_every=3)
    assert names(tmp_path / "every") == ["3", "6", "7"]
    losses = {1: 3.0, 2: 1.0, 4: 2.0, 5: 4.0}
    saved(tmp_path / "best", *range(1, 8), keep=1, keep_best=2, losses=losses)
    assert names(tmp_path / "best") == ["2", "4", "7"], "step 3 has no loss of its own"


def test_nothing_has_its_name_before_all_of_it_is_written(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1)
    may_end = threading.Event()

    def slow(directory: Path) -> Callable[[], None]:
        begin(directory)
        return lambda: assert_(may_end.wait(30))

    checkpoints.save(2, slow, {})
    assert names(tmp_path) == ["1", ".partial-2"]
    may_end.set()
    assert checkpoints.settle() is None
    assert names(tmp_path) == ["1", "2"]
    assert checkpoints.num_saves == 2


def assert_(claim: bool) -> None:
    assert claim


@pytest.mark.parametrize("late", [False, True])
def test_a_writer_that_fails_leaves_the_one_before_and_says_why(tmp_path: Path, late: bool) -> None:
    checkpoints = saved(tmp_path, 1, keep=1)

    def fail() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def failing(directory: Path) -> Callable[[], None]:
        begin(directory)
        if not late:
            fail()
        return fail

    checkpoints.save(2, failing, {})
    failure = checkpoints.settle()
    assert failure is not None and "2: cannot be written: the disk is full" in str(failure)
    assert "newest checkpoint: step 1" in str(failure)
    assert checkpoints.settle() is None, "it is told once"
    assert names(tmp_path) == ["1"] and notes(checkpoints) == (1, [])


@pytest.mark.parametrize(
    "error",
    [
        ValueError("RESOURCE_EXHAUSTED: Error writing /x/d/0f: [OS error 28: ENOSPC No space left on device]"),
        RuntimeError("rank 1 failed"),
    ],
)
def test_what_a_library_says_becomes_one_line(tmp_path: Path, error: Exception) -> None:
    checkpoints = Checkpoints(tmp_path, Rule())

    def failing(directory: Path) -> Callable[[], None]:
        raise error

    checkpoints.save(2, failing, {})
    expected = "the disk is full" if "space" in str(error) else "rank 1 failed"
    assert expected in str(checkpoints.settle())


def test_a_step_can_be_saved_again(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1)
    checkpoints.save(1, begin, {"try": 2})
    assert checkpoints.settle() is None
    latest = checkpoints.latest()
    assert latest is not None and latest.manifest["try"] == 2
    assert names(tmp_path) == ["1"]


def test_what_a_killed_process_left_half_written_is_cleared_away(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1)
    begin_in = tmp_path / ".partial-2"
    begin_in.mkdir()
    begin(begin_in)
    assert notes(checkpoints) == (1, [])
    assert names(tmp_path) == ["1"]


def damaged(directory: Path, how: str) -> None:
    state, manifest = directory / "part" / "state", directory / MANIFEST
    match how:
        case "truncated":
            state.write_text("number")
        case "flipped":
            state.write_text("numberS")
        case "missing":
            state.unlink()
        case "manifest":
            manifest.write_text(manifest.read_text().replace("jax", "JAX"))
        case "no manifest":
            manifest.unlink()
        case "digest":
            digest = directory / DIGEST
            digest.write_text(digest.read_text().upper())


HOW = ["truncated", "flipped", "missing", "manifest", "no manifest", "digest"]


@pytest.mark.parametrize("how", HOW)
def test_a_damaged_one_is_told_of_put_aside_and_the_one_before_is_used(tmp_path: Path, how: str) -> None:
    checkpoints = saved(tmp_path, 1, 2, 3)
    damaged(tmp_path / "3", how)
    step, told = notes(checkpoints)
    assert step == 2
    assert len(told) == 1 and "the checkpoint of step 3 is damaged" in told[0] and "put aside" in told[0]
    assert names(tmp_path) == ["1", "2", "damaged-3"], "a person may look at it"
    assert notes(checkpoints) == (2, [])


@pytest.mark.parametrize("how", HOW)
def test_where_all_are_damaged_nothing_starts_over_by_itself(tmp_path: Path, how: str) -> None:
    checkpoints = saved(tmp_path, 1, 2)
    for step in ("1", "2"):
        damaged(tmp_path / step, how)
    for _ in range(2):
        with pytest.raises(
            UserError, match=r"no checkpoint is whole; that of step 2: .*remove the directory"
        ) as caught:
            checkpoints.restorable(print)
        assert "\n" not in str(caught.value)
    assert names(tmp_path) == ["1", "2"]


def test_one_of_another_version_is_refused_and_not_taken_for_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 1)
    monkeypatch.setattr("shared.manifest.FORMAT", 99)
    checkpoints = saved(tmp_path, 2)
    monkeypatch.undo()
    for ask in (checkpoints.latest, lambda: checkpoints.restorable(print), lambda: checkpoints.at(2)):
        with pytest.raises(UserError, match=r"2/manifest\.json: has format 99, .*install a newer jaxtrain"):
            ask()
    assert checkpoints.at(1).step == 1


def test_one_is_found_by_its_step(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 10, 20)
    assert checkpoints.at(None).step == 20 and checkpoints.at(10).step == 10
    with pytest.raises(UserError, match="no checkpoint of step 12; the nearest is 10"):
        checkpoints.at(12)
    damaged(tmp_path / "20", "flipped")
    with pytest.raises(UserError, match=r"20: damaged: part/state has another SHA-256.*other checkpoints: 10"):
        checkpoints.at(None)
    with pytest.raises(UserError, match="holds no checkpoint yet"):
        Checkpoints(tmp_path / "none", Rule()).at(None)


def test_sha256sum_reads_the_digest(tmp_path: Path) -> None:
    """A person without this program can check the manifest, and with it each file."""
    import hashlib

    saved(tmp_path, 1)
    stated, name = (tmp_path / "1" / DIGEST).read_text().split()
    assert (name, stated) == (MANIFEST, hashlib.sha256((tmp_path / "1" / MANIFEST).read_bytes()).hexdigest())
