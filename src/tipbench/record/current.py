"""Which of an experiment's cells speak for their pair today: a row never mixes two builds of one name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tipbench.record.run import StoredRun


def stale_runs(runs: Sequence[StoredRun]) -> set[str]:
    """Ids of the runs of a model digest, or of a prompt's text, that a newer one of the same name has replaced.

    What is newer is decided within one set of conditions: another temperature is another board, not a newer build.
    """
    digests = _newest(((run.tags.get("conditions"), run.params.get("model")), _digest(run), run) for run in runs)
    prompts = _newest(
        ((run.tags.get("conditions"), run.params.get("prompt_version")), _prompt(run), run) for run in runs
    )
    return {
        run.run_id
        for run in runs
        if digests[run.tags.get("conditions"), run.params.get("model")] != _digest(run)
        or prompts[run.tags.get("conditions"), run.params.get("prompt_version")] != _prompt(run)
    }


_Name = tuple[str | None, str | None]


def _newest(named: Iterable[tuple[_Name, str | None, StoredRun]]) -> dict[_Name, str | None]:
    newest: dict[_Name, tuple[int, str | None]] = {}
    for name, build, run in named:
        if name not in newest or run.start_ms > newest[name][0]:
            newest[name] = (run.start_ms, build)
    return {name: build for name, (_, build) in newest.items()}


def _digest(run: StoredRun) -> str | None:
    return run.params.get("model_digest")


def _prompt(run: StoredRun) -> str | None:
    return run.tags.get("prompt_hash")
