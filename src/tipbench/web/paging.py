"""Lists in pages: {"items", "next"}. `next` is handed back as the query's `next`; null is the end.

A page begins after the last item of the one before it, so what is added meanwhile neither shifts nor doubles a row.
"""

from __future__ import annotations

import base64
import binascii
import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

from fastapi import Query

from tipbench.web.errors import Invalid

LIMIT = 50
MOST = 500
_LONGEST = 400

_T = TypeVar("_T")


class Place(NamedTuple):
    """Where an item stands in a list that is ordered by time, newest first."""

    before: int  # minus the time, so that places sort as the list does
    id: str


Limit = Annotated[int, Query(ge=1, le=MOST, description=f"Items on a page, at most {MOST}.")]
Next = Annotated[
    str | None, Query(max_length=_LONGEST, description="The `next` of the page before; left out for the first page.")
]


def page_of(
    items: Sequence[_T], place: Callable[[_T], Place], *, limit: int, after: str | None
) -> tuple[Sequence[_T], str | None]:
    """The items of one page and the mark of the next; the list must be in the order of `place`."""
    start = bisect_right(items, read_mark(after), key=place) if after is not None else 0
    page = items[start : start + limit]
    more = start + limit < len(items)
    return page, mark(place(page[-1])) if more and page else None


def mark(place: Place) -> str:
    """A place as it travels in a URL."""
    return base64.urlsafe_b64encode(json.dumps(list(place)).encode()).rstrip(b"=").decode()


def read_mark(text: str) -> Place:
    """The place of a mark. Invalid when it is not one of ours."""
    try:
        raw: Any = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
        before, id_ = raw
        if isinstance(before, int) and isinstance(id_, str) and not isinstance(before, bool):
            return Place(before, id_)
    except (ValueError, TypeError, RecursionError, binascii.Error):
        pass
    raise Invalid("next is what the page before gave; leave it out for the first page.", path="query.next")
