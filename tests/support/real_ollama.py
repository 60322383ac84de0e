"""A real Ollama for tests: finds or builds the binary, starts it on a free port, imports small models.

`python tests/support/real_ollama.py` prints the binary's path and builds it if it is missing (with Go and gcc).
"""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import itertools
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

OLLAMA_VERSION = "0.11.4"
MODELFILE = """FROM {gguf}
TEMPLATE \"\"\"{{{{- range .Messages }}}}<|im_start|>{{{{ .Role }}}}
{{{{ .Content }}}}<|im_end|>
{{{{ end }}}}<|im_start|>assistant
\"\"\"
PARAMETER stop <|im_end|>
PARAMETER num_thread 1
"""  # threads of a runner spin while they wait: two take many times as long on a busy machine
BUILD_COMMAND = "python tests/support/real_ollama.py"
# ggml calls its AMX code on a CPU that has it, but Ollama's Go package leaves that code out: linking would fail.
_NO_AMX = " -mno-amx-tile -mno-amx-int8 -mno-amx-bf16"


class OllamaMissingError(Exception):
    """No usable binary; the message has the reason and the next step."""


def cache_dir() -> Path:
    """The cache that test runs share: TIPBENCH_TEST_CACHE, else .cache in the repository."""
    root = Path(__file__).resolve().parents[2]
    return Path(os.environ.get("TIPBENCH_TEST_CACHE") or root / ".cache").absolute()


def _cpu_info() -> list[str]:
    info = Path("/proc/cpuinfo")
    return info.read_text().splitlines() if info.exists() else []


def _cpu_has_amx() -> bool:
    return any("amx_tile" in line.split() for line in _cpu_info() if line.startswith("flags"))


def cpu_key() -> str:
    """An identifier of the kind of CPU: a binary made with -march=native does not run on another."""
    facts = sorted({line for line in _cpu_info() if line.startswith(("model name", "flags", "Features", "CPU part"))})
    seed = "\n".join(facts) or platform.processor()
    return f"{platform.machine()}-{hashlib.sha256(seed.encode()).hexdigest()[:10]}"


def cached_binary() -> Path:
    """The path of the built binary, which may not exist."""
    return cache_dir() / f"ollama-{OLLAMA_VERSION}-{cpu_key()}" / "ollama"


def find_binary() -> Path | None:
    """TIPBENCH_OLLAMA, else a supported `ollama` on PATH, else the one in the cache."""
    named = os.environ.get("TIPBENCH_OLLAMA")
    if named:
        if not is_supported(Path(named)):
            raise OllamaMissingError(f"TIPBENCH_OLLAMA is {named}, which is not an Ollama from 0.11.4 to below 0.30.")
        return Path(named)
    on_path = shutil.which("ollama")
    if on_path and is_supported(Path(on_path)):
        return Path(on_path)
    return cached_binary() if is_supported(cached_binary()) else None


def is_supported(binary: Path) -> bool:
    """Whether the tests support this version: from 0.30 on the server needs a second program and differs."""
    if not os.access(binary, os.X_OK):
        return False
    # An unused port, because the command prints the version of a running server.
    env = os.environ | {"OLLAMA_HOST": "127.0.0.1:1"}
    try:
        done = subprocess.run([binary, "--version"], capture_output=True, text=True, env=env, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    found = re.search(r"version is (\d+)\.(\d+)\.(\d+)", done.stdout + done.stderr)
    return found is not None and (0, 11, 4) <= tuple(int(part) for part in found.groups()) < (0, 30, 0)


def build_binary() -> Path:
    """Build Ollama into the cache, once; takes about three minutes with Go and gcc."""
    target = cached_binary()
    with _locked(target.parent):
        if is_supported(target):
            return target
        go = shutil.which("go")
        if go is None or not (shutil.which("gcc") or shutil.which("clang")):
            raise OllamaMissingError(f"Ollama {OLLAMA_VERSION} must be built, which needs Go and a C compiler.")
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            optimise = f"-O3 -march=native{_NO_AMX if _cpu_has_amx() else ''}"
            flags = {"CGO_CFLAGS": optimise, "CGO_CXXFLAGS": optimise, "GOBIN": folder}
            version = f"-X=github.com/ollama/ollama/version.Version={OLLAMA_VERSION}"
            command = [go, "install", "-ldflags", version, f"github.com/ollama/ollama@v{OLLAMA_VERSION}"]
            done = subprocess.run(command, env=os.environ | flags, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise OllamaMissingError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
            (Path(folder) / "ollama").rename(target)
    return target


def ollama_binary() -> Path:
    """The binary for a test. Without one the test is skipped, on CI it fails."""
    import pytest

    in_ci = os.environ.get("CI") == "true"
    try:
        found = find_binary()
        if found is None and (in_ci or os.environ.get("TIPBENCH_BUILD_OLLAMA") == "1"):
            found = build_binary()
    except OllamaMissingError as exc:
        if in_ci or os.environ.get("TIPBENCH_OLLAMA"):
            pytest.fail(str(exc), pytrace=False)
        pytest.skip(str(exc))
    if found is None:
        pytest.skip(f"no Ollama {OLLAMA_VERSION} here; `{BUILD_COMMAND}` builds one")
    return found


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def renamed_copy(gguf: Path, name: str) -> Path:
    """The same weights with another general.name, so another blob; made once and cached."""
    folder = cache_dir() / "gguf-variants" / sha256_of(gguf)[:16]
    target = folder / f"{name}.gguf"
    with _locked(folder):
        if not target.exists():
            part = folder / f"{name}.part.gguf"
            command = [sys.executable, "-m", "gguf.scripts.gguf_new_metadata", "--force", "--general-name"]
            subprocess.run([*command, f"tipbench {name}", gguf, part], check=True, capture_output=True)
            part.rename(target)
    return target


class RealOllama:
    """`ollama serve` on a free port, with its models under `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.binary = ollama_binary()
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def start(self) -> Self:
        """Start the server; returns once it responds."""
        (self.folder / "models" / "blobs").mkdir(parents=True, exist_ok=True)
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [self.binary, "serve"],
                env=self._env(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + 30
        while not self._responds():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"ollama serve did not start:\n{self.log_file.read_text()[-2000:]}")
            time.sleep(0.05)
        return self

    def stop(self) -> None:
        """Send SIGTERM, and SIGKILL after five seconds."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
        self.kill()

    def kill(self) -> None:
        """Send SIGKILL to the server and its runners."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)
        self._process = None

    def restart(self) -> None:
        """Start it again on the same port; kills it first if it still runs."""
        self.kill()
        self.start()

    @property
    def log_file(self) -> Path:
        return self.folder / "serve.log"

    @property
    def loads(self) -> int:
        """The number of loads since the first start, from the server's log."""
        return self.log_file.read_text("utf-8", "replace").count("llama runner started")

    def create(self, name: str, gguf: Path) -> None:
        """Import a GGUF as a chat model in ChatML."""
        blob = self.folder / "models" / "blobs" / f"sha256-{sha256_of(gguf)}"
        if not blob.exists():  # an existing blob is not uploaded: a link saves 100 MB per model and server
            blob.symlink_to(gguf.resolve())
        modelfile = self.folder / "Modelfile"
        modelfile.write_text(MODELFILE.format(gguf=gguf.resolve()))
        command = [str(self.binary), "create", name, "-f", str(modelfile)]
        done = subprocess.run(command, env=self._env(), capture_output=True, text=True, timeout=120, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"ollama create {name} failed: {done.stderr[-1000:]}")

    def create_three_models(self, gguf: Path) -> list[str]:
        """Import three models of three different blobs: models of one blob would share a runner."""
        names = ["alpha", "beta", "gamma"]
        for name in names:
            self.create(f"{name}:135m", renamed_copy(gguf, name))
        return [f"{name}:135m" for name in names]

    def _env(self) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("OLLAMA_") and "proxy" not in k.lower()}
        own = {"OLLAMA_HOST": f"127.0.0.1:{self.port}", "OLLAMA_MODELS": str(self.folder / "models")}
        return inherited | own | {"OLLAMA_NOPRUNE": "1", "HOME": str(self.folder)}

    def _responds(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/api/version", timeout=2) as response:
                return bool(response.status == 200)
        except OSError:
            return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class PsWatcher:
    """Polls /api/ps at an interval and records its content; omits times without a response."""

    def __init__(self, url: str, interval_s: float = 0.01) -> None:
        address = urlsplit(url)
        self._host, self._port = address.hostname or "127.0.0.1", address.port or 11434
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ps-watcher", daemon=True)
        self.samples: list[tuple[float, tuple[str, ...]]] = []  # seconds since the epoch, and the models' names

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(10)

    @property
    def max_resident(self) -> int:
        return max((len(names) for _, names in self.samples), default=0)

    @property
    def all_models(self) -> set[str]:
        """All models that were listed at any time."""
        return {name for _, names in self.samples for name in names}

    @property
    def largest_gap_s(self) -> float:
        return max((b[0] - a[0] for a, b in itertools.pairwise(self.samples)), default=0.0)

    def _watch(self) -> None:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=5)
        while not self._stop.is_set():
            try:
                connection.request("GET", "/api/ps")
                models = json.load(connection.getresponse())["models"]
                self.samples.append((time.time(), tuple(str(model["name"]) for model in models)))
            except (OSError, http.client.HTTPException, ValueError, KeyError):
                connection.close()
            self._stop.wait(self._interval_s)
        connection.close()


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{find_binary() or build_binary()}\n")
    except OllamaMissingError as missing:
        sys.exit(str(missing))
