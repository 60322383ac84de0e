"""A page in every look, light and dark, wide and narrow: what axe-core finds, and whether it moves sideways."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from support.panel_pages import Sight

if TYPE_CHECKING:
    from axe_playwright_python.sync_playwright import Axe

Look = tuple[int, Literal["light", "dark"]]
WIDE, NARROW = 1280, 360
# Every width and every scheme has all rules once; the other two can only differ in how colours meet.
WHOLE: tuple[Look, ...] = ((WIDE, "light"), (NARROW, "dark"))
LOOKS: tuple[Look, ...] = (*WHOLE, (WIDE, "dark"), (NARROW, "light"))
_COLOURS = {"runOnly": {"type": "rule", "values": ["color-contrast"]}}


def faults(axe: Axe, sight: Sight, looks: Sequence[Look] = LOOKS) -> Iterator[str]:
    """What is wrong with a page, in each of its looks."""
    for look in looks:
        width, scheme = look
        sight.page.set_viewport_size({"width": width, "height": 900})
        sight.page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        sight.page.evaluate("Promise.all(document.getAnimations().map(each => each.finished.catch(() => 0)))")
        options = {"resultTypes": ["violations"], **({} if look in WHOLE else _COLOURS)}
        found: Any = axe.run(sight.page, options=options).response
        for violation in found["violations"]:
            for node in violation["nodes"][:3]:
                yield f"{width} {scheme}: {violation['id']}: {node['html'][:200]} {node['failureSummary'][:300]}"
        if out := sight.scrolls_sideways():
            yield f"{width} {scheme}: moves sideways: {out}"
