"""One panel for a test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tipbench.web import judging
from web.panels import Served, answered, serving


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judges may ask for a few answers here: most tests need no drift, and small sheets are quick."""
    monkeypatch.setattr(judging, "FEWEST", 1)


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
