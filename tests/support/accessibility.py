"""What axe-core finds on a page, wide and light or narrow and dark, and whether it scrolls sideways."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from support.panel_pages import Sight

if TYPE_CHECKING:
    from axe_playwright_python.sync_playwright import Axe

WIDE, NARROW = 1280, 360
_LOOKS: tuple[tuple[int, Literal["light", "dark"]], ...] = ((WIDE, "light"), (NARROW, "dark"))


def faults(axe: Axe, sight: Sight, *, both: bool = False) -> Iterator[str]:
    """What is wrong with a page wide and light, with `both` also narrow and dark; and whether it scrolls sideways."""
    for at, (width, scheme) in enumerate(_LOOKS):
        sight.page.set_viewport_size({"width": width, "height": 900})
        sight.page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        sight.page.evaluate("Promise.all(document.getAnimations().map(each => each.finished.catch(() => 0)))")
        if both or at == 0:
            found: Any = axe.run(sight.page, options={"resultTypes": ["violations"]}).response
            for violation in found["violations"]:
                for node in violation["nodes"][:3]:
                    yield f"{width} {scheme}: {violation['id']}: {node['html'][:200]} {node['failureSummary'][:300]}"
        if out := sight.scrolls_sideways():
            yield f"{width} {scheme}: scrolls sideways: {out}"
