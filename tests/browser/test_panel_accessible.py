"""Every page of the panel: axe-core finds nothing, in light and dark, wide and narrow; no page moves sideways."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

from support.panel_pages import Shown, Sight, Visit, after_forms

if TYPE_CHECKING:
    from axe_playwright_python.sync_playwright import Axe

WIDE, NARROW = 1280, 360
LOOKS: tuple[tuple[int, Literal["light", "dark"]], ...] = (
    (WIDE, "light"), (WIDE, "dark"), (NARROW, "dark"), (NARROW, "light"),
)  # fmt: skip


@pytest.fixture(scope="session")
def axe() -> Axe:
    from axe_playwright_python.sync_playwright import Axe

    return Axe()


def faults(axe: Axe, sight: Sight) -> Iterator[str]:
    """What is wrong with a page, in each of its looks."""
    for width, scheme in LOOKS:
        sight.page.set_viewport_size({"width": width, "height": 900})
        sight.page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        sight.page.evaluate("Promise.all(document.getAnimations().map(each => each.finished.catch(() => 0)))")
        found: Any = axe.run(sight.page, options={"resultTypes": ["violations"]}).response
        for violation in found["violations"]:
            for node in violation["nodes"][:3]:
                yield f"{width} {scheme}: {violation['id']}: {node['html'][:200]} {node['failureSummary'][:300]}"
        if out := sight.scrolls_sideways():
            yield f"{width} {scheme}: moves sideways: {out}"


def test_a_violation_that_somebody_plants_is_found(visit: Visit, plain: Shown, axe: Axe) -> None:
    sight = visit(plain.site)
    sight.go("/jobs")
    sight.page.evaluate(
        """const image = document.createElement('img'); image.style.minWidth = '900px';
        document.querySelector('main').append(image)"""
    )
    found = list(faults(axe, sight))
    assert sum("image-alt" in fault for fault in found) == len(LOOKS)
    assert sum("moves sideways" in fault for fault in found) == 2


def test_no_page_has_a_violation(visit: Visit, plain: Shown, axe: Axe) -> None:
    sight = visit(plain.site)
    wrong = []
    for name, path in plain.pages.items():
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
