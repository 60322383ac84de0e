"""A page's form as in a browser without scripts: its fields and values."""

from __future__ import annotations

from html.parser import HTMLParser
from urllib.parse import urlencode

HEADERS = {"Content-Type": "application/x-www-form-urlencoded", "Accept": "text/html"}


class PageForm(HTMLParser):
    """The fields of a form, found by its action: the values that it sends, and its checkboxes."""

    def __init__(self, html: str, action: str) -> None:
        super().__init__(convert_charrefs=True)
        self.fields: list[tuple[str, str]] = []
        self.names: set[str] = set()
        self.checkboxes: dict[str, list[str]] = {}
        self._action = action
        self._inside = False
        self._select = ""
        self._chosen: str | None = None
        self.feed(html)
        assert self.names, f"there is no form for {action}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {key: value or "" for key, value in attrs}
        if tag == "form":
            self._inside = given.get("action") == self._action
        elif self._inside and tag == "input":
            self._input(given)
        elif self._inside and tag == "select":
            self._select, self._chosen = given["name"], None
            self.names.add(self._select)
        elif self._inside and tag == "option" and self._select and (self._chosen is None or "selected" in given):
            self._chosen = given["value"]

    def handle_endtag(self, tag: str) -> None:
        if tag == "form":
            self._inside = False
        elif tag == "select" and self._select:
            self.fields.append((self._select, self._chosen or ""))
            self._select = ""

    def _input(self, given: dict[str, str]) -> None:
        name, value = given["name"], given.get("value", "")
        self.names.add(name)
        if given.get("type") == "checkbox":
            self.checkboxes.setdefault(name, []).append(value)
            if "checked" not in given:
                return
        self.fields.append((name, value))

    def value(self, name: str) -> list[str]:
        """Return the values sent under a name, without empty ones."""
        return [value for key, value in self.fields if key == name and value]

    def body(self, **changes: str | list[str] | None) -> str:
        """Return the body with some fields changed; None omits a field."""
        kept = [(key, value) for key, value in self.fields if key not in changes]
        for key, value in changes.items():
            kept += [(key, each) for each in ([value] if isinstance(value, str) else value or [])]
        return urlencode(kept)
