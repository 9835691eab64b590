"""From dispatched steps to records, without making the device wait.

A device that runs asynchronously is asked for a step's metrics only after the next step was dispatched, so it never
idles while the host writes. The metrics of steps that are not logged stay on the device, and are looked at only where
the count of updates tells that one of them was left out. Rates are taken between the moments at which results
arrived; a window that contains an evaluation, a checkpoint or the compilation of the first step is never one.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

from shared.backend import Pending, StepMetrics
from shared.batch import Batch
from shared.recorder import Recorder, Unrecorded


@dataclass(frozen=True)
class Fault:
    """A step whose loss or gradient was not finite, so that its update was left out."""

    step: int
    metrics: StepMetrics


@dataclass(frozen=True)
class _Dispatched:
    step: int
    batch: str | None
    """Fingerprint of its batch where the step is logged, else None."""
    tokens_through: int
    """Tokens of this process's steps up to and including this one."""
    metrics: Pending[StepMetrics]


class StepLog:
    """Reads and records the metrics of the steps that are to be logged."""

    def __init__(self, recorder: Recorder | Unrecorded, asynchronous: bool):
        self.startup_seconds: float | None = None
        """From the first dispatch until the first step was done."""
        self.last: StepMetrics | None = None
        """Metrics of the newest step that was read."""
        self._recorder = recorder
        self._lag = 1 if asynchronous else 0
        self._pending: list[_Dispatched] = []
        self._logged: list[int] = []
        """Those of the pending steps that are to be recorded."""
        self._num_updates: int | None = None
        """Completed updates as of the newest step that was read."""
        self._faults: list[Fault] = []
        self._started = time.perf_counter()
        self._tokens = 0
        self._window: tuple[float, int] | None = None
        self._timed_tokens = 0
        self._timed_seconds = 0.0

    @property
    def seconds(self) -> float:
        """Since the log was opened, just before the first dispatch."""
        return time.perf_counter() - self._started

    @property
    def tokens_per_s(self) -> float | None:
        """Over all windows so far."""
        return self._timed_tokens / self._timed_seconds if self._timed_seconds else None

    def dispatched(self, step: int, batch: Batch, metrics: Pending[StepMetrics], logged: bool) -> None:
        """Take note of a step; read what is due."""
        self._tokens += int(batch.mask.sum())
        self._pending.append(_Dispatched(step, batch.fingerprint() if logged else None, self._tokens, metrics))
        if logged:
            self._logged.append(step)
        compiled = self.startup_seconds is not None
        self._read(through=step - self._lag if compiled else step)

    def flush(self) -> None:
        """Read all that is to be logged or tells of a fault; the next window starts with :meth:`resume`."""
        if self._pending:
            self._read(through=self._pending[-1].step)
        if self._pending:
            self._find_faults(self._pending, self._pending[-1].metrics.read())
            self._pending = []
        self._window = None

    def resume(self) -> None:
        """Start a window: the device has nothing to do and the next step is about to be dispatched."""
        self._window = (time.perf_counter(), self._tokens)

    def rewind(self) -> None:
        """Forget what is pending: the steps that follow are dispatched again."""
        self._pending, self._logged, self._num_updates = [], [], None

    def take_faults(self) -> list[Fault]:
        """The faults that were found since they were last taken."""
        faults, self._faults = self._faults, []
        return faults

    def _read(self, through: int) -> None:
        while self._logged and self._logged[0] <= through:
            count = self._logged.pop(0) - self._pending[0].step + 1
            steps, self._pending = self._pending[:count], self._pending[count:]
            self._find_faults(steps, self._record(steps[-1]))

    def _record(self, dispatched: _Dispatched) -> StepMetrics:
        metrics = dispatched.metrics.read()
        now = time.perf_counter()
        record: dict[str, Any] = {
            "step": dispatched.step,
            "loss": metrics.loss,
            "grad_norm": metrics.grad_norm,
            "learning_rate": metrics.learning_rate,
            "tokens": metrics.tokens,
            "tokens_per_s": self._close_window(now, dispatched.tokens_through),
            "batch": dispatched.batch,
            "seconds": now - self._started,
        }
        if metrics.loss_scale is not None:
            record |= {"loss_scale": metrics.loss_scale}
        if metrics.loss_scale is not None or metrics.skipped:
            record |= {"skipped": metrics.skipped}
        if self.startup_seconds is None:
            self.startup_seconds = now - self._started
        self.last = metrics
        self._recorder.train(record)
        return metrics

    def _find_faults(self, steps: list[_Dispatched], last: StepMetrics) -> None:
        """Look at the steps one by one if the count after the last one says that an update of theirs was left out."""
        before, self._num_updates = self._num_updates, last.num_updates
        if before is not None and last.num_updates == before + len(steps):
            return
        for dispatched in steps:
            metrics = last if dispatched is steps[-1] else dispatched.metrics.read()
            if metrics.skipped and (metrics.loss_scale is None or not math.isfinite(metrics.loss)):
                self._faults.append(Fault(dispatched.step, metrics))

    def _close_window(self, now: float, tokens_through: int) -> float | None:
        window, self._window = self._window, (now, tokens_through)
        if window is None:
            return None
        seconds, tokens = now - window[0], tokens_through - window[1]
        self._timed_seconds += seconds
        self._timed_tokens += tokens
        return tokens / seconds
