"""Every page of the panel: axe-core finds nothing, and no page scrolls sideways, shifts while it loads or is large."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.accessibility import faults, load_faults
from support.panel_pages import FurnishedPanel, Visit, after_forms

if TYPE_CHECKING:
    from axe_playwright_python.sync_playwright import Axe

# These have every component; the others are checked narrow and dark for width alone.
BOTH_LOOKS = ("leaderboard with a baseline", "pair", "run judged", "run form", "judges", "settings", "job 2")
MISSING = ("nothing there", "no such experiment")


def test_a_planted_violation_is_found(visit: Visit, plain: FurnishedPanel, axe: Axe) -> None:
    view = visit(plain.site)
    view.go("/jobs")
    view.page.evaluate(
        """const image = document.createElement('img'); image.style.minWidth = '900px';
        document.querySelector('main').append(image)"""
    )
    found = list(faults(axe, view, narrow_too=True))
    assert sum("image-alt" in fault for fault in found) == 2
    assert sum("scrolls sideways" in fault for fault in found) == 1


def test_no_page_has_a_violation(visit: Visit, plain: FurnishedPanel, axe: Axe) -> None:
    view = visit(plain.site)
    assert set(BOTH_LOOKS) <= set(plain.pages)
    wrong = []
    for name, path in plain.pages.items():
        assert view.go(path) == (404 if name in MISSING else 200), name
        wrong += [f"{name}: {fault}" for fault in faults(axe, view, narrow_too=name in BOTH_LOOKS)]
    assert wrong == []


@pytest.mark.parametrize("width", [360, 1024, 1360])
def test_no_page_shifts_while_it_loads_is_cut_or_large(visit: Visit, plain: FurnishedPanel, width: int) -> None:
    view = visit(plain.site, width=width)
    assert [fault for path in plain.pages.values() for fault in load_faults(view, path)] == []


def test_no_page_after_a_form_has_a_violation(visit: Visit, plain: FurnishedPanel, axe: Axe, tmp_path: Path) -> None:
    view = visit(plain.site)
    wrong = [f"{name}: {each}" for name in after_forms(view, plain, tmp_path) for each in faults(axe, view)]
    assert wrong == []


def test_no_page_before_login_or_for_a_judge_has_a_violation(visit: Visit, plain: FurnishedPanel, axe: Axe) -> None:
    anonymous = visit(plain.site, "nobody")
    anonymous.go("/settings")
    assert "/login?next=" in anonymous.page.url
    wrong = [f"login: {fault}" for fault in faults(axe, anonymous, narrow_too=True)]
    anonymous.page.get_by_role("textbox", name="Token").fill("tipbench_nobody")
    anonymous.page.get_by_role("button", name="Log in").click()
    anonymous.page.get_by_role("alert").wait_for()
    anonymous.page.wait_for_load_state()
    wrong += [f"login refused: {fault}" for fault in faults(axe, anonymous)]
    judge = visit(plain.site, "judge")
    for path, status in (("/judge", 200), ("/judge?experiment=tip-bench-furnished", 200), ("/settings", 403)):
        assert judge.go(path) == status
        wrong += [f"judge {path}: {fault}" for fault in faults(axe, judge)]
    assert wrong == []
