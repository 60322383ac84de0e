"""A reader for what small models write when they mean JSON. Pure, linear, never raises.

It starts at the first bracket and forgives: single, smart or backtick quotes, quotes inside a string that were not
escaped, missing or trailing commas, bare keys, brackets that do not match, an end in the middle. Real JSON is read
as it is meant. Numbers and bare words are passed over: nobody here needs them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

MAX_DEPTH = 64  # deeper brackets are passed over
MAX_STEPS = 50_000  # tokens, and quotes or escapes inside strings; two hundred tips need two thousand

_CLOSERS = {'"': '"', "'": "'", "`": "`", "“": "”“", "„": "“”", "‘": "’", "«": "»"}
_MARKS = {opener: re.compile(rf"\\.|[{closers}]", re.DOTALL) for opener, closers in _CLOSERS.items()}
_OPENING = re.compile(r"[\[{]")
_TOKEN = re.compile(
    r"[\s,]*+(?:(?P<fence>```)|(?P<open>[\[{])|(?P<close>[\]}])|(?P<colon>:)|(?P<quote>[\"'`“„‘«])"
    r"|(?P<bare>[^\s,:\[\]{}\"`“„«]++))"
)
_COLON = re.compile(r"\s*+:")
# In real JSON every unescaped quote that ends a string has one of these behind it; one in the middle rarely has.
_END = re.compile(
    r"[^\S\n]*+(?:\n|\Z|[:\]}]|```"
    r"|,\s*+(?:\Z|[\"'`“„‘«\[\]{}]|-?\d[\d.eE+-]*+\s*+[,\]}]|(?:true|false|null)\b|\w++\s*+:))"
)
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
_PAIR = re.compile("([\ud800-\udbff])([\udc00-\udfff])")


@dataclass
class Node:
    """An object or an array, told apart by nothing but its entries: those of an array have no key."""

    entries: list[tuple[str | None, str | Node]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)  # every key seen, also one whose value was cut off


def read_loose(text: str) -> list[Node]:
    """Every outermost object or array in the text, in order; a string that was cut off is left out."""
    return _Reader(text).read()


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.pos = 0
        self.steps = MAX_STEPS
        self.roots: list[Node] = []
        self.stack: list[tuple[str, Node]] = []  # with the bracket that opened it
        self.key: str | None = None  # waits for its value in the innermost node
        self.stray: set[str] = set()  # quotes that have no end anywhere further on

    def read(self) -> list[Node]:
        while self.steps > 0:
            self.steps -= 1
            if not self.stack and not self._find_opening():
                break
            token = _TOKEN.match(self.text, self.pos)
            if token is None:
                break
            self.pos = token.end()
            self._take(token.lastgroup or "", token)
        return self.roots

    def _find_opening(self) -> bool:
        opening = _OPENING.search(self.text, self.pos)
        if opening is not None:
            self.pos = opening.start()
        return opening is not None

    def _take(self, kind: str, token: re.Match[str]) -> None:
        if kind == "open":
            self._open(token["open"])
        elif kind == "close":
            self._close("[" if token["close"] == "]" else "{")
        elif kind == "fence":
            self.stack.clear()
            self.key = None
        elif kind == "quote":
            self._string(token["quote"])
        elif kind == "bare":
            self.key = self._as_key(token["bare"])

    def _open(self, bracket: str) -> None:
        if len(self.stack) >= MAX_DEPTH:
            return
        node = Node()
        if self.stack:
            self.stack[-1][1].entries.append((self.key, node))
        else:
            self.roots.append(node)
        self.stack.append((bracket, node))
        self.key = None

    def _close(self, bracket: str) -> None:
        self.key = None
        if any(opened == bracket for opened, _ in self.stack):
            while self.stack.pop()[0] != bracket:
                pass

    def _as_key(self, word: str) -> str | None:
        """The word, if a colon follows and makes it a key."""
        if _COLON.match(self.text, self.pos) is None:
            return None
        self.stack[-1][1].keys.append(word)
        return word

    def _string(self, opener: str) -> None:
        start = self.pos
        end = None if opener in self.stray else self._find_end(opener)
        if end is None:
            # A lost apostrophe is passed over; a lost double quote is a text cut off inside its last string.
            self.stray.add(opener)
            self.pos = len(self.text) if opener == '"' else start
            return
        value = _unescape(self.text[start:end])
        self.pos = end + 1
        key = self._as_key(value)
        if key is None:
            self.stack[-1][1].entries.append((self.key, value))
        self.key = key

    def _find_end(self, opener: str) -> int | None:
        for mark in _MARKS[opener].finditer(self.text, self.pos):
            self.steps -= 1
            if self.steps < 0:
                break
            if mark[0][0] != "\\" and _END.match(self.text, mark.end()):
                return mark.start()
        return None


def _unescape(body: str) -> str:
    if "\\" not in body:
        return body
    return _PAIR.sub(_join_pair, _ESCAPE.sub(_one_escape, body))


def _one_escape(match: re.Match[str]) -> str:
    code = match[1]
    return chr(int(code[1:], 16)) if len(code) == 5 else _ESCAPED.get(code, code)


def _join_pair(match: re.Match[str]) -> str:
    return chr(0x10000 + ((ord(match[1]) - 0xD800) << 10) + (ord(match[2]) - 0xDC00))
