"""What the run's form can suggest: models, and the experiments there are. A slow server never holds up the page."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import httpx
from starlette.concurrency import run_in_threadpool

from tipbench.errors import TipbenchError
from tipbench.generate.http import http_client, tls_for
from tipbench.generate.template import MODEL as TEMPLATE
from tipbench.generate.weights import EMBEDDED_MODELS, is_fetched
from tipbench.plan.config import EXPERIMENT_PREFIX
from tipbench.web.deps import Panel

PATIENCE_S = 1.5  # for Ollama's list, all in all
GLANCE_S = 0.3  # that a page waits for it; a server on this machine needs far less
_MOST_BYTES = 2_000_000
_MOST_NAMES = 200
_LONGEST_NAME = 200

_T = TypeVar("_T")


@dataclass(frozen=True)
class Suggestion:
    """A model one can choose, and a word about it."""

    name: str
    note: str


def own_models(panel: Panel) -> tuple[Suggestion, ...]:
    """What runs without Ollama."""
    embedded = [
        Suggestion(
            name,
            f"inside tipbench, {model.params_b * 1000:.0f}M"
            + ("" if is_fetched(panel.settings.home, name) else "; first run `tipbench models fetch`"),
        )
        for name, model in EMBEDDED_MODELS.items()
    ]
    return (*embedded, Suggestion(TEMPLATE, "no model: tips from templates, the floor to beat"))


async def ollama_models(panel: Panel, url: str, wait_s: float) -> tuple[Suggestion, ...] | None:
    """What Ollama at an allowed address has; None when it has not answered yet, or not at all."""
    return await _soon(panel, ("ollama models", url), lambda: _ask_ollama(url), wait_s)


async def experiment_names(panel: Panel, wait_s: float = GLANCE_S) -> tuple[str, ...]:
    """The experiments there are, as far as MLflow tells it quickly."""
    return await _soon(panel, ("experiment names",), lambda: _ask_mlflow(panel), wait_s) or ()


async def _soon(panel: Panel, key: tuple[str, ...], make: Callable[[], _T | None], wait_s: float) -> _T | None:
    """The answer if it comes within `wait_s`; else it is waited for in the background, for whoever asks next."""
    cache = panel.queries.small
    asked = asyncio.ensure_future(run_in_threadpool(cache.get, key, None, make))
    done, _ = await asyncio.wait({asked}, timeout=wait_s)
    return asked.result() if done else None


def _ask_ollama(url: str) -> tuple[Suggestion, ...] | None:
    """Never raises: a list that cannot be had is only a list less."""
    deadline = time.monotonic() + PATIENCE_S
    content = b""
    try:
        with (
            http_client(url, tls_for(url), timeout=PATIENCE_S) as client,
            client.stream("GET", f"{url.rstrip('/')}/api/tags") as response,
        ):
            for piece in response.iter_bytes():
                content += piece
                if time.monotonic() > deadline or len(content) > _MOST_BYTES:
                    return None
            return _suggestions(content) if response.status_code == 200 else None
    except (httpx.HTTPError, httpx.InvalidURL, TipbenchError, OSError, ValueError, RecursionError):
        return None


def _suggestions(content: bytes) -> tuple[Suggestion, ...]:
    raw = json.loads(content)
    listed = raw.get("models") if isinstance(raw, dict) else None
    found: dict[str, Suggestion] = {}
    for entry in listed if isinstance(listed, list) else []:
        name = entry.get("name") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not _fit(name):
            continue
        details = entry.get("details")
        size = details.get("parameter_size") if isinstance(details, dict) else None
        note = f"Ollama, {size[:20]}" if isinstance(size, str) and size and size.isprintable() else "Ollama"
        found.setdefault(name, Suggestion(name, note))
    return tuple(sorted(found.values(), key=lambda each: each.name))[:_MOST_NAMES]


def _fit(name: str) -> bool:
    """Whether it could be sent back as one of a comma-separated list."""
    return 0 < len(name) <= _LONGEST_NAME and name.isprintable() and not set(name) & set(" ,")


def _ask_mlflow(panel: Panel) -> tuple[str, ...]:
    try:
        found = panel.tracker.open().store.experiments()
    except TipbenchError:
        return ()
    ours = [each.name for each in found if each.name.startswith(EXPERIMENT_PREFIX) and each.name.isprintable()]
    return tuple(sorted(ours))[:_MOST_NAMES]
