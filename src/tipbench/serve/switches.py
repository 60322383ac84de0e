"""Switches of the policy server: the active policy, the enabled shadows, and the record of checks and promotions.

`tipbench promote` and the panel may change the switches while the server runs; it reads them every few seconds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tipbench.errors import UsageError
from tipbench.serve.policy import DEFAULT_POLICY, POLICIES, check_policy
from tipbench.sqlite import Database

# Policies by the name of their shadow, such as egreedy-v2-shadow
SHADOWS = {f"{name.replace('/', '-')}-shadow": name for name in POLICIES if name != DEFAULT_POLICY}
REREAD_S = 5.0  # how often a running server reads the switches again
_ACTIVE = "active"  # row of the table `switches`; the other rows are NAME and counts:NAME for each shadow
_CHANGE_KINDS = ("apply", "unchecked", "undo")  # kinds of promotions that change the active policy


@dataclass(frozen=True)
class ShadowCounts:
    """Numbers of calls of one shadow."""

    calls: int = 0  # including dropped and failed ones
    dropped: int = 0  # not scored or not logged: a queue was full, or the server stopped
    errors: int = 0

    def __add__(self, more: ShadowCounts) -> ShadowCounts:
        return ShadowCounts(self.calls + more.calls, self.dropped + more.dropped, self.errors + more.errors)


@dataclass(frozen=True)
class Promotion:
    """A recorded change of the active policy from `baseline` to `candidate`, or a check that compares the two."""

    id: int
    kind: str  # check, apply, unchecked (a change without a check) or undo
    at: float  # Unix timestamp
    user: str  # the operator, not a user of tips
    candidate: str
    baseline: str
    passed: bool | None  # result of a check; None for other kinds, and for a check without enough data
    body: Mapping[str, Any]  # check: its verdict; apply: the id of the check; unchecked: the reason


class Switches:
    """Reads and changes the switches."""

    def __init__(self, database: Database, *, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock
        self._active = DEFAULT_POLICY
        self._shadows: dict[str, bool] = {}
        self._read_at: float | None = None  # monotonic time; None: read before the next use

    def active(self) -> str:
        """Return the active policy."""
        self._refresh()
        return self._active

    def shadows(self) -> dict[str, bool]:
        """Return whether each shadow is enabled; all are disabled by default."""
        self._refresh()
        return self._shadows

    def set_shadow(self, name: str, enabled: bool) -> None:
        """Enable or disable a shadow."""
        if name not in SHADOWS:
            raise UsageError(f"There is no shadow {name!r}. Choose one of {', '.join(SHADOWS)}.")
        self._set(name, "on" if enabled else "off")

    def add_check(self, verdict: Mapping[str, Any], *, user: str) -> Promotion:
        """Record the verdict of a check: JSON values, with at least `candidate`, `baseline` and `passed`."""
        return self._record(
            "check",
            user=user,
            candidate=verdict["candidate"],
            baseline=verdict["baseline"],
            body=dict(verdict),
            passed=verdict["passed"],
        )

    def passed_check(
        self, candidate: str, baseline: str, versions: Mapping[str, Any], *, max_age_s: float
    ) -> Promotion | None:
        """Return the newest check of these policies and versions if it passed within the last `max_age_s` seconds.

        `versions` are those of the policies, their priors, the simulated personas and tipbench. Searches the newest 100
        checks of all policies; an older one is not found.
        """
        for check in self.promotions(kind="check", limit=100):
            same_policies = (check.candidate, check.baseline) == (candidate, baseline)
            if same_policies and check.body.get("versions") == versions:
                is_recent = self._clock() - check.at <= max_age_s
                return check if check.passed and is_recent else None
        return None

    def apply(self, policy: str, *, user: str, check: Promotion) -> Promotion:
        """Make a policy active after a check."""
        return self._switch("apply", policy, user=user, body={"check": check.id})

    def switch_unchecked(self, policy: str, *, user: str, reason: str) -> Promotion:
        """Make a policy active without a check; the reason is recorded."""
        if not reason.strip():
            raise UsageError("A change without a check needs a reason, as in --unchecked 'trial on staging'.")
        return self._switch("unchecked", policy, user=user, body={"reason": reason})

    def undo(self, *, user: str) -> Promotion:
        """Go back to the policy before the last change that is not undone yet; raises UsageError without one."""
        earlier_policies: list[str] = []
        for promotion in reversed(self.promotions(limit=-1)):
            if promotion.kind == "undo":
                earlier_policies.pop()
            elif promotion.kind in _CHANGE_KINDS:
                earlier_policies.append(promotion.baseline)
        if not earlier_policies:
            raise UsageError(f"There is nothing to undo: {self.active()} is active, and no switch is left to undo.")
        return self._switch("undo", earlier_policies[-1], user=user, body={})

    def promotions(self, *, limit: int = 100, kind: str | None = None) -> list[Promotion]:
        """Return the newest `limit` rows of the record, newest first; −1 returns all rows."""
        rows = self._database.execute(
            "SELECT * FROM promotions WHERE ? IS NULL OR kind = ? ORDER BY id DESC LIMIT ?", (kind, kind, limit)
        )
        promotions = []
        for row in rows:
            passed = None if row["passed"] is None else bool(row["passed"])  # SQLite has no booleans
            fields: dict[str, Any] = {**dict(row), "passed": passed, "body": json.loads(row["body"])}
            promotions.append(Promotion(**fields))
        return promotions

    def shadow_counts(self, name: str) -> ShadowCounts:
        """Return the saved counts of a shadow."""
        rows = self._database.execute("SELECT value FROM switches WHERE name = ?", (f"counts:{name}",))
        return ShadowCounts(**json.loads(rows[0]["value"])) if rows else ShadowCounts()

    def add_shadow_counts(self, name: str, more: ShadowCounts) -> None:
        """Add to the saved counts of a shadow."""
        self._set(f"counts:{name}", json.dumps(vars(self.shadow_counts(name) + more)))

    def _switch(self, kind: str, policy: str, *, user: str, body: Mapping[str, Any]) -> Promotion:
        check_policy(policy)
        self._read_at = None  # so that `active` reads again: another process may have switched
        return self._record(kind, user=user, candidate=policy, baseline=self.active(), body=body)

    def _record(
        self,
        kind: str,
        *,
        user: str,
        candidate: str,
        baseline: str,
        body: Mapping[str, Any],
        passed: bool | None = None,
    ) -> Promotion:
        at = self._clock()
        with self._database.transaction() as db:
            row_id = db.execute(
                "INSERT INTO promotions (kind, at, user, candidate, baseline, passed, body) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                (kind, at, user, candidate, baseline, passed, json.dumps(body, allow_nan=False)),
            ).lastrowid
            if kind in _CHANGE_KINDS:
                db.execute("INSERT OR REPLACE INTO switches VALUES (?, ?)", (_ACTIVE, candidate))
        self._read_at = None
        assert row_id is not None  # noqa: S101 - an INSERT sets it
        return Promotion(row_id, kind, at, user, candidate, baseline, passed, body)

    def _set(self, name: str, value: str) -> None:
        with self._database.transaction() as db:
            db.execute("INSERT OR REPLACE INTO switches VALUES (?, ?)", (name, value))
        self._read_at = None

    def _refresh(self) -> None:
        now = time.monotonic()
        read_at = self._read_at  # copied, because another thread may set it to None
        if read_at is not None and now - read_at < REREAD_S:
            return
        values = {row["name"]: row["value"] for row in self._database.execute("SELECT name, value FROM switches")}
        self._active = values.get(_ACTIVE, DEFAULT_POLICY)
        self._shadows = {name: values.get(name) == "on" for name in SHADOWS}
        self._read_at = now
