"""The pages of an experiment with runs of every kind, for tests that only read."""

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

from support.panel_site import fix_random_draws
from support.sample_experiment import SampleExperiment, SampleTexts, record_sample
from tipbench.record.store import MemoryStore
from web.panels import HTML, ServedPanel, serve_panel

_TAG = re.compile(r"<[^>]*>")


@dataclass(frozen=True)
class SamplePages:
    """The pages of a sample experiment in a panel."""

    served: ServedPanel
    content: SampleExperiment

    def path(self, *rest: str) -> str:
        """Return the path of a page of the experiment."""
        return "/".join(["/experiments", quote(self.content.name, safe=""), *rest])

    def get(self, *rest: str, query: str = "", **options: Any) -> Any:
        """Request one of its pages as a browser does."""
        return self.served.get(self.path(*rest) + query, headers=HTML, **options)

    def run(self, sort: str, query: str = "") -> str:
        """Return the page of a run of this kind."""
        response = self.get("runs", self.content.runs[sort], query=query)
        assert response.status_code == 200, response.text
        return str(response.text)


@contextmanager
def serve_sample_pages(
    home: Path, name: str = "tip-bench-may/2026 ?#%", texts: SampleTexts | None = None
) -> Iterator[SamplePages]:
    """Serve a panel on a store with a sample experiment."""
    store, rng = MemoryStore(), random.Random(1)
    with pytest.MonkeyPatch.context() as patch:  # run ids and draws decide which tips an automatic judge is measured by
        patch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=rng.getrandbits(128), version=4))
        fix_random_draws(patch)
        content = record_sample(store, name, texts)
    with serve_panel(home, store) as served:
        yield SamplePages(served, content)


def page_text(html: str) -> str:
    """Return the text of a page without markup, on one line."""
    return " ".join(unescape(_TAG.sub(" ", html)).split())
