"""What a person sees while the ladder is climbed: a table that fills up, or a line for each rung where there is no
terminal."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from shared.parity.jobs import Job, Runner
from shared.parity.rungs import Rung, Verdict

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


class LadderView:
    """Shows rungs as their verdicts come in, and meanwhile how far the running jobs are."""

    def __init__(self, rungs: Sequence[Rung], runner: Runner, console: Console | None = None):
        from rich.console import Console
        from rich.live import Live

        self._rungs, self._runner = rungs, runner
        self._console = console or Console()
        if not self._console.is_terminal:
            self._console.width = 132
        self._verdicts: dict[str, Verdict] = {}
        self._running: dict[str, Job] = {}
        self._started = time.monotonic()
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = Live(get_renderable=self._table, console=self._console, refresh_per_second=2)

    def __enter__(self) -> LadderView:
        if self._live is not None:
            self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._running.clear()
        if self._live is not None:
            self._live.__exit__(kind, error, traceback)
        else:
            self._console.print(self._table())

    def started(self, job: Job, backend: str) -> None:
        """A job has begun; its backend's one before has ended."""
        self._running[backend] = job
        if self._live is None:
            seconds = time.monotonic() - self._started
            print(f"[{seconds:5.0f} s] {backend}: {job.label}", file=sys.stderr, flush=True)

    def judged(self, rung: Rung, verdict: Verdict) -> None:
        """A rung has its verdict."""
        self._verdicts[rung.name] = verdict
        if self._live is None:
            seconds = time.monotonic() - self._started
            print(f"[{seconds:5.0f} s] {rung.name}: {_mark(verdict)}, {verdict.detail}", file=sys.stderr, flush=True)

    def _table(self) -> Table:
        from rich import box
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name in ("rung", "compared"):
            table.add_column(name)
        for name in ("measured", "limit"):
            table.add_column(name, justify="right")
        table.add_column("verdict", overflow="fold")
        for rung in self._rungs:
            verdict = self._verdicts.get(rung.name)
            if verdict is None:
                table.add_row(rung.name, rung.compares, "", "", self._progress(rung), style="dim")
                continue
            cells = figure(verdict.measured), figure(verdict.limit)
            style = "" if verdict.ok else "red"
            table.add_row(rung.name, rung.compares, *cells, f"{_mark(verdict)}: {verdict.detail}", style=style)
        return table

    def _progress(self, rung: Rung) -> str:
        labels = {job.label for job in rung.jobs}
        parts = [
            f"{backend} {job.label}, {self._steps(backend, job)} steps"
            for backend, job in list(self._running.items())
            if job.label in labels
        ]
        return "; ".join(parts)

    def _steps(self, backend: str, job: Job) -> int:
        try:
            with (self._runner.directory(backend, job) / "metrics.jsonl").open("rb") as file:
                return sum(b'"train"' in line for line in file)
        except OSError:
            return 0


def figure(value: float) -> str:
    """A difference, a ratio or a count, short."""
    if math.isinf(value) or math.isnan(value):
        return str(value)
    if value == int(value):
        return str(int(value))
    return f"{value:.2f}" if value >= 0.1 else f"{value:.1e}"


def _mark(verdict: Verdict) -> str:
    return "ok" if verdict.ok else "FAILED"
