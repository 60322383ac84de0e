"""The policy service: scores requests, learns from rewards, resets users and returns statistics.

An event is identified by user and event id, and is served by one policy. Every change of state is an entry of the event
log. A change takes effect in memory as soon as its entry is queued for the commit. Changed states are written to disk
once a second. If a commit fails, the state in memory is discarded and loaded from disk again.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tipbench.errors import EventConflict, EventNotFound, TipbenchError
from tipbench.serve.event_log import (
    FOLDER,
    MAX_QUEUED,
    Entry,
    EventLog,
    load_keys,
    open_database,
    read_entry,
    store_lock,
)
from tipbench.serve.features import hour_of
from tipbench.serve.policy import POLICIES, Policy, Ridge, check_policy, known_policy, reward_of
from tipbench.serve.prior import Prior
from tipbench.serve.request import Candidate, DecisionRequest, RewardRequest, ScoreRequest, parse_time
from tipbench.serve.state import DOCUMENT_NAMES, UserState
from tipbench.serve.state_store import STATE_FOLDER, FileStore, load_user, open_state
from tipbench.serve.tallies import Tallies
from tipbench.sqlite import Database

LATE_AFTER_S = 24 * 3600.0  # rewards later than this after the score are not learned
_FLUSH_EVERY_S = 1.0
_FLUSH_BATCH_USERS = 64  # encoding their state takes 1 to 2 ms, during which the lock is held
_MAX_USERS = 20_000  # users in memory
_MAX_EVENTS = 32_768  # events in memory; more than MAX_QUEUED, so that uncommitted events are always in memory

_logger = logging.getLogger(__name__)


class Result(NamedTuple):
    """The result of a score or a reward."""

    body: dict[str, Any]  # of the response
    committed: Future[None] | None = None  # done once the log entry is on disk; None if nothing was logged
    entry: Entry | None = None  # the log entry of a new score


@dataclass(slots=True)
class _Event:
    """A logged score: what is needed to learn its reward, and the reward once it is received."""

    seq: int  # number of the score's log entry
    policy: str
    features: str  # version of the feature set
    received: float  # Unix timestamp
    x: list[float]  # features of the chosen tip
    category: str | None  # of the chosen tip
    hour: float  # of the day
    reward: float | None = None
    late: bool = False  # whether the reward was late


class PolicyService:
    """Scores requests and learns from rewards. Thread-safe."""

    def __init__(
        self,
        home: Path,
        *,
        store_kind: str = "sqlite",
        priors: Iterable[Prior] = (),
        clock: Callable[[], float] = time.time,
        queue_capacity: int = MAX_QUEUED,
    ) -> None:
        """Open the store of a home folder; raises LockHeld if another process serves from it.

        `store_kind` is "sqlite" or "files". At most `queue_capacity` log entries wait for their commit.
        """
        self.priors: dict[str, Prior] = {}
        for prior in priors:
            known_policy(prior.policy).check_prior(prior)
            self.priors[prior.policy] = prior
        self.prior_hashes = {policy: prior.hash for policy, prior in self.priors.items()}
        self.home = home
        self.clock = clock
        self.flush_error: str | None = None  # why the last flush failed; it is retried, and the log has all changes
        self._random = random.Random()  # noqa: S311 - event ids must be unique, not secret
        self._lock = threading.RLock()
        self._flush_lock = threading.Lock()  # acquired before `_lock`
        self._users: dict[str, UserState] = {}
        self._changed_users: set[str] = set()  # users with documents to write
        self._events: OrderedDict[tuple[str, str], _Event] = OrderedDict()
        with ExitStack() as opened:
            opened.callback(store_lock(home, "tipbench serve").release)
            self.keys = load_keys(home)
            self.log = EventLog(home, lock=self._lock, on_failure=self._clear_memory, capacity=queue_capacity)
            opened.callback(self.log.close)
            # A separate connection: long queries must not block scores and commits.
            self._stats_database = open_database(home)
            opened.callback(self._stats_database.close)
            self._store = open_state(home, store_kind, self.log.database, self.log.write_database)
            if isinstance(self._store, FileStore):
                self._store.remove_leftovers()
            self._opened = opened.pop_all()
        self._closing = threading.Event()
        self._flusher = threading.Thread(target=self._flush_regularly, name="state-writer", daemon=True)
        self._flusher.start()

    def close(self) -> None:
        """Write everything to disk and release the store."""
        self._closing.set()
        self._flusher.join()
        with self._opened:  # released even if the flush fails
            self.flush()

    # Scores

    def score(self, policy: str, request: ScoreRequest) -> Result:
        """Pick one of the request's candidates."""
        return self.serve(policy, request, request["candidates"])

    def serve(
        self, policy: str, request: DecisionRequest, candidates: list[Candidate], *, is_recommendation: bool = False
    ) -> Result:
        """Pick one of the candidates and log the decision. A repeated request gets the first response.

        A repeated request that names another policy is a conflict. A repeated recommendation is not, because another
        policy may have become active since the first.
        """
        serving_policy = known_policy(policy)
        user_key = self.keys.hash_user_id(request["user_id"])
        requested_id = request.get("event_id")
        with self._lock:
            user = self._user(user_key)
            event = self._event(user, requested_id) if requested_id is not None else None
            if event is None:
                event_id = requested_id or f"{self._random.getrandbits(128):032x}"
                return self._decide(serving_policy, user, event_id, request, candidates, is_recommendation)
        return self._repeat(policy, event.seq, request, is_recommendation)

    def _decide(
        self,
        policy: Policy,
        user: UserState,
        event_id: str,
        request: DecisionRequest,
        candidates: list[Candidate],
        is_recommendation: bool,
    ) -> Result:
        started = time.perf_counter()
        received = self.clock()
        at = request_time(request, received)
        ridge = user.ridge(policy.name)
        x = policy.features.matrix(request, candidates, at, user.tallies)
        random_number = self.keys.repeatable_random(policy.name, user.key, event_id)
        decision = policy.decide(x, ridge, random_number)
        chosen = candidates[decision.chosen]
        logged_request: dict[str, Any] = {**request, "candidates": candidates}
        del logged_request["user_id"]
        logged_request.pop("event_id", None)
        body = {
            "request": logged_request,
            "from_catalogue": request.get("candidates") is None,
            "at": request.get("at") or at.isoformat(),
            "chosen": chosen["tip_id"],
            "scores": decision.scores,
            "probabilities": decision.probabilities,
            "x": x[decision.chosen].tolist(),
            "n": ridge.n,
            "prior": self.prior_hashes.get(policy.name),
            "version": policy.version,
            "features": policy.features.version,
            "signal": "serve" if is_recommendation else None,  # for the export; a shadow's entry has "shadow:NAME"
            "latency_ms": round((time.perf_counter() - started) * 1000, 3),
        }
        entry, committed = self.log.append("score", user.key, received, body, event=event_id, policy=policy.name)
        self._keep_in_memory(user.key, event_id, _event_of(entry, chosen, at))
        return Result(_score_body(event_id, policy.name, body), committed, entry)

    def _repeat(self, policy: str, seq: int, request: DecisionRequest, is_recommendation: bool) -> Result:
        """Return the result of the first request with this event id; raises EventConflict if the requests differ."""
        event_id = request.get("event_id") or ""
        entry = read_entry(self.log.database, seq)
        if entry is None:  # not committed yet
            self.log.wait()
            entry = read_entry(self.log.database, seq)
        if entry is None:
            raise EventConflict(f"Event {event_id} was erased at the same time. Send a new event_id.")
        body, first_policy = entry.body, entry.policy or ""
        are_recommendations = is_recommendation and body["signal"] == "serve"
        if first_policy != policy and not are_recommendations:
            raise EventConflict(f"Event {event_id} was served by {first_policy}, not {policy}. Send a new event_id.")
        first_request = {name: value for name, value in body["request"].items() if value is not None}
        ids = ("user_id", "event_id")  # not logged with a request
        this_request = {name: value for name, value in request.items() if value is not None and name not in ids}
        if body["from_catalogue"] and "candidates" not in this_request:
            del first_request["candidates"]
        if first_request != this_request:
            raise EventConflict(f"Event {event_id} was scored with another request. Send a new event_id.")
        return Result(_score_body(event_id, first_policy, body))

    # Rewards

    def reward(self, policy: str | None, request: RewardRequest) -> Result:
        """Learn the reward of an event, for the policy that served it; raises EventConflict if `policy` differs."""
        value = reward_of(request)
        user_key, event_id = self.keys.hash_user_id(request["user_id"]), request["event_id"]
        with self._lock:
            user = self._user(user_key)
            event = self._event(user, event_id)
            if event is None:
                raise EventNotFound(
                    f"This user has no event {event_id!r}. Score first, and send the event_id of the response."
                )
            if policy is not None and policy != event.policy:
                raise EventConflict(
                    f"Event {event_id} was served by {event.policy}, not {policy}: nothing was learned."
                )
            if event.features != POLICIES[event.policy].features.version:
                raise EventConflict(
                    f"Event {event_id} was scored with {event.features}, which this version of tipbench no longer "
                    "uses: nothing was learned."
                )
            if event.seq < user.reset_seq:
                raise EventConflict(f"Event {event_id} is from before the user's reset: nothing was learned.")
            if event.reward is not None and event.reward != value:
                raise EventConflict(
                    f"Event {event_id} has the reward {event.reward:g}, not {value:g}. The first reward counts."
                )
            received = self.clock()
            is_repeated = event.reward is not None
            if is_repeated:
                kind, late = "duplicate", event.late
            else:
                late = received - event.received > LATE_AFTER_S
                kind = "late" if late else "reward"
            applied = kind == "reward"
            body: dict[str, Any] = {
                "action": request.get("action"),
                "dwell_ms": request.get("dwell_ms"),
                "score": event.seq,
            }
            if applied:
                body |= {
                    "x": event.x,
                    "features": event.features,
                    "category": event.category,
                    "hour": event.hour,
                    "prior": self.prior_hashes.get(event.policy),
                }
            entry, committed = self.log.append(
                kind, user_key, received, body, event=event_id, policy=event.policy, reward=value
            )
            if not is_repeated:
                event.reward, event.late = value, late
                self._keep_in_memory(user_key, event_id, event)
            if applied:
                user.apply(entry)
                self._changed_users.add(user_key)
            n = user.ridge(event.policy).n
        return Result({"applied": applied, "reward": value, "late": late, "n": n}, committed)

    # Users

    def stats(self, policy: str, user_id: str | None = None) -> dict[str, Any]:
        """Return the statistics of a policy for one user, or for all users. Waits for queued commits."""
        check_policy(policy)
        self.log.wait()
        if user_id is None:
            stats = policy_totals(self._stats_database, policy)
        else:
            with self._lock:
                user = self._user(self.keys.hash_user_id(user_id))
                ridge, reset_seq = user.ridge(policy).snapshot(), user.reset_seq
            stats = user_stats(self._stats_database, user.key, policy, ridge, reset_seq=reset_seq)
        return {**stats, "prior": self.prior_hashes.get(policy)}

    def reset(self, user_id: str, *, erase: bool = False) -> dict[str, Any]:
        """Clear a user's state for all policies, and return once it is on disk; `erase` also deletes the events."""
        user_key = self.keys.hash_user_id(user_id)
        with self._lock:
            user = self._user(user_key)
            cleared = {name: user.has_state(name) for name in POLICIES}
            entry, committed = self.log.append("reset", user_key, self.clock(), {"erase": erase})
            user.apply(entry)
            self._changed_users.add(user_key)
            if erase:
                committed = self.log.erase(user_key, entry.seq)
                for event_user, event_id in list(self._events):
                    if event_user == user_key:
                        del self._events[event_user, event_id]
        committed.result()
        folder = self.home / FOLDER / STATE_FOLDER
        if erase and folder.exists():  # also if state is in SQLite now: it may have been in files before
            with self._flush_lock:
                FileStore(folder).erase(user_key)
                with self._lock:  # state with rewards since the reset may have been erased too: write it again
                    self._user(user_key).dirty.update(DOCUMENT_NAMES)
                    self._changed_users.add(user_key)
        self.flush()
        if erase:
            self.log.truncate_wal()
        return {"cleared": cleared}

    # Shadows

    def snapshot(self, policy: str, user_key: str) -> tuple[Ridge, Tallies]:
        """Return copies of a user's regression for a policy and of the tallies, to be read without the lock."""
        with self._lock:
            user = self._user(user_key)
            return user.ridge(policy).snapshot(), user.tallies.copy()

    def log_signal(self, score: Entry, policy: str, body: dict[str, Any]) -> None:
        """Log the signal of a shadow, but not if the user's events were erased after the score."""
        user, event = score.user, score.event
        with self._lock:
            if score.seq > self._user(user).erased_seq:
                agrees = float(body["agrees"])  # logged in the reward column
                self.log.append("signal", user, self.clock(), body, event=event, policy=policy, reward=agrees)

    # Memory and disk

    def flush(self) -> None:
        """Write the state of all changed users, in batches, so that requests wait only briefly for the lock.

        Afterwards, if more than _MAX_USERS are in memory, drop the users loaded first, except changed ones.
        """
        with self._flush_lock:
            with self._lock:
                changed = list(self._changed_users)
            for start in range(0, len(changed), _FLUSH_BATCH_USERS):
                self._write_state(changed[start : start + _FLUSH_BATCH_USERS])
            with self._lock:
                surplus = max(len(self._users) - _MAX_USERS, 0)
                for key in list(self._users)[:surplus]:
                    if key not in self._changed_users:
                        del self._users[key]

    def _write_state(self, keys: Iterable[str]) -> None:
        documents: dict[tuple[str, str], bytes | None] = {}
        with self._lock:
            for key in self._changed_users.intersection(keys):
                documents |= self._users[key].changed_documents()
                self._users[key].dirty.clear()
                self._changed_users.remove(key)
            # `pending` is called before the lock is released, because it returns no commit that has already failed:
            # the documents would then be saved although their log entries are lost.
            committed = self.log.pending()
        try:
            if committed is not None:
                committed.result()  # state must never be ahead of the log
            self._store.save(documents)
        except BaseException:
            with self._lock:
                for key, name in documents:
                    if key in self._users:  # not if a failed commit has cleared the memory
                        self._users[key].dirty.add(name)
                        self._changed_users.add(key)
            raise

    def _flush_regularly(self) -> None:
        while not self._closing.wait(_FLUSH_EVERY_S):
            try:
                self.flush()
            except TipbenchError as exc:
                if self.flush_error is None:
                    _logger.warning("State cannot be saved at the moment (%s). The event log is complete.", exc)
                self.flush_error = str(exc)
            else:
                self.flush_error = None

    def _clear_memory(self) -> None:
        """Discard all state in memory. The log calls this after a failed commit, with the lock held."""
        self._users.clear()
        self._events.clear()
        self._changed_users.clear()

    def _user(self, key: str) -> UserState:
        """Return the state of a user from memory or from disk. The caller holds the lock."""
        user = self._users.get(key)
        if user is None:
            user = self._users[key] = load_user(key, self.priors, self.log.database, self._store)
            if user.dirty:
                self._changed_users.add(key)
        return user

    def _event(self, user: UserState, event_id: str) -> _Event | None:
        """Return an event from memory or from the log; None if it does not exist. The caller holds the lock."""
        event = self._events.get((user.key, event_id))
        if event is None:
            for entry in self.log.event_entries(user.key, event_id):
                if entry.seq < user.erased_seq:  # erased, but the deletion is not committed yet
                    continue
                if entry.kind == "score":
                    candidates = entry.body["request"]["candidates"]
                    chosen = next(tip for tip in candidates if tip["tip_id"] == entry.body["chosen"])
                    event = _event_of(entry, chosen, parse_time(entry.body["at"]))
                elif event is not None:
                    event.reward, event.late = entry.reward, entry.kind == "late"
            if event is not None:
                self._keep_in_memory(user.key, event_id, event)
        return event

    def _keep_in_memory(self, user_key: str, event_id: str, event: _Event) -> None:
        self._events[user_key, event_id] = event
        self._events.move_to_end((user_key, event_id))
        if len(self._events) > _MAX_EVENTS:
            self._events.popitem(last=False)


def request_time(request: DecisionRequest, now: float) -> datetime:
    """Return the local time of a request: its `at`, otherwise `now` in the time zone of the server."""
    at = request.get("at")
    return datetime.fromtimestamp(now).astimezone() if at is None else parse_time(at)


def _event_of(entry: Entry, chosen: Candidate, at: datetime) -> _Event:
    return _Event(
        seq=entry.seq,
        policy=entry.policy or "",
        features=entry.body["features"],
        received=entry.received,
        x=entry.body["x"],
        category=chosen.get("category"),
        hour=hour_of(at),
    )


def _score_body(event_id: str, policy: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Build the response to a score request from the body of its log entry."""
    scores, probabilities = body["scores"], body["probabilities"]
    tips = [candidate["tip_id"] for candidate in body["request"]["candidates"]]
    chosen = tips.index(body["chosen"])
    ranking = [
        {"tip_id": tip, "score": score, "probability": probability}
        for tip, score, probability in zip(tips, scores, probabilities, strict=True)
    ]
    ranking.sort(key=itemgetter("score"), reverse=True)
    return {
        "event_id": event_id,
        "policy": policy,
        "dim": POLICIES[policy].features.dim,
        "chosen": body["chosen"],
        "probability": probabilities[chosen],
        "explored": scores[chosen] < ranking[0]["score"],
        "ranking": ranking,
        "n": body["n"],
        "prior": body["prior"],
    }


def user_stats(database: Database, user: str, policy: str, ridge: Ridge, *, reset_seq: int) -> dict[str, Any]:
    """Return the statistics of a policy for a user: counts, the weights θ and their standard deviations √Vᵢᵢ.

    Only log entries after the user's last reset, which has the number `reset_seq`, are counted.
    """
    rows = database.execute(
        "SELECT kind, count(*) FROM log WHERE user = ? AND policy = ? AND seq > ? GROUP BY kind",
        (user, policy, reset_seq),
    )
    counts = {kind: count for kind, count in rows}  # noqa: C416
    names = POLICIES[policy].features.names
    return {
        **_stats(policy, ridge.n, ridge.reward_sum, counts),
        "theta": dict(zip(names, ridge.theta.tolist(), strict=True)),
        "sd": dict(zip(names, np.sqrt(np.diag(ridge.v)).tolist(), strict=True)),
    }


def policy_totals(database: Database, policy: str) -> dict[str, Any]:
    """Return the totals of a policy over all users and the whole log."""
    rows = database.execute("SELECT kind, count(*), total(reward) FROM log WHERE policy = ? GROUP BY kind", (policy,))
    counts = {kind: count for kind, count, _ in rows}
    reward_sum = sum(total for kind, _, total in rows if kind == "reward")
    return _stats(policy, counts.get("reward", 0), reward_sum, counts)


def _stats(policy: str, n: int, reward_sum: float, counts: Mapping[str, int]) -> dict[str, Any]:
    """Return the statistics common to `user_stats` and `policy_totals`; `counts` has numbers of entries by kind."""
    scores, rewards, late = (counts.get(kind, 0) for kind in ("score", "reward", "late"))
    return {
        "policy": policy,
        "dim": POLICIES[policy].features.dim,
        "n": n,
        "mean_reward": reward_sum / n if n else None,
        "epsilon": POLICIES[policy].epsilon,
        "pending": scores - rewards - late,
        "late": late,
        "duplicates": counts.get("duplicate", 0),
    }
