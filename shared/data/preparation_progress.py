"""How far a preparation is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

LINE_SECONDS = 10.0


@contextlib.contextmanager
def shown_progress(title: str, report: Callable[[str], None]) -> Iterator[Callable[[float], None]]:
    """Gives a function to call with the share done, 0 to 1."""
    if not sys.stderr.isatty():
        yield _lines(title, report)
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=1.0)
        yield lambda done: bar.update(task, completed=done)


def _lines(title: str, report: Callable[[str], None]) -> Callable[[float], None]:
    last = time.monotonic()

    def progress(done: float) -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_SECONDS:
            last = time.monotonic()
            report(f"{title}: {done:.0%}")

    return progress
