"""The RunStore port: experiments, and runs that are written in one piece, read in bulk and updated."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from tipbench.record.run import NewRun, RunChange, StoredRun


@dataclass(frozen=True)
class Experiment:
    """A named collection of runs. `url` is its web page, if any."""

    experiment_id: str
    name: str
    tags: Mapping[str, str] = field(default_factory=dict)
    url: str | None = None
    created: bool = False  # created by the call that returned it, so it is empty


class RunStore(Protocol):
    """Stores runs. Raises MlflowUnavailable if the store is unreachable, MlflowError if it rejects a request."""

    def experiment(self, name: str) -> Experiment | None:
        """Return the experiment of this name, or None."""
        ...

    def ensure_experiment(self, name: str) -> Experiment:
        """Return the experiment of this name, created if missing."""
        ...

    def experiments(self) -> list[Experiment]: ...

    def record(self, experiment_id: str, run: NewRun, *, maybe_there: bool = False) -> str:
        """Write a complete run and return its id.

        With `maybe_there`, searches first: a finished run of its cell_key is left unchanged, a half-written run of its
        record_id is completed.
        """
        ...

    def search(self, experiment_id: str, *, where: Mapping[str, str], limit: int | None = None) -> Iterator[StoredRun]:
        """Search runs by tags (plain keys) or params (`params.NAME`), newest first, without texts."""
        ...

    def read(
        self, experiment_id: str, *, where: Mapping[str, str], texts: Collection[str], limit: int | None = None
    ) -> Iterator[tuple[StoredRun, dict[str, str]]]:
        """Like `search`, with those of the named texts that a run has, each verified; other texts are not read."""
        ...

    def get(self, run_id: str) -> tuple[StoredRun, dict[str, str]]:
        """Return one run with all its texts, each verified against its hash."""
        ...

    def update(self, run_id: str, change: RunChange) -> None:
        """Update a recorded run; the update takes effect with its plain tags, which are written last.

        If the writer dies, every text is still complete, either the old or the new one. Raises MlflowError for an
        illegal transition of `state`. Supports one writer of a run at a time: of two, the later texts and tags win.
        """
        ...

    def touch(self, experiment_id: str) -> None:
        """Give the experiment a new `tipbench.revision`, which invalidates readers' caches."""
        ...
