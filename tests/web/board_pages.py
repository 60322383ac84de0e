"""Panels with judged boards under any names, and a parser for their pages."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, urlsplit

from support.judged import judge_at
from support.judging import SheetDriver, record_cells
from tipbench.plan.suite import load_suite
from tipbench.record.run import NewRun, StoredRun
from tipbench.record.store import MemoryStore
from web.panels import EXPERIMENT, HTML, ServedPanel, copy_store, serve_panel


class RenamingStore(MemoryStore):
    """Records some models and prompts under names that the command line would reject."""

    def __init__(self, names: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._names = dict(names or {})
        self.read_count = 0

    def record(self, experiment_id: str, run: NewRun, *, may_exist: bool = False) -> str:
        params = {
            key: self._names.get(value, value) if key in ("model", "prompt_version") else value
            for key, value in run.params.items()
        }
        return super().record(experiment_id, replace(run, params=params), may_exist=may_exist)

    def read(self, *args: Any, **options: Any) -> Any:
        self.read_count += 1
        return super().read(*args, **options)


def score_of(run: StoredRun, tip: int) -> int:
    """Return a score: longer names of models and prompts are better, with variation over scenarios."""
    params = run.params
    weight = len(params["model"]) + 2 * len(params["prompt_version"])
    return 1 + (weight + tip + len(params["scenario"])) % 5


@contextmanager
def judged_panel(home: Path, **options: Any) -> Iterator[ServedPanel]:
    """A panel with one fully judged experiment."""
    names = tuple(options.pop("names", {}).items())
    with serve_panel(home, copy_store(_judged_store(names, **options))) as served:
        yield served


@functools.cache
def _judged_store(
    names: tuple[tuple[str, str], ...], experiment: str = EXPERIMENT, judge: str = "anna", **options: Any
) -> RenamingStore:
    store = RenamingStore(dict(names))
    add_judged_experiment(store, experiment, judge, **options)
    return store


def add_judged_experiment(
    store: RenamingStore, experiment: str, judge: str = "anna", suite: str = "tips", **options: Any
) -> None:
    """Add another fully judged experiment."""
    found = record_cells(store, experiment=experiment, suite=load_suite(suite), **options)
    store.mark_changed(found.experiment_id)
    judge_at(SheetDriver(store, found), score_of, judge)


def board_path(name: str = EXPERIMENT) -> str:
    return f"/experiments/{quote(name, safe='')}"


class Page(HTMLParser):
    """A parsed page: its elements and its texts."""

    def __init__(self, response: Any) -> None:
        super().__init__()
        assert response.status_code == 200, (response.status_code, response.text[:2000])
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.feed(response.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {key: value or "" for key, value in attrs}))

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append(" ".join(data.split()))

    @property
    def text(self) -> str:
        return "\n".join(self.texts)

    def all(self, tag: str, **attributes: str) -> list[dict[str, str]]:
        """Elements of a tag with these attributes."""
        return [found for each, found in self.elements if each == tag and attributes.items() <= {**found}.items()]

    def links(self, path: str) -> list[str]:
        """URLs of links to a path, with any query."""
        return [found["href"] for found in self.all("a") if urlsplit(found.get("href", "")).path == path]

    def chart_urls(self) -> list[str]:
        """URLs of all variants of all charts."""
        sources = [each["srcset"] for each in self.all("source")]
        return [*sources, *(each["src"] for each in self.all("img") if "/charts/" in each["src"])]


def get_page(served: ServedPanel, path: str, **options: Any) -> Page:
    return Page(served.get(path, headers=HTML, **options))


def query_of(url: str) -> list[tuple[str, str]]:
    return parse_qsl(urlsplit(url).query, keep_blank_values=True)
