"""State of a user: what each policy learned, and the tallies; stored as one JSON document each.

State is a cache of the event log. A document's `seq` is the last log entry applied to it; newer entries are replayed on
load, by the same code that applies them when they arrive.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Annotated, Any

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from pydantic_core import from_json, to_json
from typing_extensions import TypedDict

from tipbench.errors import StateError
from tipbench.serve.event_log import Entry
from tipbench.serve.policy import POLICIES
from tipbench.serve.prior import Prior
from tipbench.serve.ridge import Ridge, Vector
from tipbench.serve.tallies import Tallies, Tally

SCHEMA = 1
TALLIES = "tallies"
NAMES = (*POLICIES, TALLIES)  # tallies last: documents are written in this order, see `UserState.load`
LEARNED = ("reward", "reset", "import")  # the kinds of entries that change state

_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
_logger = logging.getLogger(__name__)


Count = Annotated[int, Field(ge=0)]


@with_config(_STRICT)
class PolicyDocument(TypedDict):
    """What a policy learned about a user; `a` is the upper triangle of Σxxᵀ, row by row, and `b` is Σrx."""

    schema: int
    user: str
    name: str
    seq: Count
    features: str
    n: Count
    reward_sum: float
    prior: str | None
    a: list[float]
    b: list[float]


@with_config(_STRICT)
class TalliesDocument(TypedDict):
    """A user's tallies by category."""

    schema: int
    user: str
    name: str
    seq: Count
    by_category: dict[str, Tally]


_POLICY, _TALLIES = TypeAdapter(PolicyDocument), TypeAdapter(TalliesDocument)


class CorruptDocument(Exception):
    """A document cannot be read; it is rebuilt from the log."""


def decode(document: bytes, user: str, name: str) -> dict[str, Any]:
    """Return a document's content; raises StateError for an unknown schema, and CorruptDocument."""
    try:
        content = from_json(document, allow_inf_nan=False)
        schema = content["schema"]
    except (ValueError, TypeError, KeyError) as exc:
        raise CorruptDocument(f"not a JSON object with a schema: {exc}") from exc
    version = content.get("features") if name != TALLIES else None
    known = None if name == TALLIES else POLICIES[name].features.version
    if schema != SCHEMA or (isinstance(version, str) and version != known):
        raise StateError(
            f"The state {name} of user {user} has schema {schema}{f' and {version}' if version else ''}; this version "
            f"reads schema {SCHEMA}{f' and {known}' if known else ''}. It was left as it is: use the version of "
            "tipbench that wrote it."
        )
    try:
        (_TALLIES if name == TALLIES else _POLICY).validate_python(content)
    except ValidationError as exc:
        raise CorruptDocument(f"invalid {'.'.join(map(str, exc.errors()[0]['loc']))}") from exc
    if (content["user"], content["name"]) != (user, name):
        raise CorruptDocument("it belongs to another user or policy")
    if name != TALLIES:
        dim = POLICIES[name].features.dim
        if (len(content["a"]), len(content["b"])) != (dim * (dim + 1) // 2, dim):
            raise CorruptDocument("the number of statistics is wrong")
        largest = max(map(abs, (*content["a"], *content["b"], content["reward_sum"])))
        if largest > content["n"] or np.linalg.eigvalsh(_symmetric(content["a"], dim))[0] < -0.5:
            raise CorruptDocument("no rewards for features from -1 to 1 give these statistics")
    return content  # type: ignore[no-any-return]


def _symmetric(triangle: list[float], dim: int) -> Vector:
    """Return the symmetric matrix with this upper triangle, row by row."""
    a = np.zeros((dim, dim))
    a[np.triu_indices(dim)] = triangle
    return a + np.triu(a, 1).T


@cache
def _unlearned(policy: str, prior: Prior | None) -> Ridge:
    return POLICIES[policy].ridge(prior)


class UserState:
    """What is known of one user: a ridge regression for each policy that has learned, and the tallies."""

    __slots__ = ("_priors", "_seqs", "dirty", "erased", "key", "learned_with", "reset", "ridges", "tallies")

    def __init__(self, key: str, priors: Mapping[str, Prior]) -> None:
        self.key = key
        self.ridges: dict[str, Ridge] = {}
        self.tallies = Tallies()
        self.learned_with: dict[str, str | None] = {}  # by policy: the prior's hash at the last reward
        self.reset = 0  # number of the last reset
        self.erased = 0
        self.dirty: set[str] = set()  # names of documents that differ from the store
        self._seqs = dict.fromkeys(NAMES, 0)
        self._priors = priors

    @property
    def seq(self) -> int:
        """The last entry applied."""
        return max(self.reset, *self._seqs.values())

    def ridge(self, policy: str) -> Ridge:
        """Return what a policy learned; without rewards a shared one that must not be updated."""
        found = self.ridges.get(policy)
        return _unlearned(policy, self._priors.get(policy)) if found is None else found

    def apply(self, entry: Entry) -> None:
        """Apply an entry, unless a document already has it."""
        seq, body = entry.seq, entry.body
        if entry.kind == "reset":
            self.reset, self.erased = seq, seq if body["erase"] else self.erased
            for name in NAMES:
                if seq > self._seqs[name]:
                    self._clear(name, seq)
        elif entry.kind == "import":
            if seq > self._seqs[body["name"]]:
                self._restore(body["name"], body["document"])
                self._changed(body["name"], seq)
        elif entry.kind == "reward" and entry.policy is not None and entry.reward is not None:
            if seq > self._seqs[entry.policy] and body["features"] == POLICIES[entry.policy].features.version:
                ridge = self.ridges.get(entry.policy)
                if ridge is None:
                    ridge = self.ridges[entry.policy] = POLICIES[entry.policy].ridge(self._priors.get(entry.policy))
                ridge.update(np.array(body["x"]), entry.reward)
                self.learned_with[entry.policy] = body["prior"]
                self._changed(entry.policy, seq)
            if seq > self._seqs[TALLIES]:
                self.tallies.add(body["category"], body["action"], body["dwell_ms"], body["hour"])
                self._changed(TALLIES, seq)

    def load(
        self,
        documents: Mapping[str, bytes],
        resets: tuple[int, int],
        newer: Callable[[int], Iterable[Entry]],
        set_aside: Callable[[str, str], str] | None,
    ) -> None:
        """Restore the documents and replay what is newer; a corrupt document is set aside and rebuilt.

        `resets` are the numbers of the last reset and the last erase; `newer(seq)` yields the user's entries after an
        entry. Raises StateError for an unknown schema.
        """
        self.reset, self.erased = resets
        corrupt = False
        for name, document in documents.items():
            try:
                content = decode(document, self.key, name)
                self._restore(name, content)
                self._seqs[name] = content["seq"]
            except CorruptDocument as exc:
                corrupt = True
                place = set_aside(self.key, name) if set_aside else "nowhere"
                _logger.warning("The state %s was corrupt (%s): moved to %s, rebuilt from the log", name, exc, place)
        # Tallies are written after all else and by every reward, so a missing document has no reward up to their entry.
        after = 0 if corrupt else self._seqs[TALLIES]
        for name in documents:
            if self._seqs[name] < self.reset:
                self._clear(name, self.reset)
        for entry in newer(max(after, self.reset)):
            self.apply(entry)

    def documents(self) -> dict[tuple[str, str], bytes | None]:
        """Return the documents that differ from the store, None for one to delete."""
        return {(self.key, name): self._document(name) for name in NAMES if name in self.dirty}

    def has_state(self, name: str) -> bool:
        """True if there is a document of this name."""
        return bool(self.tallies.by_category) if name == TALLIES else name in self.ridges

    def _document(self, name: str) -> bytes | None:
        if not self.has_state(name):
            return None
        head = {"schema": SCHEMA, "user": self.key, "name": name, "seq": self._seqs[name]}
        if name == TALLIES:
            by_category = sorted(self.tallies.by_category.items())
            return to_json({**head, "by_category": {category: tally._asdict() for category, tally in by_category}})
        ridge = self.ridges[name]
        return to_json(
            {
                **head,
                "features": POLICIES[name].features.version,
                "n": ridge.n,
                "reward_sum": ridge.reward_sum,
                "prior": self.learned_with[name],
                "a": ridge.a[np.triu_indices(len(ridge.b))].tolist(),  # the upper triangle, row by row
                "b": ridge.b.tolist(),
            }
        )

    def _restore(self, name: str, content: dict[str, Any]) -> None:
        if name == TALLIES:
            self.tallies = Tallies({category: Tally(**tally) for category, tally in content["by_category"].items()})
            return
        ridge = POLICIES[name].ridge(self._priors.get(name))
        b = np.array(content["b"])
        ridge.restore(_symmetric(content["a"], len(b)), b, content["n"], content["reward_sum"])
        self.ridges[name] = ridge
        self.learned_with[name] = content["prior"]

    def _clear(self, name: str, seq: int) -> None:
        if name == TALLIES:
            self.tallies = Tallies()
        else:
            self.ridges.pop(name, None)
            self.learned_with.pop(name, None)
        self._changed(name, seq)

    def _changed(self, name: str, seq: int) -> None:
        self._seqs[name] = seq
        self.dirty.add(name)
