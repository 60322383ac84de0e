"""In-memory uploads awaiting confirmation: the exact bytes that were previewed, for LIFE_S.

After a restart the file has to be uploaded again; nothing else is lost.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fastapi import FastAPI

from tipbench.web.auth import Identity

LIFE_S = 3600.0
KEPT = 32  # uploads of all tokens together
MOST_BYTES = 128_000_000  # of all uploads together; the oldest are dropped first


@dataclass(frozen=True)
class UploadQuota:
    """Storage limit of one token; exceeding it drops the token's own oldest uploads."""

    files: int
    bytes: int


JUDGES = UploadQuota(4, 16_000_000)
ADMINS = UploadQuota(16, 96_000_000)


@dataclass(frozen=True)
class Upload:
    """A file uploaded for an experiment."""

    id: str
    owner: str  # token id
    experiment: str
    name: str  # file name given by the client
    content: bytes
    sha256: str
    kept_at: float
    judge: str | None = None  # if missing in the sheet
    outcome: Mapping[str, Any] | None = None  # once applied; the content is dropped then


class UploadStore:
    """Uploads awaiting confirmation. Thread-safe."""

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
        share: UploadQuota = JUDGES,
    ) -> Upload:
        """Store a file, dropping older ones above the limits, the owner's first."""
        digest = hashlib.sha256(content).hexdigest()
        upload = Upload(secrets.token_hex(16), owner, experiment, name[:200], content, digest, self._clock(), judge)
        with self._lock:
            self._kept[upload.id] = upload
            self._shrink(share, owner)
            self._tidy()
        return upload

    def find(self, id_: str, owner: str, experiment: str) -> Upload | None:
        """Return an upload of this token and experiment, or None if it is unknown or expired."""
        with self._lock:
            self._tidy()
            upload = self._kept.get(id_)
        fits = upload is not None and (upload.owner, upload.experiment) == (owner, experiment)
        return upload if fits else None

    def settle(self, upload: Upload, outcome: Mapping[str, Any]) -> None:
        """Save the result of applying an upload, and drop its content."""
        with self._lock:
            if upload.id in self._kept:
                self._kept[upload.id] = replace(upload, content=b"", outcome=outcome)

    def __len__(self) -> int:
        return len(self._kept)

    def _tidy(self) -> None:
        old = self._clock() - LIFE_S
        for id_ in [id_ for id_, upload in self._kept.items() if upload.kept_at < old]:
            del self._kept[id_]
        self._shrink(UploadQuota(KEPT, MOST_BYTES))

    def _shrink(self, share: UploadQuota, owner: str | None = None) -> None:
        """Drop the oldest uploads, of one owner or of all, until they fit; the newest is kept."""
        mine = [upload for upload in self._kept.values() if owner in (None, upload.owner)]
        size = sum(len(upload.content) for upload in mine)
        while len(mine) > share.files or (len(mine) > 1 and size > share.bytes):
            oldest = mine.pop(0)
            size -= len(oldest.content)
            del self._kept[oldest.id]


def quota_of(who: Identity) -> UploadQuota:
    """Return the storage limit of a client."""
    return JUDGES if who.is_judge else ADMINS


def uploads_of(app: FastAPI) -> UploadStore:
    """Return the application's uploads."""
    uploads: UploadStore = app.state.uploads
    return uploads
