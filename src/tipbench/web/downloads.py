"""Files that people take away: saved under a harmless name, never opened in place."""

from __future__ import annotations

import re

_UNUSUAL = re.compile(r"[^A-Za-z0-9._-]+")


def attachment(name: str, ending: str) -> dict[str, str]:
    """The header that saves an answer under a name that every file system takes."""
    plain = _UNUSUAL.sub("-", name)[:100].strip(".-") or "tipbench"
    return {"Content-Disposition": f'attachment; filename="{plain}.{ending}"'}
