"""TensorBoard event files, written without TensorFlow and without torch.

TensorBoard's own package has the message types and the record framing, which is all that a file of scalars needs. Its
higher-level writers must not be used: they reach for ``tensorboard.compat.tf``, which imports TensorFlow wherever that
is installed and takes seconds.
"""

from __future__ import annotations

import itertools
import math
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from shared.errors import UserError
from shared.run_directory import writing

_numbers = itertools.count()


class EventFile:
    """A new event file in ``folder``; TensorBoard reads all event files of a folder as one run.

    ``start_step`` is the number of steps done before: TensorBoard is told to forget what earlier files of the folder
    hold beyond it, because a resumed run writes those steps again.
    """

    def __init__(self, folder: Path, start_step: int = 0) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as error:
            raise UserError(
                f"logging.tensorboard is true, but TensorBoard cannot be imported ({error}); "
                "pip install tensorboard, or set logging.tensorboard=false"
            ) from None
        self._event, self._summary = event_pb2, summary_pb2
        # Host and process keep two writers apart; the counter two files of one process within one second.
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        self.path = folder / name
        with writing(self.path):
            self._writer = RecordWriter(self.path.open("xb"))
        self._write(event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2"))
        log = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write(event_pb2.Event(wall_time=time.time(), step=start_step + 1, session_log=log))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Add the values, named by their tags, at ``step``; kept as float32, as TensorBoard does."""
        summary = self._summary.Summary(
            value=[self._summary.Summary.Value(tag=tag, simple_value=_float32(value)) for tag, value in values.items()]
        )
        self._write(self._event.Event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        """Close the file; it is complete after every call of :meth:`scalars` already."""
        with writing(self.path):
            self._writer.close()

    def _write(self, event: object) -> None:
        with writing(self.path):
            self._writer.write(event.SerializeToString())  # type: ignore[attr-defined]
            self._writer.flush()


def _float32(value: float) -> float:
    # Protobuf refuses finite values outside float32's range; a diverging loss may be one.
    limit = 3.4028234663852886e38
    return value if not math.isfinite(value) else max(-limit, min(limit, value))
