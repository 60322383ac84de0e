"""State of a user: one JSON document for each policy, and one for the tallies.

State is a cache of the event log. A document's `seq` is the number of the last log entry applied to it. Newer entries
are applied when the state is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from pydantic_core import from_json, to_json
from typing_extensions import TypedDict

from tipbench.errors import StateError
from tipbench.serve.event_log import Entry
from tipbench.serve.features import Floats
from tipbench.serve.policy import POLICIES, Ridge
from tipbench.serve.prior import Prior
from tipbench.serve.tallies import Tallies, Tally

SCHEMA = 1
TALLIES = "tallies"
DOCUMENT_NAMES = (*POLICIES, TALLIES)  # in the order of writing; `load_user` relies on tallies being last
STATE_CHANGES = ("reward", "reset", "import")  # kinds of log entries that change state

_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

Count = Annotated[int, Field(ge=0)]


@with_config(_STRICT)
class PolicyDocument(TypedDict):
    """The state of a user for one policy."""

    schema: int
    user: str  # hash of the user id
    name: str
    seq: Count
    features: str  # version of the feature set
    n: Count  # number of rewards
    reward_sum: float
    prior: str | None  # hash of the prior at the last reward
    a: list[float]  # upper triangle of Σxxᵀ, row by row
    b: list[float]  # Σrx


@with_config(_STRICT)
class TalliesDocument(TypedDict):
    """A user's tallies by category."""

    schema: int
    user: str
    name: str
    seq: Count
    by_category: dict[str, Tally]


_POLICY_ADAPTER, _TALLIES_ADAPTER = TypeAdapter(PolicyDocument), TypeAdapter(TalliesDocument)


class CorruptDocument(Exception):
    """A document is invalid; it is rebuilt from the log."""


def decode(document: bytes, user: str, name: str) -> dict[str, Any]:
    """Parse a document. Raises StateError if its schema is unknown, CorruptDocument if it is invalid."""
    try:
        content = from_json(document, allow_inf_nan=False)
        schema = content["schema"]
    except (ValueError, TypeError, KeyError) as exc:
        raise CorruptDocument(f"not a JSON object with a schema: {exc}") from exc
    features = None if name == TALLIES else POLICIES[name].features
    found: list[object] = [schema]
    supported: list[object] = [SCHEMA]
    if features is not None and isinstance(content.get("features"), str):  # if not a string, the adapter rejects it
        found.append(content["features"])
        supported.append(features.version)
    if found != supported:
        raise StateError(
            f"The state {name} of user {user} has schema {' and '.join(map(str, found))}; this version reads schema "
            f"{' and '.join(map(str, supported))}. It was left as it is: use the version of tipbench that wrote it."
        )
    adapter: TypeAdapter[Any] = _TALLIES_ADAPTER if features is None else _POLICY_ADAPTER
    try:
        adapter.validate_python(content)
    except ValidationError as exc:
        location = ".".join(map(str, exc.errors()[0]["loc"]))
        raise CorruptDocument(f"invalid {location}") from exc
    if (content["user"], content["name"]) != (user, name):
        raise CorruptDocument("it belongs to another user or policy")
    if features is not None:
        _check_statistics(content, features.dim)
    return content  # type: ignore[no-any-return]


def _check_statistics(content: Mapping[str, Any], dim: int) -> None:
    """Raise CorruptDocument if a policy's document has sums that rewards for `dim` features cannot give."""
    if (len(content["a"]), len(content["b"])) != (dim * (dim + 1) // 2, dim):
        raise CorruptDocument("the number of statistics is wrong")
    # Features and rewards are from −1 to 1, so each reward changes a sum by at most 1.
    largest_sum = max(map(abs, (*content["a"], *content["b"], content["reward_sum"])))
    # Σxxᵀ has no negative eigenvalue, apart from rounding errors. −0.5 is harmless: λI + Σxxᵀ is invertible, as λ ≥ 1.
    smallest_eigenvalue = np.linalg.eigvalsh(_symmetric(content["a"], dim))[0]
    if largest_sum > content["n"] or smallest_eigenvalue < -0.5:
        raise CorruptDocument("no rewards for features from -1 to 1 give these statistics")


def _symmetric(triangle: list[float], dim: int) -> Floats:
    a = np.zeros((dim, dim))
    a[np.triu_indices(dim)] = triangle
    return a + np.triu(a, 1).T


@cache
def _ridge_without_rewards(policy: str, prior: Prior | None) -> Ridge:
    return POLICIES[policy].ridge(prior)


class UserState:
    """The state of one user: a ridge regression for each policy with rewards, and the tallies."""

    __slots__ = ("_priors", "dirty", "erased_seq", "key", "learned_with", "reset_seq", "ridges", "seqs", "tallies")

    def __init__(self, key: str, priors: Mapping[str, Prior]) -> None:
        self.key = key  # hash of the user id
        self.ridges: dict[str, Ridge] = {}
        self.tallies = Tallies()
        self.learned_with: dict[str, str | None] = {}  # by policy: hash of the prior at the last reward
        self.reset_seq = 0  # entry number of the last reset
        self.erased_seq = 0  # entry number of the last reset with `erase`
        self.dirty: set[str] = set()  # names of documents that differ from the store
        self.seqs = dict.fromkeys(DOCUMENT_NAMES, 0)  # by document: number of the last entry applied to it
        self._priors = priors

    def ridge(self, policy: str) -> Ridge:
        """Return the regression of a policy. One without rewards is shared by all users and must not be updated."""
        if policy in self.ridges:
            return self.ridges[policy]
        return _ridge_without_rewards(policy, self._priors.get(policy))

    def apply(self, entry: Entry) -> None:
        """Apply an entry to the documents that do not contain it yet."""
        seq, body = entry.seq, entry.body
        if entry.kind == "reset":
            self.reset_seq = seq
            if body["erase"]:
                self.erased_seq = seq
            for name in DOCUMENT_NAMES:
                if seq > self.seqs[name]:
                    self.clear(name, seq)
        elif entry.kind == "import":
            if seq > self.seqs[body["name"]]:
                self.restore(body["name"], body["document"])
                self._mark_changed(body["name"], seq)
        elif entry.kind == "reward" and entry.policy is not None and entry.reward is not None:
            name, policy = entry.policy, POLICIES[entry.policy]
            has_same_features = body["features"] == policy.features.version
            if seq > self.seqs[name] and has_same_features:
                if name not in self.ridges:
                    self.ridges[name] = policy.ridge(self._priors.get(name))
                self.ridges[name].update(np.array(body["x"]), entry.reward)
                self.learned_with[name] = body["prior"]
                self._mark_changed(name, seq)
            if seq > self.seqs[TALLIES]:
                self.tallies.add(body["category"], body["action"], body["dwell_ms"], body["hour"])
                self._mark_changed(TALLIES, seq)

    def changed_documents(self) -> dict[tuple[str, str], bytes | None]:
        """Return the documents that differ from the store. A document without content is None."""
        return {(self.key, name): self._document(name) for name in DOCUMENT_NAMES if name in self.dirty}

    def all_documents(self) -> dict[tuple[str, str], bytes | None]:
        """Return all documents. A document without content is None."""
        return {(self.key, name): self._document(name) for name in DOCUMENT_NAMES}

    def has_state(self, name: str) -> bool:
        """Return whether this document has content."""
        return bool(self.tallies.by_category) if name == TALLIES else name in self.ridges

    def _document(self, name: str) -> bytes | None:
        if not self.has_state(name):
            return None
        header = {"schema": SCHEMA, "user": self.key, "name": name, "seq": self.seqs[name]}
        if name == TALLIES:
            by_category = sorted(self.tallies.by_category.items())
            return to_json({**header, "by_category": {category: tally._asdict() for category, tally in by_category}})
        ridge = self.ridges[name]
        return to_json(
            {
                **header,
                "features": POLICIES[name].features.version,
                "n": ridge.n,
                "reward_sum": ridge.reward_sum,
                "prior": self.learned_with[name],
                "a": ridge.a[np.triu_indices(len(ridge.b))].tolist(),  # the upper triangle, row by row
                "b": ridge.b.tolist(),
            }
        )

    def restore(self, name: str, content: dict[str, Any]) -> None:
        """Replace the state of one document by content that `decode` returned."""
        if name == TALLIES:
            self.tallies = Tallies.from_values(content["by_category"])
            return
        ridge = POLICIES[name].ridge(self._priors.get(name))
        b = np.array(content["b"])
        ridge.restore(_symmetric(content["a"], len(b)), b, content["n"], content["reward_sum"])
        self.ridges[name] = ridge
        self.learned_with[name] = content["prior"]

    def clear(self, name: str, seq: int) -> None:
        """Clear the state of one document; `seq` is the entry number of the reset."""
        if name == TALLIES:
            self.tallies = Tallies()
        else:
            self.ridges.pop(name, None)
            self.learned_with.pop(name, None)
        self._mark_changed(name, seq)

    def _mark_changed(self, name: str, seq: int) -> None:
        self.seqs[name] = seq
        self.dirty.add(name)
