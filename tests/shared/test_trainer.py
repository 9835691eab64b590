"""The loop: what happens in which order, and when it waits for the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.backend import StepMetrics, Sums
from shared.batch import Batch
from shared.checkpoint import Checkpoints
from shared.interrupt import Interrupt
from shared.recorder import Unrecorded
from shared.step_log import Diverged
from shared.trainer import Trainer
from tests.recipes import recipe


@dataclass
class Result:
    """A pending result that tells when it was read."""

    events: list[str]
    name: str
    value: Any

    def read(self) -> Any:
        self.events.append(f"read {self.name}")
        return self.value


@dataclass
class FakeBackend:
    """Counts; its state is the number of steps it has seen."""

    asynchronous: bool
    events: list[str] = field(default_factory=list)
    name: str = "fake"
    skips: set[int] = field(default_factory=set)
    skipped: int = 0
    process: int = 0

    def agreed(self, wish: bool) -> bool:
        return wish

    def create_state(self) -> int:
        return 0

    def train_step(self, state: int, batch: Batch) -> tuple[int, Result]:
        step = state + 1
        self.events.append(f"step {step}")
        self.skipped += step in self.skips
        metrics = StepMetrics(
            1.0 / step, 1.0, 0.1, int(batch.mask.sum()), step - self.skipped, step in self.skips, None
        )
        return step, Result(self.events, f"{step}", metrics)

    def eval_step(self, state: int, batch: Batch) -> Result:
        return Result(
            self.events, f"evaluation at {state}", Sums(float(batch.mask.sum()) * state, int(batch.mask.sum()))
        )

    def save(self, state: int, directory: Path) -> None:
        self.events.append(f"save {state}")
        (directory / "state").write_text(str(state))

    def restore(self, directory: Path) -> int:
        return int((directory / "state").read_text())


class FakeData:
    """Batches whose tokens are the step, and two held-out batches with 3 and 1 valid targets."""

    bytes_per_token = 2.0

    def batch(self, step: int, process: int = 0, processes: int = 1) -> Batch:
        tokens = np.full((8, 16), step, np.int32)
        return Batch(tokens, tokens, np.ones_like(tokens, bool))

    def held_out_batches(self, max_rows: int | None) -> Iterator[Batch]:
        for valid in (3, 1):
            mask = np.zeros((1, 4), bool)
            mask[0, :valid] = True
            yield Batch(np.zeros((1, 4), np.int32), np.zeros((1, 4), np.int32), mask)


@dataclass
class FakeRecorder:
    records: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)

    def train(self, record: dict[str, Any]) -> None:
        self.records.append(record)

    def evaluation(self, record: dict[str, Any]) -> None:
        self.evaluations.append(record)


def trainer(tmp_path: Path, backend: FakeBackend, **sections: Any) -> Trainer:
    sections = {"logging": {"every": 3}, **sections}
    config = recipe(**sections)
    checkpoints = Checkpoints(tmp_path / "checkpoints", config.checkpoint.keep)
    made: Any = Trainer(config, backend, FakeData(), FakeRecorder(), checkpoints, {}, Interrupt())
    return made


@pytest.mark.parametrize("asynchronous", [True, False])
def test_only_logged_steps_are_read_and_an_asynchronous_device_always_has_the_next_step(
    tmp_path: Path, asynchronous: bool
) -> None:
    backend = FakeBackend(asynchronous)
    run = trainer(tmp_path, backend)
    run.train(*run.start(), 10)
    late = ["step 4", "read 3"] if asynchronous else ["read 3", "step 4"]
    later = ["step 7", "read 6"] if asynchronous else ["read 6", "step 7"]
    last = ["step 10", "read 9", "read 10"] if asynchronous else ["read 9", "step 10", "read 10"]
    assert backend.events == (
        ["step 1", "read 1", "step 2", "step 3", *late, "step 5", "step 6", *later, "step 8", "step 9", *last]
        + ["read evaluation at 10"] * 2
        + ["save 10"]
    )
    assert [record["step"] for record in run.recorder.records] == [1, 3, 6, 9, 10]


def test_evaluations_and_checkpoints_happen_when_due_and_at_the_end(tmp_path: Path) -> None:
    backend = FakeBackend(asynchronous=True)
    run = trainer(tmp_path, backend, evaluation={"every": 4}, checkpoint={"every": 5, "keep": 2})
    outcome = run.train(*run.start(), 10)
    assert [record["step"] for record in run.recorder.evaluations] == [4, 8, 10]
    assert [event for event in backend.events if event.startswith("save")] == ["save 5", "save 10"]
    # Sums over both batches, then one division: every held-out token has loss 10 here, and two bytes.
    assert outcome.held_out == {"held_out_loss": 10.0, "held_out_nats_per_byte": 5.0, "held_out_tokens": 4}
    assert outcome.step == 10 and outcome.loss == pytest.approx(0.1)


def test_a_rate_is_never_taken_over_compilation_evaluation_or_a_checkpoint(tmp_path: Path) -> None:
    backend = FakeBackend(asynchronous=True)
    run = trainer(tmp_path, backend, logging={"every": 1}, checkpoint={"every": 5})
    run.train(*run.start(), 10)
    rates = {record["step"]: record["tokens_per_s"] for record in run.recorder.records}
    assert rates.pop(1) is None, "the first step compiles"
    assert all(rate > 0 for rate in rates.values())


def test_a_run_goes_on_from_its_newest_checkpoint_with_the_batches_that_follow(tmp_path: Path) -> None:
    backend = FakeBackend(asynchronous=False)
    run = trainer(tmp_path, backend, logging={"every": 1})
    run.train(*run.start(), 4)
    again = trainer(tmp_path, FakeBackend(asynchronous=False), logging={"every": 1})
    state, first = again.start()
    assert (state, first) == (4, 4)
    outcome = again.train(state, first, 10)
    assert outcome.step == 10
    assert [record["step"] for record in again.recorder.records] == list(range(5, 11))
    expected = [FakeData().batch(step).fingerprint() for step in range(4, 10)]
    assert [record["batch"] for record in again.recorder.records] == expected


def test_an_interrupt_ends_the_run_after_the_step_with_a_checkpoint(tmp_path: Path) -> None:
    backend = FakeBackend(asynchronous=True)
    run = trainer(tmp_path, backend)
    step = backend.train_step

    def interrupted_in_step_5(state: int, batch: Batch) -> tuple[int, Result]:
        if state == 4:
            run.interrupt.requested = "SIGTERM"
        return step(state, batch)

    backend.train_step = interrupted_in_step_5
    outcome = run.train(*run.start(), 10)
    assert (outcome.step, outcome.interrupted) == (5, "SIGTERM")
    latest = run.checkpoints.latest()
    assert latest is not None and latest.step == 5


def test_a_gradient_that_is_not_finite_stops_the_run_even_in_a_step_that_is_not_logged(tmp_path: Path) -> None:
    run = trainer(tmp_path, FakeBackend(asynchronous=True, skips={4}), checkpoint={"every": 3})
    with pytest.raises(Diverged, match=r"step 6: .* 1 update"):
        run.train(*run.start(), 10)
    latest = run.checkpoints.latest()
    assert latest is not None and latest.step == 3


def test_a_process_that_is_not_the_first_trains_along_and_saves_nothing(tmp_path: Path) -> None:
    backend = FakeBackend(asynchronous=False, process=1)
    made = trainer(tmp_path, backend)
    made.recorder = Unrecorded()
    outcome = made.train(0, 0, 4)
    assert outcome.step == 4 and [e for e in backend.events if e.startswith("step")] == [
        f"step {n}" for n in range(1, 5)
    ]
    assert not [event for event in backend.events if event.startswith("save")]


def test_a_signal_to_any_process_stops_all(tmp_path: Path) -> None:
    class Told(FakeBackend):
        def agreed(self, wish: bool) -> bool:
            return wish or len([event for event in self.events if event.startswith("step")]) == 2

    outcome = trainer(tmp_path, Told(asynchronous=False)).train(0, 0, 4)
    assert outcome.step == 2 and outcome.interrupted == "a signal to another process"
