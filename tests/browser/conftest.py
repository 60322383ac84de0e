"""Panels for a real browser, made once: one with ordinary content, and one with hostile content."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from support.judge_page import BatchPage, JudgingSite, open_batch_page
from support.panel_pages import SamplePanel, TabOpener, serve_hostile_panel, serve_sample_panel
from support.panel_site import fix_random_draws

if TYPE_CHECKING:
    from axe_playwright_python.sync_playwright import Axe
    from playwright.sync_api import Browser


@pytest.fixture(autouse=True)
def fixed_randomness(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the same answers and controls in every test run."""
    fix_random_draws(monkeypatch)


@pytest.fixture(scope="session")
def sample_panel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SamplePanel]:
    """A panel with content on every page."""
    with serve_sample_panel(tmp_path_factory.mktemp("plain")) as panel:
        yield panel


@pytest.fixture(scope="session")
def hostile_panel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SamplePanel]:
    """The same content with hostile texts."""
    with serve_hostile_panel(tmp_path_factory.mktemp("hostile")) as panel:
        yield panel


@pytest.fixture
def open_tab(browser: Browser) -> Iterator[TabOpener]:
    """Opens pages of a panel in tabs, which are closed at the end."""
    opener = TabOpener(browser)
    yield opener
    opener.close()


@pytest.fixture
def judging(shared_site: JudgingSite) -> JudgingSite:
    """The panel that the tests of a file share, with a new judge; its tests finish no batch."""
    return shared_site.with_new_judge()


@pytest.fixture
def batch(judging: JudgingSite, open_tab: TabOpener) -> BatchPage:
    """A judge with a new batch."""
    return open_batch_page(open_tab, judging.site, judging.open())


@pytest.fixture(scope="session")
def axe() -> Axe:
    """Finds accessibility violations of a page."""
    from axe_playwright_python.sync_playwright import Axe

    return Axe()
