"""Lenient parser for the invalid JSON that small models write. It never raises, and takes linear time.

Parsing starts at the first bracket and accepts single, smart or backtick quotes, unescaped quotes inside a string,
missing or trailing commas, unquoted keys, mismatched brackets and a truncated end. Numbers and unquoted words are
skipped, because no caller needs them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

MAX_DEPTH = 64  # deeper brackets are skipped
MAX_STEPS = 50_000  # a step is a token, or a quote or escape in a string; an answer with 200 tips has about 2000

# The characters that may close a string, by its opening quote.
_CLOSERS = {'"': '"', "'": "'", "`": "`", "“": "”“", "„": "“”", "‘": "’", "«": "»"}
_QUOTES_AND_ESCAPES = {opener: re.compile(rf"\\.|[{closers}]", re.DOTALL) for opener, closers in _CLOSERS.items()}
_OPEN_BRACKET = re.compile(r"[\[{]")
_TOKEN = re.compile(
    r"""[\s,]*+ (?:
        (?P<fence>```) | (?P<open>[\[{]) | (?P<close>[\]}]) | (?P<colon>:) | (?P<quote>["'`“„‘«])
        | (?P<bare>[^\s,:\[\]{}"`“„«]++)  # an unquoted word or number; ' and ‘ inside it are apostrophes
    )""",
    re.VERBOSE,
)
_COLON = re.compile(r"\s*+:")
# What may follow a closing quote, and rarely follows an unescaped quote inside a string. A quote that is not followed
# by one of these is taken as part of the string.
_AFTER_STRING = re.compile(
    r"""[^\S\n]*+ (?:  # spaces on the same line
        \n | \Z | [:\]}] | ```
        | ,\s*+ (?:  # a comma and the next value or key
            \Z | ["'`“„‘«\[\]{}]
            | -?\d[\d.eE+-]*+\s*+[,\]}]  # a number
            | (?:true|false|null)\b
            | \w++\s*+:  # an unquoted key
        )
    )""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
_SURROGATE_PAIR = re.compile("([\ud800-\udbff])([\udc00-\udfff])")


@dataclass
class Node:
    """An object or an array; the entries of an array have no key."""

    bracket: str  # [ or {
    entries: list[tuple[str | None, str | Node]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)  # also those without a readable value


def read_loose(text: str) -> list[Node]:
    """Return the outermost objects and arrays in the text, in order. A truncated string is omitted."""
    return _Reader(text).read()


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.pos = 0
        self.steps_left = MAX_STEPS
        self.roots: list[Node] = []
        self.stack: list[Node] = []  # open nodes, the innermost last
        self.key: str | None = None  # the key of the next value
        self.unclosed: set[str] = set()  # opening quotes without a closing quote in the rest of the text

    def read(self) -> list[Node]:
        while self.steps_left > 0:
            self.steps_left -= 1
            if not self.stack:
                bracket = _OPEN_BRACKET.search(self.text, self.pos)
                if bracket is None:
                    break
                self.pos = bracket.start()
            token = _TOKEN.match(self.text, self.pos)
            if token is None:  # the end of the text
                break
            self.pos = token.end()
            if token["open"]:
                if len(self.stack) < MAX_DEPTH:
                    node = Node(token["open"])
                    if self.stack:
                        self.stack[-1].entries.append((self.key, node))
                    else:
                        self.roots.append(node)
                    self.stack.append(node)
                    self.key = None
            elif token["close"]:
                self.key = None
                opener = "[" if token["close"] == "]" else "{"
                if any(node.bracket == opener for node in self.stack):
                    while self.stack.pop().bracket != opener:
                        pass  # an unclosed node inside
            elif token["fence"]:
                self.stack.clear()
                self.key = None
            elif token["quote"]:
                self._read_string(token["quote"])
            elif token["bare"]:
                self.key = self._record_key(token["bare"])
            # A colon is skipped: `_record_key` looks ahead for the one after a key.
        return self.roots

    def _record_key(self, word: str) -> str | None:
        """Record the word as a key of the innermost node if a colon follows, and return it; else return None."""
        if _COLON.match(self.text, self.pos) is None:
            return None
        self.stack[-1].keys.append(word)
        return word

    def _read_string(self, opener: str) -> None:
        end = None if opener in self.unclosed else self._find_end(opener)
        if end is None:
            self.unclosed.add(opener)
            if opener == '"':  # the text ends inside this string
                self.pos = len(self.text)
            # Any other quote may be an apostrophe: only the quote itself is skipped.
            return
        value = _unescape(self.text[self.pos : end])
        self.pos = end + 1
        key = self._record_key(value)
        if key is None:
            self.stack[-1].entries.append((self.key, value))
        self.key = key

    def _find_end(self, opener: str) -> int | None:
        """Return the position of the quote that closes the string at `pos`, or None if there is none."""
        for match in _QUOTES_AND_ESCAPES[opener].finditer(self.text, self.pos):
            self.steps_left -= 1
            if self.steps_left < 0:
                return None
            is_escape = match[0].startswith("\\")
            if not is_escape and _AFTER_STRING.match(self.text, match.end()):
                return match.start()
        return None


def _unescape(body: str) -> str:
    if "\\" not in body:
        return body

    def decode_escape(match: re.Match[str]) -> str:
        code = match[1]
        if len(code) == 5:  # u and four hex digits
            return chr(int(code[1:], 16))
        return _ESCAPED.get(code, code)

    def join_surrogates(match: re.Match[str]) -> str:
        return chr(0x10000 + ((ord(match[1]) - 0xD800) << 10) + (ord(match[2]) - 0xDC00))

    return _SURROGATE_PAIR.sub(join_surrogates, _ESCAPE.sub(decode_escape, body))
