"""Every page of the panel: axe-core finds nothing, in light and dark, wide and narrow; no page moves sideways."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.looks import NARROW, WHOLE, WIDE, faults
from support.panel_pages import Shown, Visit, after_forms

if TYPE_CHECKING:
    from axe_playwright_python.sync_playwright import Axe

PARTS = 4  # of the pages, so that no test takes minutes


def test_a_violation_that_somebody_plants_is_found(visit: Visit, plain: Shown, axe: Axe) -> None:
    sight = visit(plain.site)
    sight.go("/jobs")
    sight.page.evaluate(
        """const image = document.createElement('img'); image.style.minWidth = '900px';
        document.querySelector('main').append(image)"""
    )
    found = list(faults(axe, sight))
    assert sum("image-alt" in fault for fault in found) == len(WHOLE)
    assert sum("moves sideways" in fault for fault in found) == 2


@pytest.mark.parametrize("part", range(PARTS))
def test_no_page_has_a_violation(visit: Visit, plain: Shown, axe: Axe, part: int) -> None:
    sight = visit(plain.site)
    wrong = []
    for name, path in list(plain.pages.items())[part::PARTS]:
        status = sight.go(path)
        assert status in (200, 404), (name, status)
        wrong += [f"{name}: {fault}" for fault in faults(axe, sight)]
    assert wrong == []


def test_no_page_after_a_form_has_a_violation(visit: Visit, plain: Shown, axe: Axe, tmp_path: Path) -> None:
    sight = visit(plain.site)
    wrong = [f"{name}: {each}" for name in after_forms(sight, plain, tmp_path) for each in faults(axe, sight)]
    assert wrong == []


def test_no_page_for_a_stranger_or_a_judge_has_a_violation(visit: Visit, plain: Shown, axe: Axe) -> None:
    stranger = visit(plain.site, "nobody")
    stranger.go("/settings")
    assert "/login?next=" in stranger.page.url
    wrong = [f"login: {fault}" for fault in faults(axe, stranger)]
    stranger.page.get_by_role("textbox", name="Token").fill("tipbench_nobody")
    stranger.page.get_by_role("button", name="Log in").click()
    wrong += [f"login refused: {fault}" for fault in faults(axe, stranger)]
    judge = visit(plain.site, "judge")
    for path, status in (("/judge", 200), ("/judge?experiment=tip-bench-furnished", 200), ("/settings", 403)):
        assert judge.go(path) == status
        wrong += [f"judge {path}: {fault}" for fault in faults(axe, judge)]
    assert wrong == []


@pytest.mark.parametrize("width", [NARROW, 700, WIDE])
def test_no_hostile_name_pushes_a_page_sideways(visit: Visit, hostile: Shown, width: int) -> None:
    sight = visit(hostile.site, width=width)
    wrong = []
    for name, path in hostile.pages.items():
        sight.go(path)
        wrong += [f"{name}: {out}" for out in [sight.scrolls_sideways()] if out]
    assert wrong == []
