"""The folder that holds all a run leaves behind, and the only thing that tools which look at runs need.

``run.json`` says what was run (recipe, fingerprints, device, versions) and ``metrics.jsonl`` what happened, one object
for every logged step. A process may be killed at any moment, so ``run.json`` is replaced as a whole, and
``metrics.jsonl`` is only appended to: the worst that can be left is a torn last line, which readers leave out and the
next writer cuts off. One process writes at a time; a second one is refused.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from shared.errors import UserError, nearest
from shared.strict_json import dumps, number

FORMAT = 1
"""Version of the layout; a reader refuses a newer one."""


@dataclass
class Metrics:
    """The records of a run, in the order in which they were written."""

    train: list[dict[str, Any]] = field(default_factory=list)
    """One for each logged training step; has at least ``step`` and ``loss``."""
    evaluation: list[dict[str, Any]] = field(default_factory=list)
    """One for each evaluation; has at least ``step`` and ``held_out_loss``."""
    num_damaged: int = 0
    """Lines that could not be read."""


class RunDirectory:
    """One run's folder. Making the object touches nothing; writing creates what is missing."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.run_file = self.path / "run.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.traces = self.path / "traces"
        self.faults = self.path / "faults"
        self._metrics: IO[bytes] | None = None
        self._unlock: weakref.finalize[[int], RunDirectory] | None = None

    def exists(self) -> bool:
        """Whether a run was started here."""
        return self.run_file.is_file()

    # ----------------------------------------------------------------------------------------------------- writing

    def create(self) -> RunDirectory:
        """Make the folder if needed and become its only writer, until :meth:`close`.

        Raises UserError where a folder cannot be written, or when another process is training into it.
        """
        if self._unlock is None:
            with writing(self.path):
                self.path.mkdir(parents=True, exist_ok=True)
                if not os.access(self.path, os.W_OK | os.X_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
                self._lock()
        return self

    def write_run(self, run: Mapping[str, Any]) -> None:
        """Replace ``run.json`` as a whole; a reader sees the old one or the new one."""
        self.create()
        replace_file(self.run_file, dumps({"format": FORMAT, **run}, indent=2) + "\n")

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Add the figures that are known at the end (steps, seconds, final losses) to ``run.json``."""
        self.write_run({**self.read_run(), "summary": summary})

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one record to ``metrics.jsonl``; it is with the operating system when this returns."""
        with writing(self.metrics_file):
            stream = self._metrics or self._open_metrics()
            stream.write(dumps(record).encode() + b"\n")
            stream.flush()

    def truncate_after(self, step: int) -> None:
        """Drop the records beyond ``step``, and any damaged line: a resumed run writes them again."""
        self._close_metrics()
        self.create()
        if not self.metrics_file.exists():
            return
        lines = self.metrics_file.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if (record := _record(line)) is not None and record["step"] <= step]
        if len(kept) < len(lines):
            replace_file(self.metrics_file, b"".join(kept))

    def close(self) -> None:
        """Stop being the writer."""
        self._close_metrics()
        if self._unlock is not None:
            self._unlock()
            self._unlock = None

    def __enter__(self) -> RunDirectory:
        return self.create()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _open_metrics(self) -> IO[bytes]:
        self.create()
        stream = self.metrics_file.open("ab+")
        # A crash can leave half a line; a record written behind it would be lost with it.
        content_end = _end_of_last_line(stream)
        if content_end < stream.tell():
            stream.truncate(content_end)
        self._metrics = stream
        return stream

    def _close_metrics(self) -> None:
        if self._metrics is not None:
            stream, self._metrics = self._metrics, None
            with writing(self.metrics_file):
                stream.close()

    def _lock(self) -> None:
        # The folder itself is locked: no extra file is left, and the system releases it however the process ends.
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise UserError(
                f"{self.path}: another process is training into this run directory; wait for it or choose another name"
            ) from None
        except OSError:
            pass  # Some network file systems have no locks; there the person has to take care.
        self._unlock = weakref.finalize(self, os.close, descriptor)

    # ----------------------------------------------------------------------------------------------------- reading

    def read_run(self) -> dict[str, Any]:
        """The content of ``run.json``. Raises UserError where there is none that can be read."""
        try:
            run = json.loads(self.run_file.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(self._no_run()) from None
        except OSError as error:
            raise UserError(f"{self.run_file}: cannot be read: {_words(error)}") from None
        except ValueError as error:
            raise UserError(f"{self.run_file}: damaged, it is not JSON: {error}") from None
        if not isinstance(run, dict) or not isinstance(run.get("format"), int):
            raise UserError(f"{self.run_file}: damaged, it is not the description of a run")
        if run["format"] > FORMAT:
            raise UserError(
                f"{self.run_file}: has format {run['format']}, and this version reads up to {FORMAT}; "
                "install a newer jaxtrain"
            )
        if isinstance(run.get("summary"), dict):
            run["summary"] = {key: number(value) for key, value in run["summary"].items()}
        return run

    def read_metrics(self) -> Metrics:
        """All records that can be read; none when nothing was recorded yet."""
        metrics = Metrics()
        try:
            lines = self.metrics_file.read_bytes().splitlines(keepends=True)
        except FileNotFoundError:
            return metrics
        except OSError as error:
            raise UserError(f"{self.metrics_file}: cannot be read: {_words(error)}") from None
        for line in lines:
            record = _record(line)
            if record is None:
                metrics.num_damaged += 1
            elif record["kind"] == "train":
                metrics.train.append(record)
            elif record["kind"] == "evaluation":
                metrics.evaluation.append(record)
        return metrics

    def _no_run(self) -> str:
        if not self.path.exists():
            problem = f"{self.path}: no such run directory"
        elif not self.path.is_dir():
            problem = f"{self.path}: is a file, not a run directory"
        else:
            problem = f"{self.path}: not a run directory, it has no run.json"
        # What lies inside is tried first: `compare runs` most often means one of the runs in there.
        for folder in (self.path, self.path.parent):
            runs = [file.parent for file in sorted(folder.glob("*/run.json"))] if folder.is_dir() else []
            if runs:
                return f"{problem}; {nearest(str(self.path), map(str, runs))}"
        return problem


_REQUIRED = {"train": "loss", "evaluation": "held_out_loss"}


def _record(line: bytes) -> dict[str, Any] | None:
    """The record on a line, or None where the line is damaged. A line without its end is torn, whatever it holds."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not line.endswith(b"\n") or not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return None
    record = {key: number(value) for key, value in record.items()}
    required = _REQUIRED.get(record["kind"])
    if type(record.get("step")) is not int or (required and not isinstance(record.get(required), int | float)):
        return None
    return record


def _end_of_last_line(stream: IO[bytes]) -> int:
    """Offset behind the last line end; leaves the stream at its end."""
    end = position = stream.seek(0, os.SEEK_END)
    while position > 0:
        start = max(0, position - 65_536)
        stream.seek(start)
        found = stream.read(position - start).rfind(b"\n")
        if found >= 0:
            position = start + found + 1
            break
        position = start
    stream.seek(end)
    return position


# ------------------------------------------------------------------------------------------------------------- files


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader, or a crash, finds the old content or the new and never half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with writing(path):
        try:
            with temporary.open("wb") as stream:
                stream.write(content.encode() if isinstance(content, str) else content)
                stream.flush()
                os.fsync(stream.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns the system's refusal to write ``path`` into a UserError with a remedy."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {_words(error)}") from None


_REMEDIES = {
    errno.ENOSPC: "the disk is full; free some space or choose another place",
    errno.EDQUOT: "the disk quota is used up; free some space or choose another place",
    errno.EFBIG: "the file would be larger than the system allows; choose another place",
    errno.EROFS: "the file system is read-only; choose another place",
    errno.EACCES: "permission denied; choose a place that you may write to",
    errno.EEXIST: "a file of that name is in the way; choose another name",
    errno.ENOTDIR: "a part of the path is a file, not a folder; choose another name",
    errno.EISDIR: "it is a folder; choose another name",
}


def _words(error: OSError) -> str:
    return _REMEDIES.get(error.errno or 0, error.strerror or str(error))


def reason(error: BaseException) -> str:
    """Why a library could not write, in one line: many wrap the system's words in their own."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno:
            return _words(cause)
        cause = cause.__cause__ or cause.__context__
    for code, remedy in _REMEDIES.items():
        if os.strerror(code) in str(error):
            return remedy
    return (str(error).splitlines() or [type(error).__name__])[0]
