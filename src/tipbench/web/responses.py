"""JSON responses that are always valid JSON, and download headers."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from starlette.responses import JSONResponse


class Json(JSONResponse):
    """JSON response. NaN and infinity become null, lone surrogates are escaped."""

    def render(self, content: Any) -> bytes:
        """Return the encoded body."""
        return to_json(content)


def to_json(content: Any) -> bytes:
    """Return compact JSON in UTF-8."""
    try:
        text = _dumps(content)
    except ValueError:  # NaN or infinity; rare, so values are checked only then
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


_UNUSUAL = re.compile(r"[^A-Za-z0-9._-]+")


def attachment(name: str, ending: str) -> dict[str, str]:
    """Return the download header, with a file name that is valid on every file system."""
    plain = _UNUSUAL.sub("-", name)[:100].strip(".-") or "tipbench"
    return {"Content-Disposition": f'attachment; filename="{plain}.{ending}"'}
