"""A real Chromium, started once a module. Without one the tests are skipped; with CI=true that is a failure."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
# Nothing of the browser's own may reach for the network: what leaves is the page's doing.
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium, headless. No longer than a module: Playwright keeps an event loop running, and others need theirs."""
    if importlib.util.find_spec("playwright") is None:
        _without("playwright is not installed: pip install 'tipbench[dev]'")
    named = os.environ.get("TIPBENCH_CHROMIUM")
    found = shutil.which(named) if named else next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        _without(f"no Chromium here ({named or ', '.join(NAMES)}); install it, or set TIPBENCH_CHROMIUM to its path")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=found, args=list(FLAGS))
        yield started
        started.close()


def _without(reason: str) -> NoReturn:
    if os.environ.get("CI") == "true":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)
