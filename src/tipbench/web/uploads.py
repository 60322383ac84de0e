"""Sheets between their preview and the word to apply them: the very bytes that were looked at, for a while.

They are in memory alone: after a restart the file is uploaded again, and nothing else is lost.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fastapi import FastAPI

from tipbench.web.auth import Identity

LIFE_S = 3600.0
KEPT = 32  # uploads, of everybody together
MOST_BYTES = 128_000_000  # of them; the oldest give way first


@dataclass(frozen=True)
class Share:
    """What one token may have kept; its own oldest give way first, before anybody else's."""

    files: int
    bytes: int


JUDGES = Share(4, 16_000_000)
ADMINS = Share(16, 96_000_000)

_making = threading.Lock()


@dataclass(frozen=True)
class Upload:
    """One file that somebody has sent for one experiment."""

    id: str
    owner: str  # the id of the token it came with
    experiment: str
    name: str  # of the file, as its sender calls it
    content: bytes
    sha256: str
    kept_at: float
    judge: str | None = None  # who filled it, if the sheet does not say
    outcome: Mapping[str, Any] | None = None  # once it is applied; the content is no longer needed then


class Uploads:
    """What was uploaded and is still looked at. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Upload] = OrderedDict()

    def keep(
        self,
        owner: str,
        experiment: str,
        name: str,
        content: bytes,
        judge: str | None = None,
        *,
        share: Share = JUDGES,
    ) -> Upload:
        """Keep a file; older ones give way to it, its owner's first."""
        digest = hashlib.sha256(content).hexdigest()
        upload = Upload(secrets.token_hex(16), owner, experiment, name[:200], content, digest, self._clock(), judge)
        with self._lock:
            self._kept[upload.id] = upload
            self._shrink(share, owner)
            self._tidy()
        return upload

    def find(self, id_: str, owner: str, experiment: str) -> Upload | None:
        """The file of that id, if this token sent it for this experiment and it is not too long ago."""
        with self._lock:
            self._tidy()
            upload = self._kept.get(id_)
        fits = upload is not None and (upload.owner, upload.experiment) == (owner, experiment)
        return upload if fits else None

    def settle(self, upload: Upload, outcome: Mapping[str, Any]) -> None:
        """Note how applying it ended, and let go of the content."""
        with self._lock:
            if upload.id in self._kept:
                self._kept[upload.id] = replace(upload, content=b"", outcome=outcome)

    def __len__(self) -> int:
        return len(self._kept)

    def _tidy(self) -> None:
        old = self._clock() - LIFE_S
        for id_ in [id_ for id_, upload in self._kept.items() if upload.kept_at < old]:
            del self._kept[id_]
        self._shrink(Share(KEPT, MOST_BYTES))

    def _shrink(self, share: Share, owner: str | None = None) -> None:
        """Forget the oldest, of one owner or of all, until they fit; the newest stays."""
        mine = [upload for upload in self._kept.values() if owner in (None, upload.owner)]
        while len(mine) > share.files or (len(mine) > 1 and _size(mine) > share.bytes):
            del self._kept[mine.pop(0).id]


def _size(uploads: Iterable[Upload]) -> int:
    return sum(len(upload.content) for upload in uploads)


def share_of(who: Identity) -> Share:
    """What somebody's token may have kept."""
    return JUDGES if who.is_judge else ADMINS


def uploads_of(app: FastAPI) -> Uploads:
    """The application's own, made when it is first needed."""
    with _making:
        found: Uploads | None = getattr(app.state, "uploads", None)
        if found is None:
            found = app.state.uploads = Uploads()
        return found
