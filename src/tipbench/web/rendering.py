"""JSON as it leaves us: whatever a model wrote, and however broken a number is, the answer is valid JSON."""

from __future__ import annotations

import json
import math
from typing import Any

from starlette.responses import JSONResponse


class Json(JSONResponse):
    """A JSON answer. Unknown numbers are null, half a character is its escape."""

    def render(self, content: Any) -> bytes:
        """The bytes."""
        return to_json(content)


def to_json(content: Any) -> bytes:
    """Compact JSON in UTF-8."""
    try:
        text = _dumps(content)
    except ValueError:  # a number that JSON does not have; rare, so only then is everything looked at
        text = _dumps(_finite(content))
    return text.encode("utf-8", "backslashreplace")


def _dumps(content: Any) -> str:
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value
