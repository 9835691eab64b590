"""The loop: what happens in which order, and when it waits for the device."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.backend import StepMetrics, Sums
from shared.batch import Batch
from shared.checkpoint import Checkpoints
from shared.errors import UserError
from shared.interrupt import Interrupt
from shared.nonfinite import Diverged
from shared.recorder import Unrecorded
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

    def gathered(self, text: str) -> list[str]:
        return [text]

    def create_state(self, source: None) -> int:
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

    def save(self, state: int, directory: Path) -> Callable[[], None]:
        self.events.append(f"save {state}")

        def wait() -> None:
            (directory / "state").write_text(str(state))

        return wait

    def restore(self, directory: Path) -> int:
        return int((directory / "state").read_text())


class FakeData:
    """Batches whose tokens are the step, and two held-out batches with 3 and 1 valid targets."""

    bytes_per_token = 2.0

    def batch(self, step: int, process: int = 0, processes: int = 1) -> Batch:
        tokens = np.full((8, 16), step, np.int32)
        return Batch(tokens, tokens, np.ones_like(tokens, bool))

    def described_rows(self, step: int) -> list[dict[str, Any]]:
        return [{"row": step, "text": "we the people"}]

    def held_out_batches(self, max_rows: int | None) -> Iterator[Batch]:
        for valid in (3, 1):
            mask = np.zeros((1, 4), bool)
            mask[0, :valid] = True
            yield Batch(np.zeros((1, 4), np.int32), np.zeros((1, 4), np.int32), mask)


@dataclass
class FakeRecorder:
    records: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    faults: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def train(self, record: dict[str, Any]) -> None:
        self.records.append(record)

    def evaluation(self, record: dict[str, Any]) -> None:
        self.evaluations.append(record)

    def fault(self, record: dict[str, Any]) -> None:
        self.faults.append(record)

    def rewind(self, step: int) -> None:
        self.records = [record for record in self.records if record["step"] <= step]

    def note(self, text: str) -> None:
        self.notes.append(text)


def trainer(tmp_path: Path, backend: FakeBackend, **sections: Any) -> Trainer:
    sections = {"logging": {"every": 3}, **sections}
    config = recipe(**sections)
    checkpoints = Checkpoints(tmp_path / "checkpoints", config.checkpoint, leading=backend.process == 0)
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
    with pytest.raises(Diverged, match=r"^step 4 is not finite: loss 0\.25"):
        run.train(*run.start(), 10)
    latest = run.checkpoints.latest()
    assert latest is not None and latest.step == 3
    (fault,) = run.recorder.faults
    assert (fault["step"], fault["policy"], fault["rows"]) == (4, "stop", [{"row": 3, "text": "we the people"}])
    assert fault["batch"] == FakeData().batch(3).fingerprint()


def test_skip_goes_on_without_the_update_until_there_are_too_many(tmp_path: Path) -> None:
    skip = {"policy": "skip", "limit": 2}
    run = trainer(tmp_path, FakeBackend(asynchronous=True, skips={2, 8}), nonfinite=skip)
    assert run.train(*run.start(), 10).step == 10
    assert [fault["step"] for fault in run.recorder.faults] == [2, 8]
    assert all("its update is left out" in note for note in run.recorder.notes) and len(run.recorder.notes) == 2

    run = trainer(tmp_path / "again", FakeBackend(asynchronous=True, skips={2, 7, 8}), nonfinite=skip)
    with pytest.raises(Diverged, match=r"step 8 is .*more than 2"):
        run.train(*run.start(), 10)


def test_rewind_trains_the_steps_since_the_newest_checkpoint_again(tmp_path: Path) -> None:
    backend = FakeBackend(asynchronous=True, skips={8})
    run = trainer(tmp_path, backend, nonfinite="rewind", checkpoint={"every": 5}, logging={"every": 1})
    restore = backend.restore

    def healed(directory: Path) -> int:
        backend.skips, backend.skipped = set(), 0
        return restore(directory)

    backend.restore = healed
    assert run.train(*run.start(), 10).step == 10
    steps = [int(event.split()[1]) for event in backend.events if event.startswith("step")]
    assert steps == [1, 2, 3, 4, 5, 6, 7, 8, 9, 6, 7, 8, 9, 10], "step 9 was dispatched before step 8 was read"
    assert [record["step"] for record in run.recorder.records] == list(range(1, 11))
    assert [fault["step"] for fault in run.recorder.faults] == [8]


def test_rewind_stops_where_the_same_step_fails_again(tmp_path: Path) -> None:
    backend = FakeBackend(asynchronous=True, skips={8})
    run = trainer(tmp_path, backend, nonfinite="rewind", checkpoint={"every": 5})
    restore = backend.restore

    def still_ill(directory: Path) -> int:
        backend.skipped = 0
        return restore(directory)

    backend.restore = still_ill
    with pytest.raises(Diverged, match=r"step 8 is .* the machine is not to blame"):
        run.train(*run.start(), 10)


def test_an_overflow_that_a_loss_scale_answers_is_no_fault(tmp_path: Path) -> None:
    class Scaled(FakeBackend):
        def train_step(self, state: int, batch: Batch) -> tuple[int, Result]:
            step, result = super().train_step(state, batch)
            loss = float("nan") if step == 8 else result.value.loss
            result.value = replace(result.value, loss_scale=4.0, loss=loss)
            return step, result

    run = trainer(tmp_path, Scaled(asynchronous=True, skips={4, 8}))
    with pytest.raises(Diverged, match="step 8 is not finite"):
        run.train(*run.start(), 10)
    assert [fault["step"] for fault in run.recorder.faults] == [8], "in step 4 only the gradient overflowed"


def test_checkpoints_are_due_by_time_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FakeBackend(asynchronous=True)
    now = [0.0]
    monkeypatch.setattr("shared.trainer.time.monotonic", lambda: now[0])
    run = trainer(tmp_path, backend, checkpoint={"every_minutes": 1.0, "keep": 5})
    step = backend.train_step

    def of_20_seconds(state: int, batch: Batch) -> tuple[int, Result]:
        now[0] += 20
        return step(state, batch)

    backend.train_step = of_20_seconds
    run.train(*run.start(), 10)
    assert [event for event in backend.events if event.startswith("save")] == ["save 3", "save 6", "save 9", "save 10"]


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    backend = FakeBackend(asynchronous=True)
    run = trainer(tmp_path, backend, checkpoint={"every": 4})
    may_end = threading.Event()
    step, save = backend.train_step, backend.save

    def slow(state: int, directory: Path) -> Callable[[], None]:
        wait = save(state, directory)

        def written() -> None:
            assert may_end.wait(30)
            wait()

        return written

    def stepping(state: int, batch: Batch) -> tuple[int, Result]:
        if state == 6:
            assert not (tmp_path / "checkpoints" / "4").exists()
            may_end.set()
        return step(state, batch)

    backend.save, backend.train_step = slow, stepping
    assert run.train(*run.start(), 10).checkpoints["saves"] == 3
    assert (tmp_path / "checkpoints" / "10").exists()


def test_a_checkpoint_that_fails_is_told_of_and_the_last_one_ends_the_run(tmp_path: Path) -> None:
    backend = FakeBackend(asynchronous=True)
    run = trainer(tmp_path, backend, checkpoint={"every": 4})
    save, full = backend.save, {4}

    def sometimes(state: int, directory: Path) -> Callable[[], None]:
        def no_space() -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        return no_space if state in full else save(state, directory)

    backend.save = sometimes
    assert run.train(*run.start(), 10).step == 10
    assert [note for note in run.recorder.notes if "checkpoints/4: cannot be written: the disk is full" in note]

    full |= {20}
    with pytest.raises(UserError, match=r"checkpoints/20: cannot be written: .*newest checkpoint: step 16"):
        run.train(*run.start(), 20)


def test_a_process_that_is_not_the_first_trains_along_and_names_no_checkpoint(tmp_path: Path) -> None:
    backend = FakeBackend(asynchronous=False, process=1)
    made = trainer(tmp_path, backend)
    made.recorder = Unrecorded()
    (tmp_path / "checkpoints" / ".partial-4").mkdir(parents=True)  # as the first process does
    outcome = made.train(0, 0, 4)
    assert outcome.step == 4
    assert [event for event in backend.events if event.startswith(("step", "save"))] == [
        *(f"step {n}" for n in range(1, 5)),
        "save 4",
    ], "it writes its part"
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [".partial-4"]


def test_a_signal_to_any_process_stops_all(tmp_path: Path) -> None:
    class Told(FakeBackend):
        def agreed(self, wish: bool) -> bool:
            return wish or len([event for event in self.events if event.startswith("step")]) == 2

    outcome = trainer(tmp_path, Told(asynchronous=False)).train(0, 0, 4)
    assert outcome.step == 2 and outcome.interrupted == "a signal to another process"
