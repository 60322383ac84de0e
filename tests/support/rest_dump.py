"""Loads a stored dump of an experiment from MLflow's REST API into another MLflow server."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

_RUN_ID = re.compile(r"(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])")


@dataclass(frozen=True)
class LoadedDump:
    """A loaded experiment. `runs` are by their ids in the dump; `ids` maps these to the ids on the server."""

    name: str
    runs: dict[str, Any]
    ids: dict[str, str] = field(default_factory=dict)

    def translate(self, text: str) -> str:
        """Replace the dump's run ids in a text by the server's, which chooses its ids itself."""
        return _RUN_ID.sub(lambda match: self.ids.get(match[0], match[0]), text)


def read_dump(folder: Path) -> dict[str, Any]:
    """The runs of `runs.jsonl` by id, oldest first. Its first line has the long tag values of several runs."""
    first, *runs = (json.loads(line) for line in (folder / "runs.jsonl").read_text("utf-8").split("\n") if line)
    for run in runs:
        for tag in run["data"]["tags"]:
            if "repeated" in tag:
                tag["value"] = first["repeated"][tag.pop("repeated")]
    return {run["info"]["run_id"]: run for run in runs}


def load_dump(folder: Path, url: str, name: str) -> LoadedDump:
    """Create the experiment under `name` with all its runs, their times and statuses.

    Runs refer to older runs only, so one pass is enough. The dumps have no run ids in texts of several parts, whose
    hash a new id would change.
    """
    loaded = LoadedDump(name, read_dump(folder))
    tags = json.loads((folder / "experiment.json").read_text("utf-8"))["tags"]
    with httpx.Client(base_url=f"{url}/api/2.0/mlflow/", trust_env=False, timeout=60) as client:

        def post(path: str, **body: object) -> Any:
            response = client.post(path, json=body)
            assert response.status_code == 200, response.text
            return response.json()

        experiment_id = post("experiments/create", name=name, tags=tags)["experiment_id"]
        for old, run in loaded.runs.items():
            info, data = run["info"], run["data"]
            tags = [{"key": tag["key"], "value": loaded.translate(tag["value"])} for tag in data["tags"]]
            created = post("runs/create", experiment_id=experiment_id, start_time=info["start_time"], tags=tags)
            run_id = loaded.ids[old] = created["run"]["info"]["run_id"]
            post("runs/log-batch", run_id=run_id, params=data["params"], metrics=data.get("metrics", []))
            if info["status"] != "RUNNING":
                post("runs/update", run_id=run_id, status=info["status"], end_time=info["end_time"])
    return loaded
