"""Progress is a bar on a terminal, and now and then a line elsewhere."""

from __future__ import annotations

import io
import sys

import pytest

from shared.data import preparation_progress as subject
from shared.data.preparation_progress import shown_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_come_no_more_often_than_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(subject.time, "monotonic", lambda: now)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    lines: list[str] = []
    with shown_progress("preparing data", lines.append) as progress:
        for second in range(1, 26):
            now = float(second)
            progress(second / 25)
    assert lines == ["preparing data: 40%", "preparing data: 80%"]


def test_a_terminal_shows_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    lines: list[str] = []
    with shown_progress("preparing data", lines.append) as progress:
        progress(0.5)
    assert "preparing data" in terminal.getvalue()
    assert lines == []
