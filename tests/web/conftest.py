"""One panel for a test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.panel_site import fixed_draws
from tipbench.web import judge_service as judging
from web.panels import Served, answered, serving


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judges may ask for a few answers here: most tests need no drift, and small sheets are quick."""
    monkeypatch.setattr(judging, "FEWEST", 1)


@pytest.fixture(autouse=True)
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No result depends on which answers and controls are drawn."""
    fixed_draws(monkeypatch)


@pytest.fixture
def served(home: Path) -> Iterator[Served]:
    """On a store with answered cells."""
    store, _ = answered()
    with serving(home, store) as panel:
        yield panel


@pytest.fixture
def empty(home: Path) -> Iterator[Served]:
    """On a store in which nothing was ever recorded."""
    with serving(home) as panel:
        yield panel
