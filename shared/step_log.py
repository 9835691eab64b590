"""From dispatched steps to records, without making the device wait.

A device that runs asynchronously is asked for a step's metrics only after the next step was dispatched, so it never
idles while the host writes. Rates are taken between the moments at which results arrived; a window that contains an
evaluation, a checkpoint or the compilation of the first step is never one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from shared.backend import Pending, StepMetrics
from shared.batch import Batch
from shared.recorder import Recorder, Unrecorded


class Diverged(Exception):
    """A loss or gradient is not finite, and nothing in the recipe says to go on."""


@dataclass(frozen=True)
class _Dispatched:
    step: int
    batch: str
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
        if logged:
            self._pending.append(_Dispatched(step, batch.fingerprint(), self._tokens, metrics))
        compiled = self.startup_seconds is not None
        self._read(through=step - self._lag if compiled else step)

    def flush(self) -> None:
        """Read all that is pending; the next window starts with :meth:`resume`."""
        if self._pending:
            self._read(through=self._pending[-1].step)
        self._window = None

    def resume(self) -> None:
        """Start a window: the device has nothing to do and the next step is about to be dispatched."""
        self._window = (time.perf_counter(), self._tokens)

    def _read(self, through: int) -> None:
        while self._pending and self._pending[0].step <= through:
            dispatched = self._pending.pop(0)
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
                record |= {"loss_scale": metrics.loss_scale, "skipped": metrics.skipped}
            if self.startup_seconds is None:
                self.startup_seconds = now - self._started
            self.last = metrics
            self._recorder.train(record)
            if metrics.loss_scale is None and metrics.num_updates < dispatched.step:
                raise Diverged(
                    f"step {dispatched.step}: loss {metrics.loss:g}, gradient norm {metrics.grad_norm:g}; "
                    f"{dispatched.step - metrics.num_updates} update(s) since the start had a gradient that is not "
                    "finite and were left out"
                )

    def _close_window(self, now: float, tokens_through: int) -> float | None:
        window, self._window = self._window, (now, tokens_through)
        if window is None:
            return None
        seconds, tokens = now - window[0], tokens_through - window[1]
        self._timed_seconds += seconds
        self._timed_tokens += tokens
        return tokens / seconds
