"""Pieces that every part of the report is made of: sections, tables, lists of facts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tipbench.compare.markup import Html, element
from tipbench.compare.report import NOTHING


@dataclass(frozen=True)
class Column:
    """A column of a table: numbers stand to the right, text to the left; `head` names the row."""

    title: str
    text: bool = False
    head: bool = False


def section(anchor: str, title: str, *parts: Html | None) -> Html:
    """A part of the report with its heading."""
    return element(
        "section", element("h2", title, id=f"{anchor}-title"), *parts, id=anchor, aria_labelledby=f"{anchor}-title"
    )


def table(
    caption: str,
    columns: Sequence[Column],
    rows: Iterable[Sequence[str | None]],
    *,
    states: Sequence[str] = (),
    cards: bool = False,
) -> Html:
    """A table that scrolls inside its own frame; with `cards`, a narrow page shows each row as a card.

    Roles are spelt out, because a table that is laid out as cards would lose them.
    """
    heads = [element("th", column.title, scope="col", role="columnheader", class_=_class(column)) for column in columns]
    body = [
        element("tr", *map(_cell, columns, row), role="row", class_=states[at] if at < len(states) else None)
        for at, row in enumerate(rows)
    ]
    whole = element(
        "table",
        element("caption", caption),
        element("thead", element("tr", *heads, role="row"), role="rowgroup"),
        element("tbody", *body, role="rowgroup"),
        role="table",
        class_="cards" if cards else None,
    )
    return element("div", whole, class_="scroll", tabindex="0", role="region", aria_label=caption)


def _cell(column: Column, value: str | None) -> Html:
    shown = element("bdi", value) if value and column.text else (value if value is not None else NOTHING)
    if column.head:
        return element("th", shown, scope="row", role="rowheader", class_=_class(column))
    return element("td", shown, role="cell", class_=_class(column), data_label=column.title)


def _class(column: Column) -> str:
    return "text" if column.text else "number"


def facts(pairs: Iterable[tuple[str, str | None]]) -> Html:
    """Names and values; what has no value is left out."""
    return element(
        "dl",
        *(element("div", element("dt", name), element("dd", element("bdi", value))) for name, value in pairs if value),
        class_="facts",
    )
