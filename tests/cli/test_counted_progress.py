"""Counted progress: occasional lines without a terminal, a bar on one."""

from __future__ import annotations

import io
import sys
import time

import pytest

from tipbench.cli.progress import progress_counter


class TerminalStream(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def test_quick_work_shows_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_counter("applying") as count:
        for done in range(1, 101):
            count(done, 100)
    assert capsys.readouterr() == ("", "")


def test_slow_work_shows_progress_at_intervals_and_not_at_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with progress_counter("applying") as count:
        for done in range(1, 13):
            now[0] += 1.0
            count(done, 12)
    assert capsys.readouterr() == ("", "applying: 5 of 12\napplying: 10 of 12\n")


@pytest.mark.parametrize(("of", "drawn"), [(100, True), (3, False)])
def test_a_terminal_gets_a_bar_unless_the_work_is_over_at_once(
    of: int, drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    screen = TerminalStream()
    monkeypatch.setattr(sys, "stderr", screen)
    with progress_counter("applying") as count:
        for done in range(1, of + 1):
            count(done, of)
    assert ("applying" in screen.getvalue()) is drawn
