"""A checkpoint is whole or it is not there."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from shared.checkpoint import Checkpoints
from shared.errors import UserError


def write_state(directory: Path) -> None:
    (directory / "state").write_text("numbers")


def test_the_latest_is_the_one_of_the_highest_step(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=5)
    assert checkpoints.latest() is None
    for step in (9, 10, 100):
        checkpoints.save(step, write_state, {"backend": "jax"})
    latest = checkpoints.latest()
    assert latest is not None and latest.step == 100
    assert latest.manifest["backend"] == "jax"
    assert (latest.directory / "state").read_text() == "numbers"


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3, 4):
        checkpoints.save(step, write_state, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4"]


def test_a_writer_that_fails_leaves_the_one_before(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, write_state, {})

    def fail(directory: Path) -> None:
        write_state(directory)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(UserError, match="the disk is full"):
        checkpoints.save(2, fail, {})
    latest = checkpoints.latest()
    assert latest is not None and latest.step == 1

    checkpoints.save(2, write_state, {})
    latest = checkpoints.latest()
    assert latest is not None and latest.step == 2
    assert [path.name for path in tmp_path.iterdir()] == ["2"], "the half one is cleaned away"


def test_a_step_can_be_saved_again(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, write_state, {"try": 1})
    checkpoints.save(1, write_state, {"try": 2})
    latest = checkpoints.latest()
    assert latest is not None and latest.manifest["try"] == 2


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"format": 99, "step": 1}'])
def test_a_manifest_that_cannot_be_read_is_one_line_that_names_it(tmp_path: Path, content: str) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(7, write_state, {})
    (tmp_path / "7" / "manifest.json").write_text(content)
    with pytest.raises(UserError, match=r"7/manifest\.json") as caught:
        checkpoints.latest()
    assert "\n" not in str(caught.value)
