"""A panel on an experiment with runs of every kind, for tests that only read."""

from __future__ import annotations

import random
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from support.panel_site import fixed_draws
from support.sample_experiment import SampleExperiment, SampleTexts, record_sample
from tipbench.record.store import MemoryStore
from web.panels import Served, serving

HTML = {"Accept": "text/html"}
_TAG = re.compile(r"<[^>]*>")


@dataclass(frozen=True)
class Look:
    """The panel and its experiment."""

    served: Served
    content: SampleExperiment

    def path(self, *rest: str) -> str:
        """A page of the experiment."""
        return "/".join(["/experiments", quote(self.content.name, safe=""), *rest])

    def get(self, *rest: str, query: str = "", **options: Any) -> Any:
        """One of its pages, requested like a browser."""
        return self.served.get(self.path(*rest) + query, headers=HTML, **options)

    def run(self, sort: str, query: str = "") -> str:
        """Return the page of a run of this kind."""
        response = self.get("runs", self.content.runs[sort], query=query)
        assert response.status_code == 200, response.text
        return str(response.text)


@contextmanager
def looking(home: Path, name: str = "tip-bench-may/2026 ?#%", texts: SampleTexts | None = None) -> Iterator[Look]:
    """Fill a store and serve it."""
    store, rng = MemoryStore(), random.Random(1)
    with pytest.MonkeyPatch.context() as patch:  # run ids and draws decide which tips an automatic judge is measured by
        patch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=rng.getrandbits(128), version=4))
        fixed_draws(patch)
        content = record_sample(store, name, texts)
    with serving(home, store) as served:
        yield Look(served, content)


def words_of(html: str) -> str:
    """The text of a page without markup, on one line."""
    return " ".join(unescape(_TAG.sub(" ", html)).split())
