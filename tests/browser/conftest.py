"""Panels for a real browser, made once: one with ordinary content, and one with hostile content."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.panel_pages import FurnishedPanel, Visit, furnished_panel, hostile_panel
from support.panel_site import fixed_draws

if TYPE_CHECKING:
    from axe_playwright_python.sync_playwright import Axe
    from playwright.sync_api import Browser


@pytest.fixture(autouse=True)
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the same answers and controls in every test run."""
    fixed_draws(monkeypatch)


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FurnishedPanel]:
    """A panel with content on every page."""
    with furnished_panel(_folder(tmp_path_factory, "plain")) as shown:
        yield shown


@pytest.fixture(scope="session")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FurnishedPanel]:
    """The same content with hostile texts."""
    with hostile_panel(_folder(tmp_path_factory, "hostile")) as shown:
        yield shown


@pytest.fixture
def visit(browser: Browser) -> Iterator[Visit]:
    """Opens pages of a panel; all are closed at the end."""
    visiting = Visit(browser)
    yield visiting
    visiting.close()


@pytest.fixture(scope="session")
def axe() -> Axe:
    """Finds accessibility violations of a page."""
    from axe_playwright_python.sync_playwright import Axe

    return Axe()


def _folder(factory: pytest.TempPathFactory, name: str) -> Path:
    return factory.mktemp(name)
