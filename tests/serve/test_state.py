"""Stored state: one contract for both stores, and a cache of the log that can always be rebuilt to the same bytes."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import pytest

from support.serving import learn, open_service, reward_request, score_request
from tipbench.errors import EventConflict, EventNotFound, LockHeld, StateError, TipbenchError, UsageError
from tipbench.serve.event_log import FOLDER, open_database, read_entries
from tipbench.serve.policy import POLICIES
from tipbench.serve.state import DOCUMENT_NAMES, SCHEMA, TALLIES
from tipbench.serve.state_store import (
    STATE_FOLDER,
    STORE_KINDS,
    export_state,
    import_state,
    open_state,
    rebuild_state,
)

A, B = "a" * 32, "b" * 32


@pytest.fixture(params=STORE_KINDS)
def state(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def load_documents(home: Path, state: str) -> dict[tuple[str, str], bytes]:
    """Load all documents of a store from disk."""
    with closing(open_database(home)) as database:
        store = open_state(home, state, database, database)
        return {(user, name): body for user in store.users() for name, body in store.load(user).items()}


def test_an_unknown_kind_of_store_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="sqlite or files, not in 'redis'"), open_service(tmp_path, store_kind="redis"):
        pass
    with open_service(tmp_path):
        pass  # the lock is free again


# State as a cache of the log


def test_r09_each_user_and_policy_has_a_separate_file(tmp_path: Path) -> None:
    with open_service(tmp_path, store_kind="files") as service:
        for policy in POLICIES:
            learn(service, policy, 2, prefix=policy.replace("/", "-"))
        service.flush()
        key = service.keys.hash_user_id("u1")
        suffixes = ("_egreedy", "_egreedy_v2", "_egreedy_v3", "_linucb", "_tallies")
        folder = tmp_path / FOLDER / STATE_FOLDER
        assert sorted(path.name for path in folder.iterdir()) == [f"{key}{suffix}.json" for suffix in suffixes]
        content = json.loads((folder / f"{key}_egreedy_v2.json").read_bytes())
        assert (content["schema"], content["name"], content["n"], len(content["b"])) == (1, "egreedy/v2", 2, 12)
        service.reset("u1")
        assert list(folder.iterdir()) == []


def write_history(home: Path, state: str) -> None:
    """Write a history with several users and policies, a reset, a policy that starts late, and an erase."""
    with open_service(home, store_kind=state) as service:
        learn(service, "egreedy/v1", 7)
        learn(service, "egreedy/v3", 5, prefix="x")
        learn(service, "linucb", 4, "u2")
        service.flush()
        service.reset("u1")
        learn(service, "egreedy/v2", 6, prefix="y")
        learn(service, "egreedy/v1", 3, "u3")
        service.reset("u3", erase=True)
        learn(service, "linucb", 2, "u2", prefix="z")


def test_a_rebuild_gives_the_same_bytes_resets_included(tmp_path: Path, state: str) -> None:
    write_history(tmp_path, state)
    before = load_documents(tmp_path, state)
    assert len(before) == 4  # v2, linucb and the tallies of two users
    assert rebuild_state(tmp_path, store_kind=state) == 2
    assert load_documents(tmp_path, state) == before


def test_a_rebuild_after_concurrent_rewards_resets_and_flushes_gives_the_same_bytes(tmp_path: Path, state: str) -> None:
    with open_service(tmp_path, store_kind=state) as service:

        def work(thread: int) -> None:
            rng = random.Random(thread)
            for number in range(25):
                user, event = f"u{rng.randrange(3)}", f"{thread}-{number}"
                policy = rng.choice(list(POLICIES))
                service.score(policy, score_request(user, event_id=event))
                with suppress(EventConflict, EventNotFound):  # another thread may have reset the user since
                    service.reward(policy, reward_request(event, user, reward=rng.uniform(-1, 1)))
                if rng.random() < 0.1:
                    service.reset(user, erase=rng.random() < 0.5)
                elif rng.random() < 0.2:
                    service.flush()

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(work, range(6)))
    before = load_documents(tmp_path, state)
    assert before
    rebuild_state(tmp_path, store_kind=state)
    assert load_documents(tmp_path, state) == before


def test_both_stores_have_the_same_bytes_and_can_replace_each_other(tmp_path: Path) -> None:
    write_history(tmp_path, "sqlite")
    rebuild_state(tmp_path, store_kind="files")
    assert load_documents(tmp_path, "files") == load_documents(tmp_path, "sqlite")
    with open_service(tmp_path, store_kind="files") as service:
        learn(service, "linucb", 3, "u2", prefix="more")
    with open_service(tmp_path, store_kind="sqlite") as service:  # its documents are older than the log
        assert service.stats("linucb", "u2")["n"] == 9
    assert load_documents(tmp_path, "sqlite") == load_documents(tmp_path, "files")


@pytest.mark.parametrize("lost", [(), *((name,) for name in DOCUMENT_NAMES), DOCUMENT_NAMES])
def test_documents_that_are_missing_or_older_than_the_log_catch_up(
    tmp_path: Path, state: str, lost: tuple[str, ...]
) -> None:
    """A crash may lose the last seconds of writes; documents are written in order, tallies last."""
    with open_service(tmp_path, store_kind=state) as service:
        for policy in POLICIES:
            learn(service, policy, 2, prefix=f"a{policy[-1]}")
    old = load_documents(tmp_path, state)
    with open_service(tmp_path, store_kind=state) as service:
        for policy in POLICIES:
            learn(service, policy, 2, prefix=f"b{policy[-1]}")
    new = load_documents(tmp_path, state)
    with closing(open_database(tmp_path)) as database:
        store = open_state(tmp_path, state, database, database)
        late = {**dict.fromkeys(lost), TALLIES: None} if lost else {}
        store.save({(user, name): old[user, name] for user, name in old if name in late})
    with open_service(tmp_path, store_kind=state) as service:
        assert [service.stats(policy, "u1")["n"] for policy in POLICIES] == [4, 4, 4, 4]
    assert load_documents(tmp_path, state) == new


@pytest.mark.parametrize(
    "damage",
    [
        lambda body: body[: len(body) // 2],
        lambda _: b"",
        lambda body: b"\xff" + body,
        lambda body: body.replace(b'"b":[', b'"b":[0.5,'),
        lambda body: body.replace(b'"n":3', b'"n":-3'),
        lambda body: body.replace(b'"user":"', b'"user":"f'),
        lambda body: body.replace(b'"reward_sum":', b'"reward_sum":1e999,"x":'),
        lambda _: b"[]",
        lambda _: b'{"schema":1}',
        lambda body: re.sub(rb'"b":\[[^,]*', b'"b":[1e9', body),
        lambda body: re.sub(rb'"a":\[[^,]*', b'"a":[-3.0', body),
    ],
    ids=[
        *("half", "empty", "not-utf8", "too-long", "negative", "other-user", "not-finite", "list", "bare"),
        *("impossible-sum", "not-a-sum-of-squares"),
    ],
)
def test_a_corrupt_document_is_set_aside_and_rebuilt_from_the_log(tmp_path: Path, state: str, damage) -> None:  # type: ignore[no-untyped-def]
    with open_service(tmp_path, store_kind=state) as service:
        learn(service, "egreedy/v1", 3)
        learn(service, "linucb", 3, prefix="l")
        key = service.keys.hash_user_id("u1")
    before = load_documents(tmp_path, state)
    with closing(open_database(tmp_path)) as database:
        open_state(tmp_path, state, database, database).save({(key, "egreedy/v1"): damage(before[key, "egreedy/v1"])})
    with open_service(tmp_path, store_kind=state) as service:
        assert service.stats("egreedy/v1", "u1")["n"] == 3
        assert service.stats("linucb", "u1")["n"] == 3
    assert load_documents(tmp_path, state) == before


@pytest.mark.parametrize("change", [{"schema": SCHEMA + 1}, {"features": "features-v1/2"}])
def test_an_unknown_schema_is_refused_and_never_overwritten(
    tmp_path: Path, state: str, change: dict[str, object]
) -> None:
    with open_service(tmp_path, store_kind=state) as service:
        learn(service, "egreedy/v1", 3)
        service.score("egreedy/v1", score_request(event_id="open"))
        key = service.keys.hash_user_id("u1")
    newer = json.dumps({**json.loads(load_documents(tmp_path, state)[key, "egreedy/v1"]), **change}).encode()
    with closing(open_database(tmp_path)) as database:
        open_state(tmp_path, state, database, database).save({(key, "egreedy/v1"): newer})
    with open_service(tmp_path, store_kind=state) as service:
        for attempt in (
            lambda: service.score("egreedy/v1", score_request()),
            lambda: service.reward(None, reward_request("open")),
            lambda: service.reset("u1"),
        ):
            with pytest.raises(StateError, match="was left as it is"):
                attempt()
        learn(service, "egreedy/v1", 1, "u2")  # other users are served
    with pytest.raises(StateError):
        rebuild_state(tmp_path, store_kind=state)
    assert load_documents(tmp_path, state)[key, "egreedy/v1"] == newer


def test_a_full_disk_for_state_files_loses_nothing(tmp_path: Path) -> None:
    with open_service(tmp_path, store_kind="files") as service:
        learn(service, "egreedy/v1", 3)
        service.flush()
        learn(service, "egreedy/v1", 3, prefix="x")
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
        try:
            with pytest.raises(TipbenchError, match="cannot be written"):
                service._store.save({(A, "egreedy/v1"): b"x" * 1000})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        service.flush()
    assert [
        json.loads(body)["n"] for (_, name), body in load_documents(tmp_path, "files").items() if name != TALLIES
    ] == [6]


def test_state_is_never_ahead_of_the_log(tmp_path: Path) -> None:
    with open_service(tmp_path, store_kind="files") as service, ThreadPoolExecutor(1) as pool:
        learn(service, "egreedy/v1", 3)
        service.score("egreedy/v1", score_request(event_id="open"))
        service.flush()
        before = load_documents(tmp_path, "files")
        with service.log.write_database.transaction():  # keeps the writer waiting
            service.reward(None, reward_request("open"))
            service.log._writer.execute("INSERT INTO nowhere VALUES (1)", ())  # fails the commit of the reward
            flush = pool.submit(service.flush)  # unless the thread that flushes every second is faster
            deadline = time.monotonic() + 60
            while service._changed_users and time.monotonic() < deadline:
                time.sleep(0.001)
        assert isinstance(flush.exception(), TipbenchError | None)
        with service._flush_lock:
            pass  # the other flush has ended as well
        assert load_documents(tmp_path, "files") == before
        assert service.stats("egreedy/v1", "u1")["n"] == 3


# Export and import


@pytest.mark.parametrize("target", STORE_KINDS)
def test_an_export_is_imported_into_another_home_with_the_same_secret_and_survives_a_rebuild(
    tmp_path: Path, state: str, target: str
) -> None:
    source, other, files = tmp_path / "source", tmp_path / "other", tmp_path / "files"
    write_history(source, state)
    assert export_state(source, files, store_kind=state) == len(load_documents(source, state))
    other.mkdir()
    (other / "serve.secret").write_bytes((source / "serve.secret").read_bytes())
    assert import_state(other, files, store_kind=target) == 4
    imported = load_documents(other, target)
    rebuild_state(other, store_kind=target)
    assert load_documents(other, target) == imported

    def without_seq(found: dict[tuple[str, str], bytes]) -> dict[tuple[str, str], object]:
        return {key: {**json.loads(body), "seq": 0} for key, body in found.items()}

    assert without_seq(imported) == without_seq(load_documents(source, state))
    with open_service(source, store_kind=state) as first, open_service(other, store_kind=target) as second:
        assert first.stats("linucb", "u2")["theta"] == second.stats("linucb", "u2")["theta"]


def test_an_export_has_what_the_log_has_while_the_server_runs(tmp_path: Path) -> None:
    with open_service(tmp_path / "home") as service:
        learn(service, "egreedy/v1", 3)
        export_state(tmp_path / "home", tmp_path / "files")
        key = service.keys.hash_user_id("u1")
        assert json.loads((tmp_path / "files" / f"{key}_egreedy.json").read_bytes())["n"] == 3
        with pytest.raises(LockHeld, match="in use by tipbench serve"):
            import_state(tmp_path / "home", tmp_path / "files")
        with pytest.raises(LockHeld):
            rebuild_state(tmp_path / "home")
    with pytest.raises(UsageError, match="new or empty folder"):
        export_state(tmp_path / "home", tmp_path / "files")


@pytest.mark.parametrize("folder", ["a_file", "a_file/folder"])
def test_an_export_to_an_unusable_folder_names_that_folder_and_not_the_home(tmp_path: Path, folder: str) -> None:
    write_history(tmp_path / "home", "sqlite")
    (tmp_path / "a_file").write_bytes(b"")
    with pytest.raises(UsageError, match=r"a_file.*Choose another folder with --dir") as caught:
        export_state(tmp_path / "home", tmp_path / folder)
    assert "TIPBENCH_HOME" not in str(caught.value)


def impossible_document(dim: int = 7) -> bytes:
    """A document that would make every score of its user fail: A is not a sum of squares."""
    head = {"schema": SCHEMA, "user": B, "name": "linucb", "seq": 1, "features": "features-v1/1", "prior": None}
    sums = {"n": 5, "reward_sum": 1.0, "a": [-5.0] * (dim * (dim + 1) // 2), "b": [0.0] * dim}
    return json.dumps({**head, **sums}).encode()


@pytest.mark.parametrize("content", [b"{", json.dumps({"schema": 2}).encode(), impossible_document()])
def test_an_import_with_an_invalid_file_changes_nothing(tmp_path: Path, content: bytes) -> None:
    with open_service(tmp_path / "home") as service:
        learn(service, "egreedy/v1", 3)
    export_state(tmp_path / "home", tmp_path / "files")
    before = load_documents(tmp_path / "home", "sqlite")
    (tmp_path / "files" / f"{B}_linucb.json").write_bytes(content)
    with pytest.raises(StateError):
        import_state(tmp_path / "home", tmp_path / "files")
    assert load_documents(tmp_path / "home", "sqlite") == before
    with closing(open_database(tmp_path / "home")) as database:
        assert not list(read_entries(database, kinds=("import",)))


# kill -9


@pytest.mark.process
@pytest.mark.parametrize("change", ["reward", "reset", "erase", "import"])
def test_kill_at_each_step_of_a_write_leaves_the_old_or_the_new_state(state: str, change: str) -> None:
    """`killed_writer.py` kills a writer at each line that writes log or state, and checks what it leaves."""
    script = Path(__file__).with_name("killed_writer.py")
    done = subprocess.run(
        [sys.executable, script, state, change],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout)
    assert summary["steps"] > 25
    assert summary["old"] > 0
    assert summary["new"] > 0
