"""Stores of the policy server written by earlier versions must stay usable; tests/data/README.md describes them.

Only commands and HTTP requests are used here, because the data outlives the modules that wrote it.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections import Counter
from pathlib import Path

import pytest

from support.command import tipbench, tipbench_json
from support.policy_site import serve_process

pytestmark = pytest.mark.process
DATA = Path(__file__).parent / "data" / "2026-11-serve"
EXPECTED = json.loads((DATA / "expected.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def recorded_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home folder of the server that wrote the data."""
    home = tmp_path_factory.mktemp("recorded")
    (home / "serve").mkdir(mode=0o700)
    shutil.copy(DATA / "serve.secret", home)
    (home / "serve.secret").chmod(0o600)
    database = sqlite3.connect(home / "serve" / "serve.sqlite")
    database.executescript((DATA / "serve.sqlite.sql").read_text("utf-8"))
    database.close()
    (home / "serve" / "serve.sqlite").chmod(0o600)
    return home


def test_the_log_is_rebuilt_to_the_same_bytes_and_exported_with_all_entries(
    recorded_home: Path, tmp_path: Path
) -> None:
    tipbench("state", "rebuild", home=recorded_home)
    tipbench("state", "export", "--dir", str(tmp_path / "state"), home=recorded_home)
    exported = {path.name: path.read_bytes() for path in (tmp_path / "state").iterdir()}
    assert exported == {path.name: path.read_bytes() for path in (DATA / "state").iterdir()}
    lines = [json.loads(line) for line in tipbench("events", "export", home=recorded_home).stdout.splitlines()]
    assert dict(Counter(str(line["signal"]) for line in lines)) == EXPECTED["signals"]
    assert len(tipbench("events", "export", "--format", "dsjson", home=recorded_home).stdout.splitlines()) == 53
    arguments = ("events", "evaluate", "--policy", "egreedy/v3", "--logged-by", "egreedy/v1")
    found = tipbench_json(*arguments, "--catalogue", str(DATA / "catalogue.toml"), home=recorded_home)
    assert (found["decisions"], found["users"]) == (EXPECTED["decisions"], 1)
    assert [row["scale"] for row in found["validity"]] == ["composite", "relevance", "actionability", "tone"]


def test_a_server_continues_with_the_store(recorded_home: Path) -> None:
    options = ("--catalogue", str(DATA / "catalogue.toml"), "--prior", str(DATA / "prior.json"))
    with serve_process(recorded_home, *options) as (client, _):
        policies = client.get("/policies").json()
        assert (policies["active"], policies["shadows"]["egreedy-v2-shadow"]["enabled"]) == ("egreedy/v2", True)
        assert policies["shadows"]["linucb-shadow"]["enabled"] is False
        for row in EXPECTED["stats"]:
            stats = client.get(f"/stats/{row['policy']}", params={"user_id": row["user"]}).json()
            assert {key: stats[key] for key in row["answer"]} == pytest.approx(row["answer"]), row
            assert stats["theta"] == pytest.approx(row["theta"], abs=1e-9), row
        repeated = {"user_id": "ana", "event_id": "rec1", "at": "2026-11-17T09:05:00-05:00"}
        assert client.post("/recommend", json=repeated).json() == EXPECTED["rec1"]
        for user, event, status in (("eve", "e0", 404), ("ben", "b0", 409), ("ana", "late", 409)):
            reward = {"user_id": user, "event_id": event, "reward": 0.5}
            assert client.post("/reward", json=reward).status_code == status, event
    undone = tipbench_json("promote", "undo", home=recorded_home)
    assert (undone["candidate"], undone["baseline"]) == ("egreedy/v1", "egreedy/v2")
