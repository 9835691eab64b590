"""Checkpoints of a run: which exist, which one is whole, which are kept, and how one is written while training goes on.

A backend writes its state into a directory that it is given; this module owns everything around it. The backend
returns as soon as the state may change again. A thread waits for the rest, seals the directory
(:mod:`shared.manifest`), gives it its name and removes what need not be kept. At most one checkpoint is being written.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.config.schema import Checkpoint as Rule
from shared.errors import UserError
from shared.manifest import Damaged, publish, read_manifest, seal, verify
from shared.run_directory import reason

Note = Callable[[str], None]
"""Takes a line for the person who watches."""


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint."""

    directory: Path
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        """Completed training steps."""
        return int(self.manifest["step"])


class Checkpoints:
    """The ``checkpoints`` directory of a run."""

    def __init__(self, directory: Path, rule: Rule, leading: bool = True):
        """``leading``: whether this process names and removes checkpoints; one of those that train together does."""
        self.directory = directory
        self.num_saves = 0
        """Checkpoints whose writing began in this process."""
        self.writing_seconds = 0.0
        """Time from the start of each of them until it had its name."""
        self._rule, self._leading = rule, leading
        self._writer: threading.Thread | None = None
        self._failure: UserError | None = None

    # ----------------------------------------------------------------------------------------------------- reading

    def latest(self) -> Checkpoint | None:
        """The newest one that has a manifest, or None; whether its files are whole is not looked at. Raises UserError
        for one of another version."""
        for step in reversed(self._steps()):
            if (found := self._read(step)) is not None:
                return found
        return None

    def restorable(self, note: Note) -> Checkpoint | None:
        """The newest one that is whole in every byte, or None where there is none at all.

        Damaged ones that are newer are told of and put aside. Raises UserError where all are damaged, and for one of
        another version.
        """
        for partial in self.directory.glob(".partial-*"):
            shutil.rmtree(partial, ignore_errors=True)
        damaged: dict[int, str] = {}
        for step in reversed(self._steps()):
            try:
                found = self._verified(step)
            except Damaged as error:
                damaged[step] = str(error)
                continue
            for newer, why in damaged.items():
                note(self._put_aside(newer, why))
            return found
        for step, why in damaged.items():
            raise UserError(
                f"{self.directory}: no checkpoint is whole; that of step {step}: {why}; remove the directory to start "
                "over, or choose another --run-dir"
            )
        return None

    def at(self, step: int | None) -> Checkpoint:
        """The checkpoint of that step, or the newest; whole in every byte. Raises UserError."""
        steps = self._steps()
        if not steps:
            raise UserError(f"{self.directory}: holds no checkpoint yet")
        wanted = steps[-1] if step is None else step
        if wanted not in steps:
            nearest = min(steps, key=lambda other: abs(other - wanted))
            raise UserError(f"{self.directory}: holds no checkpoint of step {wanted}; the nearest is {nearest}")
        try:
            return self._verified(wanted)
        except Damaged as error:
            others = ", ".join(str(other) for other in steps if other != wanted) or "none"
            raise UserError(f"{self.directory / str(wanted)}: damaged: {error}; other checkpoints: {others}") from None

    def _verified(self, step: int) -> Checkpoint:
        directory = self.directory / str(step)
        manifest = read_manifest(directory)
        verify(directory, manifest)
        return Checkpoint(directory, manifest)

    def _read(self, step: int) -> Checkpoint | None:
        directory = self.directory / str(step)
        try:
            return Checkpoint(directory, read_manifest(directory))
        except Damaged:
            return None

    def _put_aside(self, step: int, why: str) -> str:
        aside = self.directory / f"damaged-{step}"
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(self.directory / str(step), aside)
        return f"warning: the checkpoint of step {step} is damaged ({why}); it was put aside as {aside}"

    def _steps(self) -> list[int]:
        if not self.directory.is_dir():
            return []
        return sorted(int(path.name) for path in self.directory.iterdir() if path.name.isdecimal())

    # ----------------------------------------------------------------------------------------------------- writing

    def save(self, step: int, begin: Callable[[Path], Callable[[], None]], facts: Mapping[str, Any]) -> None:
        """Start to write the checkpoint of that step; :meth:`settle` tells how it went.

        ``begin`` starts to fill a new directory and returns when the state may change again; what it returns waits
        until everything is written. ``facts`` go into the manifest.
        """
        assert self._writer is None, "the checkpoint before is settled first"
        started = time.perf_counter()
        partial = self.directory / f".partial-{step}"
        try:
            if self._leading:
                partial.mkdir(parents=True, exist_ok=True)
            wait = begin(partial)
        except Exception as error:
            self._fail(step, partial, error)
            return

        def complete() -> None:
            try:
                wait()
                if self._leading:
                    seal(partial, {**facts, "step": step})
                    publish(partial, self.directory / str(step))
                    self._prune()
            except BaseException as error:  # whatever ends this thread, the checkpoint failed
                self._fail(step, partial, error)
            self.writing_seconds += time.perf_counter() - started

        self._writer = threading.Thread(target=complete, name="checkpoint")
        self._writer.start()
        self.num_saves += 1

    def settle(self) -> UserError | None:
        """Wait for the checkpoint that is being written; says what went wrong with it, once."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        failure, self._failure = self._failure, None
        return failure

    def _fail(self, step: int, partial: Path, error: BaseException) -> None:
        if self._leading:
            shutil.rmtree(partial, ignore_errors=True)
        newest = self._steps()
        self._failure = UserError(
            f"{self.directory / str(step)}: cannot be written: {reason(error)}; newest checkpoint: "
            f"{f'step {newest[-1]}' if newest else 'none'}"
        )

    def _prune(self) -> None:
        steps = self._steps()
        kept = set(steps[-self._rule.keep :])
        if self._rule.keep_every is not None:
            kept |= {step for step in steps if step % self._rule.keep_every == 0}
        if self._rule.keep_best:
            losses = {step: loss for step in steps if (loss := self._held_out_loss(step)) is not None}
            kept |= set(sorted(losses, key=lambda step: losses[step])[: self._rule.keep_best])
        for step in set(steps) - kept:
            shutil.rmtree(self.directory / str(step))

    def _held_out_loss(self, step: int) -> float | None:
        found = self._read(step)
        return None if found is None else found.manifest.get("held_out_loss")
