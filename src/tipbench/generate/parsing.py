"""Raw answers into tips: what was asked for exactly, or the best that can be made of anything else. Pure.

`format_ok` means: the answer, white space around it aside, is a JSON array of exactly `n_tips` objects, each with the
keys `tip` and `rationale` once and no other, both strings that say something, no tip twice. Anything else loses the
flag, and its tips are looked for in this order:

1. JSON of any shape (`loose_json`): fenced, in prose, wrapped, in lines, cut off, badly quoted, with other keys. Of a
   cut-off answer the tips whose text is complete are kept.
2. Lists in plain text (`tip_lists`), unless the JSON had a key for tips: what is broken there is no list.

Plain prose has no tips. `<think>` blocks are left out first. A tip given twice (case and white space aside) counts
once. Control characters other than newline and tab are taken out of tips; the raw answer keeps them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tipbench.generate.loose_json import Node, read_loose
from tipbench.generate.tip_lists import list_tips, says_something, split_label

MAX_TIPS = 200  # of an answer that was not asked for more

_TIP_KEYS = frozenset(
    {"tip", "tips", "advice", "suggestion", "recommendation", "hint", "action", "tip text", "productivity tip"}
)
_WHY_KEYS = frozenset(
    {"rationale", "rational", "reason", "reasoning", "why", "explanation", "justification", "benefit"}
)
_HEAD_KEYS = frozenset({"title", "headline", "heading", "name"})
_BODY_KEYS = frozenset({"", "text", "description", "content", "body", "detail", "details", "message", "value"})
_LONGEST_KEY = 40

_NOT_LETTERS = re.compile(r"[\W\d_]+")
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_NEWLINES = re.compile("\r\n?")
_THINK = re.compile(r"<(/?)think(?:ing)?>", re.IGNORECASE)


@dataclass(frozen=True)
class Tip:
    """One candidate. The rationale is empty when none was given."""

    tip: str
    rationale: str = ""


@dataclass(frozen=True)
class Answer:
    """The tips of one raw answer, and whether it was exactly what had been asked for."""

    tips: tuple[Tip, ...]
    format_ok: bool


def parse_answer(raw: str, n_tips: int) -> Answer:
    """The tips in a model's answer; never raises, and takes time in proportion to its length."""
    exact = _distinct(_exact(raw, n_tips), n_tips)
    if exact and len(exact) == n_tips:
        return Answer(exact, format_ok=True)
    return Answer(_distinct(_best_effort(_without_thinking(raw)), max(MAX_TIPS, n_tips)), format_ok=False)


def is_overlong(tip: str, word_limit: int) -> bool:
    """Words are parted by white space; a dash or a bullet on its own is none."""
    return sum(any(map(str.isalnum, word)) for word in tip.split()) > word_limit


def tips_json(tips: Iterable[Tip]) -> str:
    """The tips as a compact JSON list, characters as they are: lone surrogates stay for the store to escape."""
    listed = [{"tip": tip.tip, "rationale": tip.rationale} for tip in tips]
    return json.dumps(listed, ensure_ascii=False, separators=(",", ":"))


def _exact(raw: str, n_tips: int) -> list[Tip]:
    """The tips of an answer that is exactly right, duplicates included; else none."""
    try:
        value: object = json.loads(
            raw, object_pairs_hook=tuple, parse_constant=_not_json, parse_int=_ignored, parse_float=_ignored
        )
    except (ValueError, RecursionError):
        return []
    if not isinstance(value, list) or len(value) != n_tips:
        return []
    tips = [_exact_tip(item) for item in value]
    return [tip for tip in tips if tip is not None]


def _exact_tip(pairs: object) -> Tip | None:
    if not isinstance(pairs, tuple) or sorted(key for key, _ in pairs) != ["rationale", "tip"]:
        return None
    if not all(isinstance(text, str) for _, text in pairs):
        return None
    tip, rationale = (_clean(dict(pairs)[key]) for key in ("tip", "rationale"))
    return Tip(tip, rationale) if tip and rationale else None


def _not_json(constant: str) -> object:
    raise ValueError(constant)


def _ignored(_number: str) -> None:
    """Python refuses to convert a number of 5000 digits; no number is wanted here."""


def _best_effort(text: str) -> Iterator[Tip]:
    roots = read_loose(text)
    tips = [tip for root in roots for tip in _tips_in(root)]
    if not tips and not any(map(_names_tips, roots)):
        tips = [Tip(*pair) for pair in list_tips(text)]
    return (Tip(_clean(tip.tip), _clean(tip.rationale)) for tip in tips)


def _distinct(tips: Iterable[Tip], most: int) -> tuple[Tip, ...]:
    kept: dict[str, Tip] = {}
    for tip in tips:
        if len(kept) >= most:
            break
        folded = " ".join(tip.tip.split()).casefold()
        if folded:
            kept.setdefault(folded, tip)
    return tuple(kept.values())


def _clean(text: str) -> str:
    return _CONTROLS.sub("", _NEWLINES.sub("\n", text)).strip()


def _without_thinking(raw: str) -> str:
    """The text outside `<think>` blocks; a closing tag alone ends a block that the prompt had opened."""
    kept: list[str] = []
    pos, inside, opened = 0, False, False
    for tag in _THINK.finditer(raw):
        closing = bool(tag[1])
        if not closing and not inside:
            kept.append(raw[pos : tag.start()])
            inside = opened = True
        elif closing and (inside or not opened):
            pos, inside, opened = tag.end(), False, True
    return "".join(kept) + ("" if inside else raw[pos:])


def _fold(key: str) -> str:
    """`Tip_1` and `TIP` are both `tip`; `tip_id` is not."""
    return _NOT_LETTERS.sub(" ", key).strip().casefold() if len(key) <= _LONGEST_KEY else key


def _names_tips(node: Node) -> bool:
    return any(_fold(key) in _TIP_KEYS for key in node.keys) or any(
        _names_tips(entry) for _, entry in node.entries if isinstance(entry, Node)
    )


def _tips_in(node: Node, label: str = "") -> list[Tip]:
    """A node's own tips if a key names them; else those further in; else what its other keys make up."""
    texts = [(None if key is None else _fold(key), value) for key, value in node.entries if isinstance(value, str)]
    named = [(key, text) for key, text in texts if key is not None]
    reason = next((text for key, text in named if key in _WHY_KEYS), "")
    if any(key in _TIP_KEYS for key, _ in named):
        return _named_tips(named)
    if named and len(named) < len(texts) and all(key in _WHY_KEYS for key, _ in named):
        # ["Do this", "rationale": "that"]
        return _named_tips([("tip" if key is None else key, text) for key, text in texts])
    deeper = [
        tip
        for key, value in node.entries
        if isinstance(value, Node)
        for tip in _tips_in(value, label if key is None else _fold(key))
    ]
    if deeper:
        alone = len(deeper) == 1 and not deeper[0].rationale
        return [Tip(deeper[0].tip, reason)] if alone else deeper
    if named:
        return _described_tip(named, reason, announced=label in _TIP_KEYS)
    return _plain_tips(text for _, text in texts) if label == "" or label in _TIP_KEYS else []


def _named_tips(named: list[tuple[str, str]]) -> list[Tip]:
    """`tip` keys with the rationale beside each; one object may hold several (`tip1`, `rationale1`, `tip2` …)."""
    tips: list[Tip] = []
    waiting = ""
    for key, text in named:
        if key in _TIP_KEYS:
            tips.append(Tip(text, waiting))
            waiting = ""
        elif key in _WHY_KEYS or key in _BODY_KEYS:
            if tips and not tips[-1].rationale:
                tips[-1] = Tip(tips[-1].tip, text)
            else:
                waiting = text
    return tips


def _described_tip(named: list[tuple[str, str]], reason: str, *, announced: bool) -> list[Tip]:
    """A title and a description, or either with a reason: a title alone is a tip only where one was announced."""
    head = next((split_label(text)[0] for key, text in named if key in _HEAD_KEYS), "")
    body = next((split_label(text)[0] for key, text in named if key in _BODY_KEYS), "")
    if not says_something(head):
        head = ""
    if not (body or reason or announced):
        return []
    joint = "" if not head or not body else " " if head[-1] in ".!?:" else ": "
    tip = head + joint + body
    return [Tip(tip, reason)] if says_something(tip) else []


def _plain_tips(texts: Iterable[str]) -> list[Tip]:
    """An array of strings, some of which may say that they are the rationale of the one before."""
    tips: list[Tip] = []
    for text in texts:
        said, is_why = split_label(text.strip())
        if is_why and tips:
            tips[-1] = Tip(tips[-1].tip, said)
        elif not is_why and says_something(said):
            tips.append(Tip(said))
    return tips
