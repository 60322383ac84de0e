"""Cursor pagination: {"items", "next"}. Pass `next` as the query's `next`; null means the last page.

A page starts after the last item of the previous one, so items added in between do not shift or repeat rows.
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


class SortKey(NamedTuple):
    """Sort key of an item in a list ordered by time, newest first."""

    before: int  # negated time, so that keys sort like the list
    id: str


Limit = Annotated[int, Query(ge=1, le=MOST, description=f"Items on a page, at most {MOST}.")]
Next = Annotated[
    str | None, Query(max_length=_LONGEST, description="The `next` of the page before; left out for the first page.")
]


def page_of(
    items: Sequence[_T], place: Callable[[_T], SortKey], *, limit: int, after: str | None
) -> tuple[Sequence[_T], str | None]:
    """Return the items of one page and the next cursor; `items` must be sorted by `place`."""
    start = bisect_right(items, decode_cursor(after), key=place) if after is not None else 0
    page = items[start : start + limit]
    more = start + limit < len(items)
    return page, encode_cursor(place(page[-1])) if more and page else None


def encode_cursor(place: SortKey) -> str:
    """Encode a sort key as a cursor for URLs."""
    return base64.urlsafe_b64encode(json.dumps(list(place)).encode()).rstrip(b"=").decode()


def decode_cursor(text: str) -> SortKey:
    """Decode a cursor. Raises Invalid."""
    try:
        raw: Any = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
        before, id_ = raw
        if isinstance(before, int) and isinstance(id_, str) and not isinstance(before, bool):
            return SortKey(before, id_)
    except (ValueError, TypeError, RecursionError, binascii.Error):
        pass
    raise Invalid("next is what the page before gave; leave it out for the first page.", path="query.next")
