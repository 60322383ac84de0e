"""The RunStore port: experiments, and runs that are written whole, read back in bulk and changed in one step."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from tipbench.record.run import NewRun, RunChange, StoredRun


@dataclass(frozen=True)
class Experiment:
    """A named collection of runs. `url` is its page for people, where there is one."""

    experiment_id: str
    name: str
    tags: Mapping[str, str] = field(default_factory=dict)
    url: str | None = None
    created: bool = False  # by the very call that returned it: it holds nothing yet


class RunStore(Protocol):
    """Where runs are kept. Raises MlflowAway when it cannot be reached, MlflowRefused when it says no."""

    def experiment(self, name: str) -> Experiment | None:
        """The experiment of this name, or None."""
        ...

    def ensure_experiment(self, name: str) -> Experiment:
        """The experiment of this name, created when missing."""
        ...

    def experiments(self) -> list[Experiment]: ...

    def record(self, experiment_id: str, run: NewRun, *, maybe_there: bool = False) -> str:
        """Write a run whole and return its id. With `maybe_there` look first:

        a finished run of its cell_key is left as it is, a half-written run of its record_id is completed.
        """
        ...

    def search(self, experiment_id: str, *, where: Mapping[str, str], limit: int | None = None) -> Iterator[StoredRun]:
        """Runs with these tags (keys as they are) or params (`params.NAME`), newest first, without texts."""
        ...

    def read(
        self, experiment_id: str, *, where: Mapping[str, str], texts: Collection[str], limit: int | None = None
    ) -> Iterator[tuple[StoredRun, dict[str, str]]]:
        """Like `search`, with those of the named texts that a run has, each checked; others are not looked at."""
        ...

    def get(self, run_id: str) -> tuple[StoredRun, dict[str, str]]:
        """One run with all its texts, each checked against its hash."""
        ...

    def update(self, run_id: str, change: RunChange) -> None:
        """Change a recorded run; it counts as changed once its plain tags are, which come last.

        Whenever the writer dies, every text reads whole, the old or the new one. Refuses an illegal move of
        `state`. It is for one writer of a run at a time: of two, the later one's texts and tags stand.
        """
        ...

    def touch(self, experiment_id: str) -> None:
        """Give the experiment a fresh `tipbench.revision`, so that readers know their cache is old."""
        ...
