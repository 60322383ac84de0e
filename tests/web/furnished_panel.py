"""A panel on an experiment with something of everything, for tests that only look."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from support.sample_experiment import SampleExperiment, Words, record_sample
from tipbench.record.store import MemoryStore
from web.panels import Served, serving

HTML = {"Accept": "text/html"}
_TAG = re.compile(r"<[^>]*>")


@dataclass(frozen=True)
class Look:
    """The panel and what is in it."""

    served: Served
    content: SampleExperiment

    def path(self, *rest: str) -> str:
        """A page of the experiment."""
        return "/".join(["/experiments", quote(self.content.name, safe=""), *rest])

    def get(self, *rest: str, query: str = "", **options: Any) -> Any:
        """One of its pages, as a browser asks for it."""
        return self.served.get(self.path(*rest) + query, headers=HTML, **options)

    def run(self, sort: str, query: str = "") -> str:
        """The page of a run of a sort."""
        response = self.get("runs", self.content.runs[sort], query=query)
        assert response.status_code == 200, response.text
        return str(response.text)


@contextmanager
def looking(home: Path, name: str = "tip-bench-may/2026 ?#%", words: Words | None = None) -> Iterator[Look]:
    """Furnish a store and serve it."""
    store = MemoryStore()
    content = record_sample(store, name, words)
    with serving(home, store) as served:
        yield Look(served, content)


def words_of(html: str) -> str:
    """What a page says, without its markup and on one line."""
    return " ".join(unescape(_TAG.sub(" ", html)).split())
