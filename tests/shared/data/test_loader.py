"""The loader gives every batch in order, stays ahead by two, and never leaves a thread or an error behind."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from shared.batch import Batch
from shared.data.loader import AHEAD, Loader


class Recorded:
    """Batches whose tokens say which step and process they are for."""

    def __init__(self, seconds: float = 0.0, fails_at: int | None = None) -> None:
        self.seconds, self.fails_at = seconds, fails_at
        self.asked: list[int] = []

    def batch(self, step: int, process: int = 0, processes: int = 1) -> Batch:
        self.asked.append(step)
        time.sleep(self.seconds)
        if step == self.fails_at:
            raise OSError("the disk is gone")
        tokens = np.array([[step, process, processes]], np.int32)
        return Batch(tokens, tokens, tokens > 0)


def settle(data: Recorded, count: int) -> None:
    """Waits until ``count`` batches have been asked for, and then long enough to see whether more are."""
    deadline = time.monotonic() + 10
    while len(data.asked) < count and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.05)


def loader_threads() -> int:
    return sum(thread.name == "loader" for thread in threading.enumerate())


def test_steps_come_in_order_from_the_start() -> None:
    with Loader(Recorded(), start_step=7, num_steps=20, process=1, processes=2) as loader:
        seen = [(step, batch.tokens.tolist()) for step, batch in loader]
    assert seen == [(step, [[step, 1, 2]]) for step in range(7, 27)]
    assert loader_threads() == 0


def test_it_reads_two_batches_ahead_and_no_more() -> None:
    data = Recorded()
    with Loader(data, 0, 100) as loader:
        settle(data, AHEAD)
        assert data.asked == [0, 1]
        steps = iter(loader)
        next(steps)
        settle(data, AHEAD + 1)
        assert data.asked == [0, 1, 2]


def test_an_error_surfaces_where_its_batch_would_have_come() -> None:
    seen = []
    with pytest.raises(OSError, match="the disk is gone"), Loader(Recorded(fails_at=3), 0, 10) as loader:
        for step, _ in loader:
            seen.append(step)
    assert seen == [0, 1, 2]
    assert loader_threads() == 0


def test_leaving_early_ends_the_thread() -> None:
    data = Recorded()
    with pytest.raises(KeyboardInterrupt), Loader(data, 0, 10**9) as loader:
        for step, _ in loader:
            if step == 5:
                raise KeyboardInterrupt
    assert loader_threads() == 0
    loader.close()  # again: no harm


def test_a_closed_loader_refuses_to_go_on() -> None:
    with Loader(Recorded(), 0, 10) as loader:
        steps = iter(loader)
        next(steps)
    with pytest.raises(AssertionError, match="closed"):
        next(steps)


def test_no_steps_give_nothing() -> None:
    with Loader(Recorded(), 5, 0) as loader:
        assert list(loader) == []


def test_wait_seconds_is_the_time_the_consumer_waited() -> None:
    with Loader(Recorded(seconds=0.03), 0, 10) as loader:
        for _ in loader:
            pass
    assert loader.wait_seconds >= 0.29  # ten reads of 30 ms and a consumer that does nothing; clocks may round
    with Loader(Recorded(seconds=0.005), 0, 10) as loader:
        for _ in loader:
            time.sleep(0.05)
    # Reads are hidden behind the consumer's own work, save the first; 100 ms is for a busy machine (50 if none hid).
    assert loader.wait_seconds < 0.1
