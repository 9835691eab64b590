"""Checkpoints of a run: which exist, which one is whole, how many are kept.

A backend writes its state into a directory that it is given; this module owns everything around it. A checkpoint is
written under a name that nobody reads, and renamed to its step when all of it is on disk: a directory named by a
number is a whole checkpoint, whatever happened to the process that wrote it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import UserError
from shared.run_directory import writing

FORMAT = 1


@dataclass(frozen=True)
class Checkpoint:
    """One whole checkpoint."""

    directory: Path
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        """Completed training steps."""
        return int(self.manifest["step"])


class Checkpoints:
    """The ``checkpoints`` directory of a run."""

    def __init__(self, directory: Path, keep: int):
        self.directory = directory
        self.keep = keep

    def latest(self) -> Checkpoint | None:
        """The newest one, or None. Raises UserError for one that cannot be read."""
        steps = self._steps()
        if not steps:
            return None
        path = self.directory / str(steps[-1]) / "manifest.json"
        try:
            manifest = json.loads(path.read_text())
            found = manifest["format"]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"{path}: not a checkpoint's manifest ({error}); move {path.parent} away to go on"
            ) from None
        if found != FORMAT:
            raise UserError(f"{path}: written in format {found} by another version; this one reads format {FORMAT}")
        return Checkpoint(path.parent, manifest)

    def save(self, step: int, write: Callable[[Path], None], facts: dict[str, Any]) -> None:
        """Write the checkpoint of that step: ``write`` fills a new directory; ``facts`` go into the manifest."""
        final = self.directory / str(step)
        partial = self.directory / f".partial-{step}"
        with writing(final):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            write(partial)
            manifest = {"format": FORMAT, "step": step, **facts}
            (partial / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
            _sync(partial)
            shutil.rmtree(final, ignore_errors=True)
            os.replace(partial, final)
            for old in self._steps()[: -self.keep]:
                shutil.rmtree(self.directory / str(old))

    def _steps(self) -> list[int]:
        if not self.directory.is_dir():
            return []
        return sorted(int(path.name) for path in self.directory.iterdir() if path.name.isdecimal())


def _sync(directory: Path) -> None:
    """Wait until everything below the directory is on the disk, so that the rename cannot overtake it."""
    for path in [*directory.rglob("*"), directory]:
        if path.is_file() or path.is_dir():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
