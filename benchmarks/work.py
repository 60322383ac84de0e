"""The work that is measured: one grid, as flags for tipbench, as questions for a raw loop, as runs for a raw logger."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from servers import messages_hash
from tipbench.plan.config import CollectConfig
from tipbench.plan.grid import ModelIdentity, PlannedCell, blocks, plan_grid
from tipbench.plan.suite import load_suite

MODELS = ("a:1b", "b:1b", "c:1b", "d:1b")
_PROMPTS = ("v1", "v2-mentor", "v3-few-shot")
_SCENARIOS = 8
_MOST_REPEATS = 100
_KEEP_WARM_S = 60
_PAGE = 250

Json = dict[str, Any]


@dataclass(frozen=True)
class Work:
    """A grid of exactly `cells` cells over four models, how long a call takes, and how many run at once."""

    cells: int
    call_s: float
    concurrency: int

    def __post_init__(self) -> None:
        _shape(self.cells)

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

    def questions(self) -> dict[str, list[bytes]]:
        """For each model the bodies that tipbench sends for it, encoded beforehand."""
        config = CollectConfig.model_validate(self.config)
        cells = plan_grid(load_suite(config.suite), config, [ModelIdentity(model, model) for model in MODELS])
        return {model: [question(cell) for cell in group] for model, group in blocks(cells)}


def _shape(cells: int) -> tuple[int, int]:
    """Scenarios and repeats that give exactly this number of cells."""
    pairs = len(MODELS) * len(_PROMPTS)
    each, rest = divmod(cells, pairs)
    fitting = [n for n in range(1, _SCENARIOS + 1) if each and each % n == 0 and each // n <= _MOST_REPEATS]
    if rest or not fitting:
        raise ValueError(
            f"{cells} cells are no grid of {len(MODELS)} models, {len(_PROMPTS)} prompts, up to {_SCENARIOS} "
            f"scenarios and {_MOST_REPEATS} repeats; take a multiple of {pairs}, such as 96, 240 or 2400."
        )
    return fitting[-1], each // fitting[-1]


def question(cell: PlannedCell) -> bytes:
    """The body that tipbench sends for a cell."""
    messages = [{"role": "user", "content": cell.rendered.user}]
    if cell.rendered.system:
        messages.insert(0, {"role": "system", "content": cell.rendered.system})
    body = {
        "model": cell.cell.model,
        "messages": messages,
        "stream": True,
        "truncate": False,
        "keep_alive": _KEEP_WARM_S,
        "options": dict(cell.options),
    }
    return json.dumps(body).encode()


def asked(bodies: Iterable[bytes]) -> Counter[str]:
    """What is asked in these bodies; compare with `heard`."""
    parsed = (json.loads(body) for body in bodies)
    return Counter(_asked(body["model"], messages_hash(body["messages"]), body["options"]) for body in parsed)


def heard(log: Mapping[str, Any]) -> Counter[str]:
    """What the scripted server was asked, by its log."""
    return Counter(_asked(chat["model"], chat["messages"], chat["options"]) for chat in chats(log))


def chats(log: Mapping[str, Any]) -> list[Json]:
    """The questions in a scripted server's log."""
    return [request for request in log["requests"] if request["path"] == "/api/chat"]


def _asked(model: str, messages: str, options: Mapping[str, float]) -> str:
    return json.dumps([model, messages, sorted(options.items())])


@dataclass(frozen=True)
class LoggedRun:
    """A run as three requests: creation with all tags, params and metrics (the run's id goes in front), the end."""

    create: bytes  # with %EXPERIMENT% where the experiment's id belongs
    batch: bytes  # all but the run's id
    end: bytes  # all but the run's id


def recorded_runs(mlflow_url: str, experiment: str) -> list[LoggedRun]:
    """The cell runs of an experiment, every param, metric, tag and text, as requests that would log them again."""
    with httpx.Client(base_url=f"{mlflow_url}/api/2.0/mlflow/", trust_env=False, timeout=120) as client:
        found = client.get("experiments/get-by-name", params={"experiment_name": experiment}).raise_for_status()
        return [_logged(run) for run in _search(client, found.json()["experiment"]["experiment_id"])]


def _search(client: httpx.Client, experiment_id: str) -> Iterator[Json]:
    where = "tags.kind = 'cell' AND attributes.status = 'FINISHED'"
    body: Json = {"experiment_ids": [experiment_id], "filter": where, "max_results": _PAGE}
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
