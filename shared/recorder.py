"""Where the trainer reports what happens: once to the run directory, to TensorBoard and to the person watching."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from shared.progress import Silence, View, view
from shared.run_directory import RunDirectory, replace_file, writing
from shared.strict_json import dumps
from shared.tensorboard import EventFile

_TAGS = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "learning_rate": "train/learning_rate",
    "loss_scale": "train/loss_scale",
    "tokens_per_s": "speed/tokens_per_s",
    "held_out_loss": "held_out/loss",
    "held_out_nats_per_byte": "held_out/nats_per_byte",
}


class Unrecorded:
    """What a process that is not the first of a run reports to: the first one has it all."""

    def train(self, record: Mapping[str, Any]) -> None: ...

    def evaluation(self, record: Mapping[str, Any]) -> None: ...

    def fault(self, record: Mapping[str, Any]) -> Path | None:
        return None

    def rewind(self, step: int) -> None: ...

    def note(self, text: str) -> None: ...


class Recorder:
    """Writes records as they come. A context manager: leaving it closes all files and the progress bar.

    ``start_step`` is the number of steps done before, when a run resumes; the caller has already dropped the records
    beyond it with :meth:`RunDirectory.truncate_after`. ``quiet`` shows the person nothing, ``stream`` is where they
    look (standard error unless given). Raises UserError when a file cannot be written, here or later.
    """

    def __init__(
        self,
        directory: RunDirectory,
        total_steps: int,
        tensorboard: bool,
        quiet: bool = False,
        *,
        start_step: int = 0,
        stream: TextIO | None = None,
    ) -> None:
        self._directory = directory.create()
        self._events = EventFile(directory.path, start_step) if tensorboard else None
        self._view: View = Silence() if quiet else view(total_steps, start_step, stream)

    def train(self, record: Mapping[str, Any]) -> None:
        """Record a training step: ``step`` (completed steps), ``loss``, ``grad_norm``, ``learning_rate``, ..."""
        self._write({"kind": "train", **record})
        self._view.train(record)

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """Record an evaluation: ``step``, ``held_out_loss``, ``held_out_nats_per_byte``, ``held_out_tokens``."""
        self._write({"kind": "evaluation", **record})
        self._view.evaluation(record)

    def fault(self, record: Mapping[str, Any]) -> Path | None:
        """Write down a step that was not finite, with its rows; returns the file."""
        path = self._directory.faults / f"{record['step']}.json"
        with writing(path):
            path.parent.mkdir(exist_ok=True)
        replace_file(path, dumps(record, indent=2) + "\n")
        return path

    def rewind(self, step: int) -> None:
        """Forget the records beyond ``step``: they are made again."""
        self._directory.truncate_after(step)
        if self._events is not None:
            self._events.close()
            self._events = EventFile(self._directory.path, step)

    def note(self, text: str) -> None:
        """A line for the person, kept nowhere."""
        self._view.note(text)

    def close(self) -> None:
        """Complete all files and give the terminal back; the run directory is free for another writer."""
        try:
            self._view.close()
            if self._events is not None:
                self._events.close()
        finally:
            self._directory.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, record: Mapping[str, Any]) -> None:
        self._directory.append(record)
        if self._events is not None:
            values = {tag: record[name] for name, tag in _TAGS.items() if record.get(name) is not None}
            self._events.scalars(record["step"], values)
