"""Fields of the DAG's trigger form: the settings of a collect (CollectConfig), and those that only Airflow has.

python airflow/form_fields.py            write them to dags/bench_params.json (`make docs`)
python airflow/form_fields.py --check    exit 1 if that file is not up to date

The DAG reads that file, so that it imports nothing of tipbench when Airflow parses it.
"""  # noqa: INP001 - a script, not a package

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tipbench.plan.collect_config import URL_KEYS, WAIT_FOR_JUDGE, CollectConfig

FILE = Path(__file__).parents[1] / "dags" / "bench_params.json"
LIST_KEYS = ("models", "prompts")
_ADDED_DESCRIPTIONS = {
    "ollama_url": " If empty, the worker's server, or all listed hosts.",
    "mlflow_url": " If empty, the worker's server.",
    "skip_refused": " On by default in Airflow.",
}


def params() -> dict[str, dict[str, Any]]:
    """Return default, description and JSON schema by key, in the order of the form."""
    properties = CollectConfig.model_json_schema()["properties"]
    fields = {key: _param(key, dict(schema)) for key, schema in properties.items()}
    fields["skip_refused"]["default"] = True
    fields[WAIT_FOR_JUDGE] = {
        "default": False,
        "description": "Wait until all answers are judged, then compare; otherwise compare immediately.",
        "type": "boolean",
    }
    return fields


def _param(key: str, schema: dict[str, Any]) -> dict[str, Any]:
    default = schema.pop("default")
    description = f"{schema.pop('description')}{_ADDED_DESCRIPTIONS.get(key, '')}"
    schema.pop("title", None)
    if key in URL_KEYS:
        default, schema = None, {"type": ["null", "string"], "maxLength": 2000}
    elif key in LIST_KEYS:
        schema = {"type": ["string", "array"], "items": {"type": "string"}, "minLength": 1, "minItems": 1}
    return {"default": default, "description": description, **schema}


def main(arguments: Sequence[str]) -> int:
    """Write the file, or with --check only compare."""
    text = json.dumps(params(), indent=1, ensure_ascii=False) + "\n"
    is_up_to_date = FILE.exists() and FILE.read_text("utf-8") == text
    if "--check" in arguments:
        print(f"{FILE.name} is {'up to date' if is_up_to_date else 'out of date; run `make docs`'}", file=sys.stderr)
        return 0 if is_up_to_date else 1
    if not is_up_to_date:
        FILE.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
