"""Pairs as they are written on the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tipbench.errors import UsageError

if TYPE_CHECKING:
    from tipbench.compare.matrix import Pair


def read_pair(text: str, flag: str) -> Pair:
    """MODEL/PROMPT as a pair, or UsageError."""
    from tipbench.compare.matrix import parse_pair

    pair = parse_pair(text.strip())
    if pair is None:
        raise UsageError(f"{flag} takes MODEL/PROMPT (got {text[:120]!r}); for example {flag} qwen2.5:0.5b/v1")
    return pair
