"""The loader: reads batches ahead, so that the device does not wait for them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Protocol

from shared.batch import Batch

AHEAD = 2
"""Batches ready and not yet asked for; memory for more would gain nothing, as batches take equally long to read."""


class Batches(Protocol):
    """What the loader reads from; :class:`shared.data.dataset.Data` is one."""

    def batch(self, step: int, process: int = 0, processes: int = 1) -> Batch: ...


class Loader:
    """Iterates once over (step, batch) for ``num_steps`` steps from ``start_step``; a thread reads ahead.

    Use it as a context manager, so that the thread ends when the loop does, however it ends. An exception of the
    reading thread is raised where the batch it belongs to would have come.
    """

    def __init__(self, data: Batches, start_step: int, num_steps: int, process: int = 0, processes: int = 1) -> None:
        self.wait_seconds = 0.0
        """Time that the consumer has waited for batches."""
        self._data = data
        self._steps = range(start_step, start_step + num_steps)
        self._process, self._processes = process, processes
        self._ready: queue.SimpleQueue[Batch | BaseException] = queue.SimpleQueue()
        self._room = threading.Semaphore(AHEAD)
        self._closed = False
        self._thread = threading.Thread(target=self._read, name="loader", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[tuple[int, Batch]]:
        for step in self._steps:
            assert not self._closed, "the loader is closed"
            started = time.perf_counter()
            batch = self._ready.get()
            self.wait_seconds += time.perf_counter() - started
            if isinstance(batch, BaseException):
                raise batch
            self._room.release()
            yield step, batch

    def _read(self) -> None:
        for step in self._steps:
            self._room.acquire()
            if self._closed:
                return
            try:
                self._ready.put(self._data.batch(step, self._process, self._processes))
            except BaseException as error:
                self._ready.put(error)
                return

    def close(self) -> None:
        """Ends the thread; may be called more than once."""
        self._closed = True
        self._room.release()
        self._thread.join()

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
