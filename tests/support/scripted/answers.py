"""Answers of the scripted models."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence

Message = Mapping[str, object]
Reply = Callable[[str, Sequence[Message], Mapping[str, object], int], str]

_NUMBER_OF_TIPS = re.compile(
    r"\b(\d{1,2})\s+(?:[^\W\d]+\s+){0,3}?(?:tips?|objects?|suggestions?|items?|elements?)\b", re.IGNORECASE
)
_STARTS = ("Before lunch,", "Right after coffee,", "At your driver,", "Once the call ends,", "Before you leave,")
_ACTIONS = (
    "write the first line of the report",
    "answer the oldest open message",
    "lay out tomorrow's first task",
    "close every tab but one",
    "sketch the outline on paper",
    "phone the one person you wait for",
    "clear the top of the list",
)
_STOPS = ("for ten minutes, then stop.", "until the timer rings at eight minutes.", "for five minutes and no longer.")
_WHY = ("A small start removes the threshold.", "It is due first.", "This hour suits short work.")


def tips(model: str, messages: Sequence[Message], options: Mapping[str, object], nth: int) -> str:
    """The requested JSON array; equal for the same model, messages and seed."""
    seed = hashlib.sha256(f"{model}|{options.get('seed')}|".encode())
    for message in messages:
        seed.update(str(message.get("content")).encode("utf-8", "replace"))
    stream = int.from_bytes(seed.digest()[:8], "big")
    return json.dumps([_tip(stream + 7919 * i) for i in range(requested_tips(messages))], ensure_ascii=False)


def requested_tips(messages: Sequence[Message]) -> int:
    """The number of tips that the last user message requests; 3 if it has none."""
    users = [str(message.get("content")) for message in messages if message.get("role") == "user"]
    found = _NUMBER_OF_TIPS.findall(users[-1]) if users else []
    return min(max(int(found[-1]), 1), 50) if found else 3


def _tip(number: int) -> dict[str, str]:
    start, number = _STARTS[number % len(_STARTS)], number // len(_STARTS)
    action, number = _ACTIONS[number % len(_ACTIONS)], number // len(_ACTIONS)
    stop, number = _STOPS[number % len(_STOPS)], number // len(_STOPS)
    return {"tip": f"{start} {action} {stop}", "rationale": _WHY[number % len(_WHY)]}


def huge_text(n_bytes: int = 200_000) -> str:
    """A text of at least `n_bytes` UTF-8 bytes, with emoji, NULs, quotes and line ends."""
    line = 'Plan 🌿 the day\x00 "slowly" – naïve 👩🏽‍💻 \\ tab\t and\r\nline {n}\n'
    size = len(line.encode())
    return "".join(line.replace("{n}", str(n)) for n in range(n_bytes // size + 1))


def split(text: str, n: int) -> list[str]:
    """The text in at most n pieces of about the same length."""
    if not text:
        return []
    step = -(-len(text) // n)
    return [text[at : at + step] for at in range(0, len(text), step)]
