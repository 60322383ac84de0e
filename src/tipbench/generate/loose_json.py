"""Lenient parser for the almost-JSON of small models; linear in the length, and never raises.

Parsing starts at the first bracket and accepts single, smart or backtick quotes, unescaped quotes inside a string,
missing or trailing commas, bare keys, mismatched brackets and a truncated end. Valid JSON is parsed as such.
Numbers and bare words are skipped, because no caller needs them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

MAX_DEPTH = 64  # deeper brackets are skipped
MAX_STEPS = 50_000  # tokens, plus quotes and escapes inside strings; an answer with 200 tips needs about 2000

_CLOSERS = {'"': '"', "'": "'", "`": "`", "“": "”“", "„": "“”", "‘": "’", "«": "»"}
_MARKS = {opener: re.compile(rf"\\.|[{closers}]", re.DOTALL) for opener, closers in _CLOSERS.items()}
_OPENING = re.compile(r"[\[{]")
_TOKEN = re.compile(
    r"[\s,]*+(?:(?P<fence>```)|(?P<open>[\[{])|(?P<close>[\]}])|(?P<colon>:)|(?P<quote>[\"'`“„‘«])"
    r"|(?P<bare>[^\s,:\[\]{}\"`“„«]++))"
)
_COLON = re.compile(r"\s*+:")
# In valid JSON one of these follows the quote that ends a string; a quote in the middle is rarely followed by one.
_END = re.compile(
    r"[^\S\n]*+(?:\n|\Z|[:\]}]|```"
    r"|,\s*+(?:\Z|[\"'`“„‘«\[\]{}]|-?\d[\d.eE+-]*+\s*+[,\]}]|(?:true|false|null)\b|\w++\s*+:))"
)
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
_SURROGATE_PAIR = re.compile("([\ud800-\udbff])([\udc00-\udfff])")


@dataclass
class Node:
    """An object or an array; the entries of an array have no key."""

    entries: list[tuple[str | None, str | Node]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)  # every key found, including one whose value is truncated


def read_loose(text: str) -> list[Node]:
    """Return every outermost object or array in the text, in order; a truncated string is omitted."""
    return _Reader(text).read()


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.pos = 0
        self.steps = MAX_STEPS
        self.roots: list[Node] = []
        self.stack: list[tuple[str, Node]] = []  # with its opening bracket
        self.key: str | None = None  # of the innermost node, waiting for its value
        self.stray: set[str] = set()  # quotes without a closing quote in the rest of the text

    def read(self) -> list[Node]:
        while self.steps > 0:
            self.steps -= 1
            if not self.stack:
                opening = _OPENING.search(self.text, self.pos)
                if opening is None:
                    break
                self.pos = opening.start()
            token = _TOKEN.match(self.text, self.pos)
            if token is None:
                break
            self.pos = token.end()
            if token["open"]:
                if len(self.stack) < MAX_DEPTH:
                    node = Node()
                    if self.stack:
                        self.stack[-1][1].entries.append((self.key, node))
                    else:
                        self.roots.append(node)
                    self.stack.append((token["open"], node))
                    self.key = None
            elif token["close"]:
                self.key = None
                bracket = "[" if token["close"] == "]" else "{"
                if any(opened == bracket for opened, _ in self.stack):
                    while self.stack.pop()[0] != bracket:
                        pass
            elif token["fence"]:
                self.stack.clear()
                self.key = None
            elif token["quote"]:
                self._read_string(token["quote"])
            elif token["bare"]:
                self.key = self._as_key(token["bare"])
        return self.roots

    def _as_key(self, word: str) -> str | None:
        """Return the word if a colon follows, which makes it a key; else None."""
        if _COLON.match(self.text, self.pos) is None:
            return None
        self.stack[-1][1].keys.append(word)
        return word

    def _read_string(self, opener: str) -> None:
        end = None
        for mark in _MARKS[opener].finditer(self.text, self.pos) if opener not in self.stray else ():
            self.steps -= 1
            if self.steps < 0:
                break
            if mark[0][0] != "\\" and _END.match(self.text, mark.end()):
                end = mark.start()
                break
        if end is None:
            # A stray apostrophe is skipped; a stray double quote means that the text ends inside its last string.
            self.stray.add(opener)
            self.pos = len(self.text) if opener == '"' else self.pos
            return
        value = _unescape(self.text[self.pos : end])
        self.pos = end + 1
        key = self._as_key(value)
        if key is None:
            self.stack[-1][1].entries.append((self.key, value))
        self.key = key


def _unescape(body: str) -> str:
    if "\\" not in body:
        return body

    def character(match: re.Match[str]) -> str:
        code = match[1]
        return chr(int(code[1:], 16)) if len(code) == 5 else _ESCAPED.get(code, code)

    def join_surrogates(match: re.Match[str]) -> str:
        return chr(0x10000 + ((ord(match[1]) - 0xD800) << 10) + (ord(match[2]) - 0xDC00))

    return _SURROGATE_PAIR.sub(join_surrogates, _ESCAPE.sub(character, body))
