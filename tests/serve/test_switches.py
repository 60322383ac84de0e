"""Switches and promotions: rows of the serve store that other processes may read and write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from support.clock import Clock
from tipbench.errors import UsageError
from tipbench.serve.event_log import open_database
from tipbench.serve.switches import Switches

DAY = 86_400.0
VERSIONS = {"egreedy/v3": "1", "egreedy/v1": "2"}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def switches(tmp_path: Path, clock: Clock) -> Iterator[Switches]:
    with closing(open_database(tmp_path)) as database:
        yield Switches(database, clock=clock)


def make_verdict(**changes: Any) -> dict[str, Any]:
    return {
        "candidate": "egreedy/v3",
        "baseline": "egreedy/v1",
        "passed": True,
        "clauses": [],
        "simulation_only": True,
        "versions": VERSIONS,
        **changes,
    }


def has_passed_check(switches: Switches, **changes: Any) -> bool:
    wanted = {
        "candidate": "egreedy/v3",
        "baseline": "egreedy/v1",
        "versions": VERSIONS,
        "max_age_s": 7 * DAY,
        **changes,
    }
    return switches.passed_check(**wanted) is not None


def test_the_default_policy_is_active_until_a_switch_and_undo_goes_back(switches: Switches) -> None:
    assert switches.active() == "egreedy/v1"
    check = switches.add_check(make_verdict(), user="ada")
    switches.apply("egreedy/v3", user="ada", check=check)
    switches.switch_unchecked("linucb", user="bob", reason="trial")
    assert switches.active() == "linucb"
    assert switches.undo(user="cyd").candidate == "egreedy/v3"
    assert switches.undo(user="cyd").candidate == "egreedy/v1"
    with pytest.raises(UsageError, match="nothing to undo"):
        switches.undo(user="cyd")
    record = [(row.kind, row.user, row.candidate, row.baseline, row.passed) for row in switches.promotions()]
    assert record == [
        ("undo", "cyd", "egreedy/v1", "egreedy/v3", None),
        ("undo", "cyd", "egreedy/v3", "linucb", None),
        ("unchecked", "bob", "linucb", "egreedy/v3", None),
        ("apply", "ada", "egreedy/v3", "egreedy/v1", None),
        ("check", "ada", "egreedy/v3", "egreedy/v1", True),
    ]
    assert switches.promotions(limit=1, kind="check")[0].body == make_verdict()


def test_a_check_counts_only_if_it_passed_and_is_the_newest_of_these_versions(switches: Switches, clock: Clock) -> None:
    assert not has_passed_check(switches)
    switches.add_check(make_verdict(), user="ada")
    clock.now += 7 * DAY
    assert has_passed_check(switches)
    assert not has_passed_check(switches, max_age_s=6 * DAY)
    assert not has_passed_check(switches, versions={**VERSIONS, "egreedy/v3": "other"})
    assert not has_passed_check(switches, candidate="egreedy/v2")
    switches.add_check(make_verdict(passed=False), user="ada")
    assert not has_passed_check(switches)


def test_another_process_sees_a_switch_once_it_reads_again(
    switches: Switches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_database(tmp_path)) as database:
        server = Switches(database)
        assert server.active() == "egreedy/v1"
        switches.switch_unchecked("linucb", user="ada", reason="trial")
        switches.set_shadow("linucb-shadow", True)
        monkeypatch.setattr("tipbench.serve.switches.REREAD_S", 0.0)
        assert server.active() == "linucb"
        assert server.shadows() == {"egreedy-v2-shadow": False, "egreedy-v3-shadow": False, "linucb-shadow": True}


def test_unknown_names_and_missing_reasons_are_usage_errors(switches: Switches) -> None:
    with pytest.raises(UsageError, match="no policy 'egreedy/v9'"):
        switches.switch_unchecked("egreedy/v9", user="ada", reason="trial")
    with pytest.raises(UsageError, match="needs a reason"):
        switches.switch_unchecked("linucb", user="ada", reason=" ")
    with pytest.raises(UsageError, match="no shadow 'v2'"):
        switches.set_shadow("v2", True)
    assert switches.promotions() == []


def test_a_check_without_enough_data_is_stored_as_neither_passed_nor_failed(switches: Switches) -> None:
    switches.add_check(make_verdict(passed=None), user="ada")
    assert switches.promotions(kind="check")[0].passed is None
    assert not has_passed_check(switches)
