"""HTML that is safe by construction: whatever is not markup already is escaped when it is put in."""

from __future__ import annotations

import re
from html import escape
from typing import TypeAlias

_NOT_TEXT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_NEWLINES = re.compile("\r\n?")
_VOID = {"meta", "br", "hr"}
_NAMESPACE = re.compile(r' xmlns(?::xlink)?="[^"]*"')
_ID = re.compile(r'(\bid="|url\(#|href="#)([^")]*)')
_DESCRIBED = re.compile(r'<(\w+)( aria-label="([^"]*)" role="graphics-symbol"[^<>]*)/>')


class Html(str):
    """Markup, as opposed to text."""

    __slots__ = ()


Child: TypeAlias = "str | int | None"


def text(value: str) -> Html:
    """Text of any origin as HTML: escaped, and every character one that HTML may hold."""
    return Html(escape(_NOT_TEXT.sub("\ufffd", _NEWLINES.sub("\n", value)), quote=True))


def element(tag: str, /, *children: Child, **attributes: str | bool | None) -> Html:
    """One element. Children that are not Html are escaped, None is nothing. `class_` is `class`, `a_b` is `a-b`."""
    shown = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{text(str(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if tag in _VOID:
        return Html(f"<{tag}{shown}>")
    return Html(f"<{tag}{shown}>{joined(*children)}</{tag}>")


def joined(*children: Child) -> Html:
    """One piece of markup after the other."""
    pieces = (child if isinstance(child, Html) else text(str(child)) for child in children if child is not None)
    return Html("".join(pieces))


def inline_svg(svg: str, name: str) -> Html:
    """A chart's SVG for use inside a page: no namespaces, ids of its own, and each mark's description on hover.

    `svg` comes from vl-convert, which escapes every text; it is not for SVG from elsewhere.
    """
    plain = _ID.sub(rf"\g<1>{name}-\g<2>", _NAMESPACE.sub("", svg))
    hovering = _DESCRIBED.sub(r"<\1\2><title>\3</title></\1>", plain)
    return Html(hovering.replace("<svg ", '<svg role="img" focusable="false" ', 1))
