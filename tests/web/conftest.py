"""Fixtures of the web tests: a panel, fixed random draws, long waits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.panel_site import fix_random_draws
from tipbench.web import deps, security
from tipbench.web import judge_service as judging
from web.panels import ServedPanel, answered_store, serve_panel


@pytest.fixture(autouse=True)
def allow_small_sheets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow small sheets for judges: they are fast, and most tests need no drift."""
    monkeypatch.setattr(judging, "MIN_ANSWERS", 1)


@pytest.fixture(autouse=True)
def fixed_randomness(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers and controls are drawn with a fixed seed."""
    fix_random_draws(monkeypatch)


@pytest.fixture(autouse=True)
def long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let requests wait long for a slot or lock, for a busy machine; tests of these limits set their own."""
    for module, name in (
        (security, "SHEET_REQUEST_WAIT_S"),
        (security, "FILLED_SHEET_WAIT_S"),
        (security, "JUDGE_REQUEST_WAIT_S"),
        (deps, "JUDGING_WAIT_S"),
    ):
        monkeypatch.setattr(module, name, 300.0)


@pytest.fixture
def served(home: Path) -> Iterator[ServedPanel]:
    """A panel on a store with answered cells."""
    store = answered_store()
    with serve_panel(home, store) as panel:
        yield panel


@pytest.fixture
def empty(home: Path) -> Iterator[ServedPanel]:
    """A panel on an empty store."""
    with serve_panel(home) as panel:
        yield panel
