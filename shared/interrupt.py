"""Ctrl-C and SIGTERM ask a run to save and stop; a second one ends it at once."""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType
from typing import Any


class Interrupt:
    """A context in which the first SIGINT or SIGTERM only sets :attr:`requested`."""

    def __init__(self) -> None:
        self.requested: str | None = None
        """Name of the signal that asked, or None."""
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupt:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested is not None:
            # The state may be half written, which the checkpoint directory's protocol survives. Cleaning up could
            # hang in the very call that the user wants to leave.
            os._exit(128 + number)
        self.requested = signal.Signals(number).name
