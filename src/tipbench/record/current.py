"""Which of an experiment's cells speak for their pair today: a row never mixes two builds of one name.

Only answers decide what is newest: a pull that never produced one must not empty a board. Runs that failed decide
where nothing has answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tipbench.record.run import RunState, StoredRun

Reader = Callable[[StoredRun], str | None]

# what carries a name, and what the name stands for: a digest, a prompt's text, a scenario's content
_BUILDS: tuple[tuple[Reader, Reader], ...] = (
    (lambda run: run.params.get("model"), lambda run: run.params.get("model_digest")),
    (lambda run: run.params.get("prompt_version"), lambda run: run.tags.get("prompt_hash")),
    (lambda run: run.params.get("scenario"), lambda run: run.tags.get("scenario_hash")),
)


def newest_run(runs: Iterable[StoredRun]) -> StoredRun:
    """The newest answer; the newest run where nothing has answered."""
    return max(runs, key=_age)


def stale_runs(runs: Sequence[StoredRun]) -> set[str]:
    """Ids of the runs of a digest, a prompt's text or a scenario's content that a newer one of that name has replaced.

    What is newer is decided within one set of conditions: another temperature is another board, not a newer build.
    A failure that came after the newest answer replaces nothing, and is not old either.
    """
    return {run_id for name, build in _BUILDS for run_id in _replaced(runs, name, build)}


def _replaced(runs: Sequence[StoredRun], name: Reader, build: Reader) -> Iterable[str]:
    newest: dict[tuple[str | None, str | None], StoredRun] = {}
    for run in runs:
        key = run.tags.get("conditions"), name(run)
        newest[key] = newest_run((newest.get(key, run), run))
    for run in runs:
        present = newest[run.tags.get("conditions"), name(run)]
        later = _failed(run) and run.start_ms > present.start_ms
        if build(run) != build(present) and not later:
            yield run.run_id


def _age(run: StoredRun) -> tuple[bool, int, str]:
    return not _failed(run), run.start_ms, run.run_id


def _failed(run: StoredRun) -> bool:
    return run.state == RunState.FAILED
