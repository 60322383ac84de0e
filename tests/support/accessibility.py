"""Faults of a page: axe-core's violations, horizontal scrolling, layout shifts, cut tables and a large size."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from support.panel_pages import BrowserTab

if TYPE_CHECKING:
    from axe_playwright_python.sync_playwright import Axe
    from playwright.sync_api import Route

WIDE, NARROW = 1280, 360
MAX_SHIFT = 0.01  # cumulative layout shift
MAX_BYTES = 120_000  # of the compressed page
_SHIFT = """() => new Promise(done => { let sum = 0;
    const add = list => { for (const each of list.getEntries()) if (!each.hadRecentInput) sum += each.value; };
    new PerformanceObserver(add).observe({type: 'layout-shift', buffered: true});
    setTimeout(() => done(sum), 150); })"""
_CUT_TABLES = """[...document.querySelectorAll('.table-box:not(.matrix)')]
    .filter(each => each.checkVisibility() && each.scrollWidth > each.clientWidth + 1)
    .map(each => each.getAttribute('aria-label'))"""
_BYTES = "performance.getEntriesByType('navigation')[0].encodedBodySize"
_VIEWPORTS: tuple[tuple[int, Literal["light", "dark"]], ...] = ((WIDE, "light"), (NARROW, "dark"))


def faults(axe: Axe, tab: BrowserTab, *, every_viewport: bool = False) -> Iterator[str]:
    """Yield axe violations of the wide, light page, or of `every_viewport`, and horizontal scrolling of both."""
    for at, (width, scheme) in enumerate(_VIEWPORTS):
        tab.page.set_viewport_size({"width": width, "height": 900})
        tab.page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        tab.page.evaluate("Promise.all(document.getAnimations().map(each => each.finished.catch(() => 0)))")
        if every_viewport or at == 0:
            found: Any = axe.run(tab.page, options={"resultTypes": ["violations"]}).response
            for violation in found["violations"]:
                for node in violation["nodes"][:3]:
                    yield f"{width} {scheme}: {violation['id']}: {node['html'][:200]} {node['failureSummary'][:300]}"
        if out := tab.sideways_overflow():
            yield f"{width} {scheme}: scrolls sideways: {out}"


def load_faults(tab: BrowserTab, path: str, *, until: str = "main") -> Iterator[str]:
    """Open a page with delayed scripts; yield layout shifts until an element is shown, cut tables and a large size."""
    tab.page.route("**/*.js*", _delay)
    tab.page.goto(tab.origin + path, wait_until="load")
    tab.page.locator(until).wait_for()
    tab.page.unroute("**/*.js*")
    shift, size = float(tab.page.evaluate(_SHIFT)), int(tab.page.evaluate(_BYTES))
    if shift > MAX_SHIFT:
        yield f"{path} shifts by {shift:.3f}"
    if not 0 < size <= MAX_BYTES:
        yield f"{path} has {size} bytes"
    yield from (f"{path}: the table {name} is cut" for name in tab.page.evaluate(_CUT_TABLES))


def _delay(route: Route) -> None:
    time.sleep(0.1)  # longer than the first paint of a page that does not wait for its scripts
    route.fallback()
