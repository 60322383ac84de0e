"""Our own style sheets, scripts and icon. They are read once; only names that were found then are ever served.

The address holds a hash of all of them, so that browsers keep them for good and modules may import each other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import PurePosixPath

from fastapi import APIRouter
from starlette.responses import Response

from tipbench.web.errors import NotFound

PREFIX = "/static"
KINDS = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_FOR_GOOD = "public, max-age=31536000, immutable"
_ASK_AGAIN = "no-cache"  # an address of an older release: the content is not what it was then

router = APIRouter(include_in_schema=False)  # open to everybody: the login page needs them, and they tell nothing


@dataclass(frozen=True)
class Assets:
    """The files by name, and the hash of all."""

    version: str
    content: Mapping[str, bytes]

    def url(self, name: str) -> str:
        """Where a file is; KeyError for one that is not there, so that a page with a wrong name fails in its test."""
        if name not in self.content:
            raise KeyError(f"there is no static file {name!r}")
        return f"{PREFIX}/{self.version}/{name}"


@cache
def assets() -> Assets:
    """What is in the folder `static`."""
    content = dict(sorted(_walk(files("tipbench.web.panel").joinpath("static"), "").items()))
    together = hashlib.sha256()
    for name, each in content.items():
        together.update(f"{name}\0{len(each)}\0".encode() + each)
    return Assets(together.hexdigest()[:16], content)


@router.get(PREFIX + "/{version}/{name:path}")
def static_file(version: str, name: str) -> Response:
    """One file."""
    known = assets()
    content = known.content.get(name)
    if content is None:
        raise NotFound("There is no such file here.")
    caching = _FOR_GOOD if version == known.version else _ASK_AGAIN
    kind = KINDS[PurePosixPath(name).suffix]
    return Response(content, media_type=kind, headers={"Cache-Control": caching})


def _walk(folder: Traversable, prefix: str) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for each in folder.iterdir():
        if each.is_dir():
            found |= _walk(each, f"{prefix}{each.name}/")
        elif PurePosixPath(each.name).suffix in KINDS:
            found[prefix + each.name] = each.read_bytes()
    return found
