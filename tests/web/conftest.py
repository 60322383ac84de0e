"""Fixtures of the web tests: a panel, fixed draws, patient limits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.panel_site import fixed_draws
from tipbench.web import deps, security
from tipbench.web import judge_service as judging
from web.panels import Served, answered, serving


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow small sheets for judges: most tests need no drift, and small sheets are fast."""
    monkeypatch.setattr(judging, "MIN_ANSWERS", 1)


@pytest.fixture(autouse=True)
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers and controls are drawn with a fixed seed."""
    fixed_draws(monkeypatch)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests wait for a slot or lock as long as a loaded machine needs; tests of the limits set their own."""
    for module, name in (
        (security, "SHEET_REQUEST_WAIT_S"),
        (security, "FILLED_SHEET_WAIT_S"),
        (security, "JUDGE_REQUEST_WAIT_S"),
        (deps, "JUDGING_WAIT_S"),
    ):
        monkeypatch.setattr(module, name, 300.0)


@pytest.fixture
def served(home: Path) -> Iterator[Served]:
    """A panel on a store with answered cells."""
    store, _ = answered()
    with serving(home, store) as panel:
        yield panel


@pytest.fixture
def empty(home: Path) -> Iterator[Served]:
    """A panel on an empty store."""
    with serving(home) as panel:
        yield panel
