"""The training loop: the only one.

It knows no framework. A :class:`shared.backend.Backend` carries out a step; this module says what happens in which
order. The host waits for the device only where something is read: at a step that is logged (one step late), at an
evaluation and at a checkpoint, and there only until the state was copied.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shared.backend import Backend, State
from shared.checkpoint import Checkpoints
from shared.config.schema import Config
from shared.data import Data
from shared.data.loader import Loader
from shared.interrupt import Interrupt
from shared.nonfinite import Faults, Rewind
from shared.origin import Origin
from shared.recorder import Recorder, Unrecorded
from shared.step_log import StepLog
from shared.trace import Trace


@dataclass
class Outcome:
    """How this process's part of a run ended."""

    step: int
    """Completed steps of the whole run."""
    interrupted: str | None
    """The signal that stopped it, or None."""
    seconds: float
    """Wall time from the first dispatch."""
    startup_seconds: float | None
    """Until the first step was done: compilation is in here, and in no rate."""
    tokens_per_s: float | None
    """Over all logged windows."""
    loss: float | None
    """Of the last logged step."""
    held_out: dict[str, float] | None
    """The last evaluation."""
    checkpoints: dict[str, float]
    """``saves``: how many; ``stall_seconds``: for how long training stood still for them; ``writing_seconds``: from the
    start of each until it had its name."""

    def summary(self) -> dict[str, Any]:
        """For ``run.json``."""
        return asdict(self)


@dataclass
class Trainer:
    """One run of one backend."""

    config: Config
    backend: Backend
    data: Data
    recorder: Recorder | Unrecorded
    checkpoints: Checkpoints
    facts: dict[str, Any]
    """What a checkpoint's manifest says of the run beside its step."""
    interrupt: Interrupt
    traces: Mapping[int, Path] = field(default_factory=dict)
    """Steps to trace, and the file to write for each."""
    origin: Origin = field(default_factory=Origin)

    def __post_init__(self) -> None:
        self._faults = Faults(self.config.nonfinite, self.data, self.recorder)
        self._saved_at = time.monotonic()
        self._stall_seconds = 0.0

    def start(self) -> tuple[State, int]:
        """The state to go on from, and how many steps it has seen."""
        found = self.checkpoints.restorable(self.recorder.note) if self.backend.process == 0 else None
        # The first process looks; what it has found is what all go on from.
        step = json.loads(self.backend.gathered(json.dumps(None if found is None else found.step))[0])
        if step is None:
            return self.backend.create_state(self.origin.source), self.origin.step
        return self.backend.restore(self.checkpoints.directory / str(step)), step

    def train(self, state: State, first: int, last: int) -> Outcome:
        """Train from ``first`` completed steps to ``last``, at least one step.

        Raises Diverged where the policy for what is not finite says to stop; the newest checkpoint is then the one
        before.
        """
        log = StepLog(self.recorder, self.backend.asynchronous)
        try:
            while True:
                try:
                    return self._train(log, state, first, last)
                except Rewind:
                    del state
                # Out of the handler, whose exception would keep the old state alive: two of them may not fit.
                self._settle()
                log.rewind()
                state, first = self.start()
                self.recorder.rewind(first)
        finally:
            self._settle()

    def _train(self, log: StepLog, state: State, first: int, last: int) -> Outcome:
        config, total = self.config, self.config.schedule.steps
        held_out: dict[str, float] | None = None
        step, interrupted = first, False

        with Loader(self.data, first, last - first) as loader:
            for index, batch in loader:
                step = index + 1
                trace = Trace(self.backend, state, batch) if step in self.traces else None
                state, metrics = self.backend.train_step(state, batch)
                if trace and self.backend.process == 0:
                    trace.write(state, self.traces[step])
                log.dispatched(
                    step, batch, metrics, logged=step in (first + 1, last) or step % config.logging.every == 0
                )
                self._faults.handle(log.take_faults())

                interrupted = self.backend.agreed(self.interrupt.requested is not None)
                stopping = step == last or interrupted
                evaluating = step == total or _due(step, config.evaluation.every)
                saving = stopping or _due(step, config.checkpoint.every) or self._due_by_time()
                if evaluating or saving:
                    log.flush()
                    self._faults.handle(log.take_faults())
                    evaluated = self._evaluate(state, step) if evaluating else None
                    held_out = evaluated or held_out
                    if saving:
                        self._save(state, step, evaluated)
                    log.resume()
                if stopping:
                    break

        if (failure := self.checkpoints.settle()) is not None:
            raise failure
        return Outcome(
            step=step,
            interrupted=self.interrupt.requested or ("a signal to another process" if interrupted else None),
            seconds=log.seconds,
            startup_seconds=log.startup_seconds,
            tokens_per_s=log.tokens_per_s,
            loss=log.last.loss if log.last else None,
            held_out=held_out,
            checkpoints={
                "saves": self.checkpoints.num_saves,
                "stall_seconds": self._stall_seconds,
                "writing_seconds": self.checkpoints.writing_seconds,
            },
        )

    def _evaluate(self, state: State, step: int) -> dict[str, float] | None:
        """Loss over the held-out rows: all sums first, then one division."""
        batches = self.data.held_out_batches(self.config.evaluation.max_rows)
        pending = [self.backend.eval_step(state, batch) for batch in batches]
        sums = [result.read() for result in pending]
        tokens = sum(part.tokens for part in sums)
        if not tokens:
            return None
        loss = sum(part.loss for part in sums) / tokens
        record = {
            "held_out_loss": loss,
            "held_out_nats_per_byte": loss / self.data.bytes_per_token,
            "held_out_tokens": tokens,
        }
        self.recorder.evaluation({"step": step, **record})
        return record

    def _save(self, state: State, step: int, evaluated: dict[str, float] | None) -> None:
        """Start to write a checkpoint, once the one before is done."""
        started = time.perf_counter()
        self._settle()
        held_out = {} if evaluated is None else {"held_out_loss": evaluated["held_out_loss"]}
        self.checkpoints.save(step, lambda directory: self.backend.save(state, directory), {**self.facts, **held_out})
        self._saved_at = time.monotonic()
        self._stall_seconds += time.perf_counter() - started

    def _settle(self) -> None:
        """A checkpoint that could not be written is told of and does not end the run, unless it is the last."""
        if (failure := self.checkpoints.settle()) is not None:
            self.recorder.note(f"warning: {failure}; training goes on")

    def _due_by_time(self) -> bool:
        minutes = self.config.checkpoint.every_minutes
        return minutes is not None and self.backend.agreed(time.monotonic() - self._saved_at >= 60 * minutes)


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
