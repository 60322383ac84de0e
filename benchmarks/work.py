"""The measured work: one grid, as options for tipbench, as chat requests for one raw loop, as runs for another."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from servers import messages_hash
from tipbench.plan.collect_config import CollectConfig
from tipbench.plan.grid import ModelIdentity, PlannedCell, cells_by_model, plan_grid
from tipbench.plan.suite import load_suite

MODELS = ("a:1b", "b:1b", "c:1b", "d:1b")
_PROMPTS = ("v1", "v2-mentor", "v3-few-shot")
_SCENARIOS = 8
_MAX_REPEATS = 100
_KEEP_ALIVE_S = 60
_PAGE_SIZE = 250

Json = dict[str, Any]


@dataclass(frozen=True)
class Work:
    """A grid of exactly `cells` cells over four models; calls of `call_s` seconds, `concurrency` at the same time."""

    cells: int
    call_s: float = 0.05
    concurrency: int = 8

    def __post_init__(self) -> None:
        _shape(self.cells)  # raises ValueError if there is no such grid

    @property
    def config(self) -> dict[str, str]:
        """The options of `tipbench collect` for this work, without addresses."""
        scenarios, repeats = _shape(self.cells)
        return {
            "models": ",".join(MODELS),
            "prompts": ",".join(_PROMPTS),
            "n_scenarios": str(scenarios),
            "repeats": str(repeats),
            "concurrency": str(self.concurrency),
        }


def _shape(cells: int) -> tuple[int, int]:
    """The scenarios and repeats that give exactly this number of cells."""
    pairs = len(MODELS) * len(_PROMPTS)
    per_pair, rest = divmod(cells, pairs)
    possible = [n for n in range(1, _SCENARIOS + 1) if per_pair % n == 0 and 1 <= per_pair // n <= _MAX_REPEATS]
    if rest or not possible:
        raise ValueError(
            f"{cells} cells are not a grid of {len(MODELS)} models, {len(_PROMPTS)} prompts, up to {_SCENARIOS} "
            f"scenarios and {_MAX_REPEATS} repeats; use a multiple of {pairs}, such as 96, 240 or 2400."
        )
    scenarios = max(possible)
    return scenarios, per_pair // scenarios


def chat_bodies(options: Mapping[str, str]) -> dict[str, list[bytes]]:
    """The bodies of the chat requests that tipbench sends for a grid with these options, by model."""
    config = CollectConfig.model_validate(options)
    models = [ModelIdentity(model, model) for model in options["models"].split(",")]
    cells = plan_grid(load_suite(config.suite), config, models)
    return {model: [_chat_body(cell) for cell in group] for model, group in cells_by_model(cells)}


def _chat_body(cell: PlannedCell) -> bytes:
    messages = [{"role": "user", "content": cell.rendered.user}]
    if cell.rendered.system:
        messages.insert(0, {"role": "system", "content": cell.rendered.system})
    body = {
        "model": cell.cell.model,
        "messages": messages,
        "stream": True,
        "truncate": False,
        "keep_alive": _KEEP_ALIVE_S,
        "options": dict(cell.options),
    }
    return json.dumps(body).encode()


def count_chats(bodies: Iterable[bytes]) -> Counter[str]:
    """Count equal chat requests, as `count_logged_chats` does."""
    parsed = (json.loads(body) for body in bodies)
    return Counter(_chat_key(body["model"], messages_hash(body["messages"]), body["options"]) for body in parsed)


def count_logged_chats(log: Mapping[str, Any]) -> Counter[str]:
    """Count equal chat requests in a scripted server's log."""
    return Counter(_chat_key(chat["model"], chat["messages"], chat["options"]) for chat in logged_chats(log))


def logged_chats(log: Mapping[str, Any]) -> list[Json]:
    """The chat requests in a scripted server's log."""
    return [request for request in log["requests"] if request["path"] == "/api/chat"]


def _chat_key(model: str, messages_hash: str, options: Mapping[str, float]) -> str:
    return json.dumps([model, messages_hash, sorted(options.items())])


@dataclass(frozen=True)
class LoggedRun:
    """A run as the bodies of three requests: creation with all tags, params and metrics, the end."""

    create: bytes  # with %EXPERIMENT% in place of the experiment's id
    batch: bytes  # without the run's id
    end: bytes  # without the run's id


def recorded_runs(mlflow_url: str, experiment: str) -> list[LoggedRun]:
    """The cell runs of an experiment as requests that would log them again, with all tags, params and metrics."""
    with httpx.Client(base_url=f"{mlflow_url}/api/2.0/mlflow/", trust_env=False, timeout=120) as client:
        found = client.get("experiments/get-by-name", params={"experiment_name": experiment}).raise_for_status()
        return [_logged(run) for run in _search(client, found.json()["experiment"]["experiment_id"])]


def _search(client: httpx.Client, experiment_id: str) -> Iterator[Json]:
    where = "tags.kind = 'cell' AND attributes.status = 'FINISHED'"
    body: Json = {"experiment_ids": [experiment_id], "filter": where, "max_results": _PAGE_SIZE}
    while True:
        page = client.post("runs/search", json=body).raise_for_status().json()
        yield from page.get("runs", [])
        if not page.get("next_page_token"):
            return
        body["page_token"] = page["next_page_token"]


def _logged(run: Json) -> LoggedRun:
    info, data = run["info"], run["data"]
    metrics = [{key: item[key] for key in ("key", "value", "timestamp", "step")} for item in data["metrics"]]
    create = {"experiment_id": "%EXPERIMENT%", "start_time": info["start_time"], "tags": data["tags"]}
    batch = {"params": data["params"], "metrics": metrics}
    end = {"status": info["status"], "end_time": info["end_time"]}
    return LoggedRun(*(json.dumps(body).encode() for body in (create, batch, end)))
