"""A panel with secrets of every kind, and a detector that finds them in the responses to a judge."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from support.judged import judge_at
from support.judging import EXPERIMENT, SheetDriver, fill, record_cells
from tipbench.judge.sheet_store import stored_sheets
from tipbench.plan.suite import Suite, load_suite
from tipbench.record.store import MemoryStore
from web.judge_client import JudgeClient
from web.panels import API, ServedPanel, copy_store, serve_panel

MODELS = ("okapimodel-7f3a:1b", "tapirmodel-c41d:3b")
PROMPTS = ("pv-lynx-0d2e", "pv-heron-91ab")
PROGRAM = "scribe-c0ffee"
COLLEAGUE, COLLEAGUES_NOTE = "colleague-5e1d", "a-note-of-theirs-22aa"
TIED, OTHER = "tip-bench-tied", "tip-bench-not-for-judges-08bd"


def marked_suite() -> Suite:
    """The built-in suite, with prompts whose names occur nowhere else."""
    suite = load_suite("tips")
    prompt = suite.prompts["v1"]
    return replace(
        suite,
        prompts={
            name: replace(prompt, version=name, system=f"{prompt.system}\nSaid by {name}-text.") for name in PROMPTS
        },
    )


@dataclass(frozen=True)
class LeakDetector:
    """Records all responses to the judge of a panel, and finds secrets in them."""

    served: ServedPanel
    judge_client: JudgeClient
    exchanges: list[tuple[str, str]] = field(default_factory=list)  # request and whole response

    def record(self, response: Any) -> None:
        """Record a response unless it is an admin's."""
        response.read()
        request = response.request
        if request.headers.get("authorization") != f"Bearer {self.served.admin}":
            sent = f"{request.method} {request.url} {request.content.decode('utf-8', 'replace')}"
            status = f"{response.status_code} {response.reason_phrase}"
            self.exchanges.append((sent, f"{status}\n{response.headers.multi_items()}\n{response.text}"))

    def secrets(self) -> set[str]:
        """Return all stored texts that a judge must not see."""
        found = {
            *MODELS,
            *PROMPTS,
            PROGRAM,
            COLLEAGUE,
            COLLEAGUES_NOTE,
            OTHER,
            "okapimodel",
            "tapirmodel",
            '"behind"',
            '"references"',
        }
        for name in (EXPERIMENT, TIED):
            experiment = self.served.store.experiment(name)
            assert experiment is not None
            for judging in stored_sheets(self.served.store, experiment):
                found |= {control for entry in judging.entries for control in entry.controls}
            for run in self.served.store.search(experiment.experiment_id, where={}):
                found.add(run.run_id)
                if run.tags.get("kind") == "cell":
                    found |= {value for value in run.tags.values() if re.fullmatch("[0-9a-f]{12,}", value)}
                    found.add(run.params["model_digest"])
        return {secret[:32] for secret in found}

    def leaks(self) -> list[tuple[str, str]]:
        """Return the secrets in the responses; texts that the judge sent are not leaks."""
        secrets = self.secrets()
        found = []
        for sent, answer in self.exchanges:
            seen = "\n".join({answer, unescape(answer), unquote(answer)}).lower()
            request_text = unquote(sent).lower()
            found += [
                (sent[:200], each) for each in secrets if each.lower() in seen and each.lower() not in request_text
            ]
        return found


def record_colleague(store: MemoryStore) -> None:
    """Record another judge, who scored a part of one experiment, and all of another so that its pairs tie."""
    main, tied = store.experiment(EXPERIMENT), store.experiment(TIED)
    assert main is not None
    assert tied is not None
    driver = SheetDriver(store, main)
    raw = fill(driver.export(COLLEAGUE).stored)
    raw["items"] = raw["items"][:8]
    raw["items"][0]["tips"][0]["note"] = COLLEAGUES_NOTE
    assert driver.apply(raw).status == "applied"
    judge_at(SheetDriver(store, tied), lambda run, number: 3 + (len(run.params["scenario"]) + number) % 2, COLLEAGUE)


@functools.cache
def _store_with_secrets() -> MemoryStore:
    store = MemoryStore()
    for name in (EXPERIMENT, TIED, OTHER):
        record_cells(store, experiment=name, suite=marked_suite(), models=MODELS)
    record_colleague(store)
    return store


@contextmanager
def serve_with_secrets(home: Path) -> Iterator[LeakDetector]:
    """Three experiments with marked names, a job with models, a program; responses to the judge are recorded."""
    with serve_panel(
        home, copy_store(_store_with_secrets()), {"TIPBENCH_JUDGE_COMMAND": f"/opt/{PROGRAM} --judge"}
    ) as served:
        assert served.post(f"{API}/run", json={"models": ",".join(MODELS)}).status_code == 202
        detector = LeakDetector(served, JudgeClient(served, served.judge))
        served.client.event_hooks = {"response": [detector.record]}
        yield detector
