"""What a person sees while a run trains: one moving line on a terminal, now and then a plain line elsewhere.

A log file or a notebook must not be flooded, and a run of seconds should still show something. So plain lines come
every tenth of the run, and in between at intervals that grow from 5 seconds to a minute as the run gets longer.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress


class View(Protocol):
    """A way to show a run. Records are those of ``metrics.jsonl``."""

    def train(self, record: Mapping[str, Any]) -> None: ...
    def evaluation(self, record: Mapping[str, Any]) -> None: ...
    def note(self, text: str) -> None: ...
    def close(self) -> None: ...


def view(total_steps: int, start_step: int = 0, stream: TextIO | None = None) -> View:
    """The view that suits ``stream`` (standard error unless given: standard output is for results)."""
    stream = stream or sys.stderr
    if stream.isatty():
        return Bar(total_steps, start_step, stream)
    return Lines(total_steps, start_step, stream)


class Silence:
    """Shows nothing."""

    def train(self, record: Mapping[str, Any]) -> None:
        pass

    def evaluation(self, record: Mapping[str, Any]) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


class Lines:
    """Plain lines."""

    def __init__(
        self, total_steps: int, start_step: int, stream: TextIO, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._total, self._stream, self._clock = total_steps, stream, clock
        self._pace = Pace(total_steps)
        self._tenth = _tenth(start_step, total_steps)
        self._start = self._last = clock()

    def train(self, record: Mapping[str, Any]) -> None:
        step, now = record["step"], self._clock()
        self._pace.reached(step, now)
        interval = min(60.0, max(5.0, (now - self._start) / 50))
        tenth = _tenth(step, self._total)
        if tenth == self._tenth and now - self._last < interval:
            return
        self._tenth, self._last = tenth, now
        width = len(str(self._total))
        parts = [
            f"step {step:>{width}} of {self._total}",
            f"loss {record['loss']:.4f}",
            f"learning rate {record['learning_rate']:.2e}",
        ]
        if record.get("tokens_per_s") is not None:
            parts.append(f"{short(record['tokens_per_s'])} tokens/s")
        if step < self._total and (remaining := self._pace.remaining(step)) is not None:
            parts.append(f"{duration(remaining)} left")
        self.note("   ".join(parts))

    def evaluation(self, record: Mapping[str, Any]) -> None:
        self.note(_held_out(record))

    def note(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        pass


class Bar:
    """A progress bar that stays on the last line; notes and evaluations scroll by above it."""

    def __init__(
        self, total_steps: int, start_step: int, stream: TextIO, clock: Callable[[], float] = time.monotonic
    ) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._total, self._clock = total_steps, clock
        self._pace = Pace(total_steps)
        self._held_out = ""
        self._shown = float("-inf")
        self._bar: Progress = Progress(
            TextColumn("{task.completed}/{task.total}"),
            BarColumn(bar_width=None, complete_style="cyan", finished_style="green"),
            TextColumn("{task.fields[figures]}"),
            console=Console(file=stream),
            refresh_per_second=4,
            expand=True,
        )
        self._task = self._bar.add_task("", total=total_steps, completed=start_step, figures="[dim]starting[/]")
        self._bar.start()

    def train(self, record: Mapping[str, Any]) -> None:
        step, now = record["step"], self._clock()
        self._pace.reached(step, now)
        # The terminal is drawn four times a second; formatting every step of a fast run would cost for nothing.
        if now - self._shown < 0.1 and step < self._total:
            return
        self._shown = now
        figures = f"loss [bold]{record['loss']:.3f}[/]{self._held_out}"
        if record.get("tokens_per_s") is not None:
            figures += f"  {short(record['tokens_per_s'])} tok/s"
        if step < self._total and (remaining := self._pace.remaining(step)) is not None:
            figures += f"  [cyan]{duration(remaining)}[/] left"
        self._bar.update(self._task, completed=step, figures=figures)

    def evaluation(self, record: Mapping[str, Any]) -> None:
        self._held_out = f"  held-out [bold]{record['held_out_loss']:.3f}[/]"
        self.note(_held_out(record))

    def note(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._bar.stop()


class Pace:
    """Time that is left, from the steps of the last minute.

    The first record comes after compilation, so compilation is not taken for the pace; evaluations and checkpoints
    are, because they will come again.
    """

    def __init__(self, total_steps: int) -> None:
        self._total = total_steps
        self._marks: deque[tuple[int, float]] = deque()

    def reached(self, step: int, now: float) -> None:
        self._marks.append((step, now))
        while len(self._marks) > 2 and now - self._marks[1][1] > 60:
            self._marks.popleft()

    def remaining(self, step: int) -> float | None:
        """Seconds, or None while nothing is known."""
        (first_step, first), (last_step, last) = self._marks[0], self._marks[-1]
        if last_step <= first_step or last <= first:
            return None
        return (self._total - step) * (last - first) / (last_step - first_step)


def short(number: float) -> str:
    """A rate in three digits: 812, 41.2k, 1.25M. "nan" and "inf" as they are."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        # What rounds to 1000 of one unit is 1 of the next.
        if size * 0.9995 <= number < float("inf"):
            scaled = number / size
            return f"{scaled:.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f}{suffix}"
    return f"{number:.0f}" if number >= 9.995 else f"{number:.3g}"


def duration(seconds: float) -> str:
    """7 s, 3:05 min or 2:03:05 h."""
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    if hours:
        return f"{hours}:{minutes:02}:{rest:02} h"
    return f"{minutes}:{rest:02} min" if minutes else f"{rest} s"


def _tenth(step: int, total: int) -> int:
    return 10 * step // total


def _held_out(record: Mapping[str, Any]) -> str:
    text = f"step {record['step']}: held-out loss {record['held_out_loss']:.4f}"
    if record.get("held_out_nats_per_byte") is not None:
        text += f", {record['held_out_nats_per_byte']:.4f} nats per byte"
    if record.get("held_out_tokens") is not None:
        text += f" ({record['held_out_tokens']:,} tokens)"
    return text
