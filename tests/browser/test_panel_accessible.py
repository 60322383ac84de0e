"""Every page of the panel: axe-core finds nothing, and no page scrolls sideways, shifts while it loads or is large."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.accessibility import faults, load_faults
from support.panel_pages import SamplePanel, TabOpener, submit_forms

if TYPE_CHECKING:
    from axe_playwright_python.sync_playwright import Axe

# These have every component; the narrow, dark view of the others is checked only for horizontal scrolling.
EVERY_VIEWPORT = ("leaderboard with a baseline", "pair", "run judged", "run form", "judges", "settings", "job 2")
MISSING = ("missing page", "missing experiment")


def test_an_injected_violation_is_found(open_tab: TabOpener, sample_panel: SamplePanel, axe: Axe) -> None:
    tab = open_tab(sample_panel.site)
    tab.go("/jobs")
    tab.page.evaluate(
        """const image = document.createElement('img'); image.style.minWidth = '900px';
        document.querySelector('main').append(image)"""
    )
    found = list(faults(axe, tab, every_viewport=True))
    assert sum("image-alt" in fault for fault in found) == 2
    assert sum("scrolls sideways" in fault for fault in found) == 1


def test_no_page_has_a_violation(open_tab: TabOpener, sample_panel: SamplePanel, axe: Axe) -> None:
    tab = open_tab(sample_panel.site)
    assert set(EVERY_VIEWPORT) <= set(sample_panel.pages)
    wrong = []
    for name, path in sample_panel.pages.items():
        assert tab.go(path) == (404 if name in MISSING else 200), name
        wrong += [f"{name}: {fault}" for fault in faults(axe, tab, every_viewport=name in EVERY_VIEWPORT)]
    assert wrong == []


@pytest.mark.parametrize("width", [360, 1024, 1360])
def test_no_page_shifts_while_it_loads_is_cut_or_large(
    open_tab: TabOpener, sample_panel: SamplePanel, width: int
) -> None:
    tab = open_tab(sample_panel.site, width=width)
    assert [fault for path in sample_panel.pages.values() for fault in load_faults(tab, path)] == []


def test_no_page_after_a_form_has_a_violation(
    open_tab: TabOpener, sample_panel: SamplePanel, axe: Axe, tmp_path: Path
) -> None:
    tab = open_tab(sample_panel.site)
    wrong = [f"{name}: {each}" for name in submit_forms(tab, sample_panel, tmp_path) for each in faults(axe, tab)]
    assert wrong == []


def test_no_page_before_login_or_for_a_judge_has_a_violation(
    open_tab: TabOpener, sample_panel: SamplePanel, axe: Axe
) -> None:
    anonymous = open_tab(sample_panel.site, "nobody")
    anonymous.go("/settings")
    assert "/login?next=" in anonymous.page.url
    wrong = [f"login: {fault}" for fault in faults(axe, anonymous, every_viewport=True)]
    anonymous.page.get_by_role("textbox", name="Token").fill("tipbench_nobody")
    anonymous.page.get_by_role("button", name="Log in").click()
    anonymous.page.get_by_role("alert").wait_for()
    anonymous.page.wait_for_load_state()
    wrong += [f"login refused: {fault}" for fault in faults(axe, anonymous)]
    judge = open_tab(sample_panel.site, "judge")
    for path, status in (("/judge", 200), ("/judge?experiment=tip-bench-furnished", 200), ("/settings", 403)):
        assert judge.go(path) == status
        wrong += [f"judge {path}: {fault}" for fault in faults(axe, judge)]
    assert wrong == []
