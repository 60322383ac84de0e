"""Generates docs/api.md from the application's OpenAPI document, for docs/generate.py."""  # noqa: INP001 - as there

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import fastapi.routing
from api_schemas import Json, Schemas
from page_parts import fenced, pretty, table

from tipbench.judge.sheet_file import MAX_BYTES as SHEET_BYTES
from tipbench.settings import load_settings
from tipbench.text import join_names
from tipbench.web.app import create_app
from tipbench.web.auth import CSRF_FIELD, admit_request, require_admin
from tipbench.web.security import MAX_ADMIN_SHEET_REQUESTS, MAX_JUDGE_SHEET_BYTES

EXAMPLES = Path(__file__).with_name("api_examples.json")
SECTIONS = {  # tag → heading, in the order of the page; other tags follow
    "experiments": "Experiments",
    "runs": "Runs",
    "leaderboard": "Leaderboard",
    "run": "Plan and start a run",
    "jobs": "Jobs",
    "judge": "Judging",
    "tokens": "Tokens",
    "health": "Health",
    "login": "Logging in",
}
JSON = "application/json"
_MAX_DEPTH = 2  # levels of a body or response that its table shows
_MAX_REPEATED_LINES = 4  # a longer table is shown once and then linked
_COMMON_ERRORS = ("400", "401", "403", "413", "422", "429", "500")  # listed once, at the top

HEAD = """\
<!-- Written by docs/generate.py from the code; do not edit. `make docs` writes it again; a test compares. -->

# The admin API

`tipbench panel` serves the API with the pages, by default on `http://127.0.0.1:5180`. The examples read the
address and a token from the shell:

```sh
export PANEL=http://127.0.0.1:5180
export TOKEN=…    # printed by the first `tipbench panel`, or by `tipbench token create`
curl -sS -H "Authorization: Bearer $TOKEN" "$PANEL/api/bench/experiments"
```

`GET /api/bench/openapi.json` returns the same as an OpenAPI document, for generators and test tools.

**Authentication.** Programs send `Authorization: Bearer TOKEN`. An *admin* may do everything. A *judge* may use only
its own sheets and batches, under the token's name, and sees nothing that unblinds. A browser session (the cookie
of `/login`) has the rights of its token, but every change also needs the session's CSRF token, in the header
`X-CSRF-Token` or the form field `{csrf}`.

**Names in paths.** An experiment's name may contain slashes and other characters: percent-encode it (`a/b` is `a%2Fb`).

**Lists** are `{{"items", "next"}}`: pass `next` as `?next=` to get the next page; it is null on the last one.

**Unknown** is null, never 0. Numbers are not rounded. Times are UTC: `2026-05-04T10:15:00.000Z`.

**Limits.** A body has at most 1 MB, a filled sheet {sheet_mb} MB, from a judge's token {judges_mb} MB. Slow requests
(exporting or applying a sheet, opening or closing a batch) run one at a time for a judge's token and {admins} at a time
for an admin's: a further one waits a moment and is then rejected (429, `busy`) with nothing changed. When a judge's
token applies a sheet or closes a batch, the response is sent 2 seconds after the request or later, so that the response
time reveals nothing about the items.

## Errors

Every error has this form; `code` is stable while the message may change, `path` is the invalid part of the request,
or null:

```json
{error}
```

{statuses}

A rejected sheet also has `status` (`refused`) and `errors`, a list with the item, tip and field of every mistake.

Every response has an `X-Request-ID`: the caller's, if it sent a valid one. The log has it for each failed request.

## All routes

{routes}
"""


@dataclass(frozen=True)
class Operation:
    """One method of one path."""

    method: str
    path: str
    raw: Json
    role: str

    @property
    def name(self) -> str:
        return f"{self.method} {self.path}"

    @property
    def tag(self) -> str:
        return str(self.raw["tags"][0])

    @property
    def anchor(self) -> str:
        """The anchor of the heading on GitHub."""
        kept = [char for char in self.name.lower() if char.isalnum() or char in " -_"]
        return "".join(kept).replace(" ", "-")


def api_page(_present: str) -> str:
    """Return the page; its present text is not needed."""
    document, operations = read_api()
    writer = _Writer(document, json.loads(EXAMPLES.read_text("utf-8")))
    unused = set(writer.examples) - {each.name for each in operations}
    if unused:
        raise SystemExit(f"{EXAMPLES.name} has an example for {min(unused)}, which does not exist")
    return writer.page(operations)


def read_api() -> tuple[Json, list[Operation]]:
    """Return the OpenAPI document, and its operations in the order of the page."""
    with tempfile.TemporaryDirectory() as folder:
        app = create_app(load_settings({"TIPBENCH_HOME": folder}, Path(folder)))
        document = app.openapi()
        roles = _roles(app)
    operations = [
        Operation(method.upper(), path, raw, roles[method.upper(), path])
        for path, methods in document["paths"].items()
        for method, raw in methods.items()
    ]
    places = {tag: place for place, tag in enumerate(SECTIONS)}
    operations.sort(key=lambda each: (places.get(each.tag, len(places)), each.tag, each.path, each.method))
    return document, operations


def _roles(app: Any) -> dict[tuple[str, str], str]:
    """Return the role that each route needs, from its dependencies."""
    # Older versions of FastAPI have a flat list of routes.
    iter_routes = getattr(fastapi.routing, "iter_route_contexts", lambda routes: routes)
    roles: dict[tuple[str, str], str] = {}
    for route in iter_routes(app.routes):
        original = getattr(route, "original_route", route)
        if not hasattr(original, "dependant"):
            continue
        used = set(_dependencies(getattr(route, "dependant", None) or original.dependant))
        role = "admin" if require_admin in used else "admin, judge" if admit_request in used else "public"
        roles |= {(method, str(route.path_format)): role for method in route.methods}
    return roles


def _dependencies(dependant: Any) -> Iterator[Any]:
    """Yield the functions that a route depends on, directly and through others."""
    yield dependant.call
    for each in dependant.dependencies:
        yield from _dependencies(each)


class _Writer:
    """Formats the OpenAPI document as Markdown."""

    def __init__(self, document: Json, examples: Mapping[str, Json]) -> None:
        self._schemas = Schemas(document)
        self.examples = examples
        self._tables: dict[str, Operation] = {}  # a table → the operation that shows it

    def page(self, operations: Sequence[Operation]) -> str:
        """Return the head and a section for each tag."""
        parts = [self._head(operations)]
        section = ""
        for each in operations:
            if each.tag != section:
                section = each.tag
                parts.append(f"## {SECTIONS.get(section, section.capitalize())}")
            parts.append(self._operation(each))
        return "\n\n".join(part.strip() for part in parts) + "\n"

    def _head(self, operations: Sequence[Operation]) -> str:
        errors: dict[str, Json] = {}
        for each in operations:
            for status, response in each.raw["responses"].items():
                if int(status) >= 400 and each.tag != "health":
                    errors.setdefault(status, response)
        rows = [
            (status, response["description"], "everywhere" if status in _COMMON_ERRORS else "where named")
            for status, response in sorted(errors.items())
        ]
        routes = [(f"[`{each.name}`](#{each.anchor})", each.role, each.raw["summary"]) for each in operations]
        return HEAD.format(
            csrf=CSRF_FIELD,
            sheet_mb=SHEET_BYTES // 1_000_000,
            judges_mb=MAX_JUDGE_SHEET_BYTES // 1_000_000,
            admins=MAX_ADMIN_SHEET_REQUESTS,
            error=pretty(errors["404"]["content"][JSON]["example"]),
            statuses=table(("status", "meaning", "where"), rows),
            routes=table(("route", "role", "what it does"), routes),
        )

    def _operation(self, operation: Operation) -> str:
        raw = operation.raw
        parts = [
            f"### `{operation.name}`",
            f"{raw['summary']}. {raw['description']}",
            f"Role: {operation.role}.",
            self._parameters(operation),
            self._body(operation),
            fenced("sh", self._curl(operation)),
            *self._responses(operation),
            _errors(raw["responses"]),
        ]
        return "\n\n".join(part for part in parts if part)

    def _parameters(self, operation: Operation) -> str:
        rows = [
            (
                _parameter(each),
                self._schemas.type_of(self._schemas.without_null(each["schema"])),
                self._schemas.meaning(each["schema"], each.get("description", "")),
            )
            for each in operation.raw.get("parameters", ())
            if each["in"] != "path"
        ]
        if not rows:
            return ""
        return self._show_once(table(("parameter", "values", "meaning"), rows), operation, "Its parameters")

    def _show_once(self, text: str, operation: Operation, what: str) -> str:
        """Return a table, or a link to the operation that shows the same table."""
        first = self._tables.setdefault(text, operation)
        if first is operation or text.count("\n") <= _MAX_REPEATED_LINES:
            return text
        return f"{what} are those of [`{first.name}`](#{first.anchor})."

    def _body(self, operation: Operation) -> str:
        body = operation.raw.get("requestBody")
        if not body:
            return ""
        media_types = " or ".join(f"`{media_type}`" for media_type in body["content"])
        optional = "" if body.get("required") else ", optional"
        text = f"Body ({media_types}{optional}). {body.get('description', '')}".strip()
        schema = next(iter(body["content"].values()))["schema"]
        rows = list(self._schemas.fields(schema, _MAX_DEPTH))
        if not rows:
            return text
        return f"{text}\n\n{self._show_once(table(('field', 'type', 'meaning'), rows), operation, 'Its fields')}"

    def _responses(self, operation: Operation) -> Iterator[str]:
        for status, response in operation.raw["responses"].items():
            if int(status) >= 400:
                continue
            media_types = list(response.get("content", {}))
            types = " or ".join(f"`{media_type}`" for media_type in media_types)
            shown_types = f" ({types})" if types and media_types != [JSON] else ""
            description = response["description"]
            yield f"**{status}**{shown_types} {'Done.' if description == 'Successful Response' else description}"
            schema = response.get("content", {}).get(JSON, {}).get("schema")
            example = self.examples.get(operation.name, {})
            if schema is None:
                yield fenced("", "\n".join(example["text"])) if "text" in example else ""
                continue
            rows = [row for row in self._schemas.fields(schema, _MAX_DEPTH) if row[-1]]  # those with a meaning
            if rows:
                yield table(("field", "type", "meaning"), rows)
            yield fenced("json", pretty(example["answer"] if "answer" in example else self._schemas.sample(schema)))

    def _curl(self, operation: Operation) -> str:
        if command := self.examples.get(operation.name, {}).get("curl"):
            return "\n".join(command)
        words = ["curl -sS"]
        if operation.method != "GET":
            words.append(f"-X {operation.method}")
        if operation.role != "public":
            words.append('-H "Authorization: Bearer $TOKEN"')
        body = operation.raw.get("requestBody", {}).get("content", {}).get(JSON, {}).get("example")
        if body is not None:
            words += [f"-H 'Content-Type: {JSON}'", f"-d '{json.dumps(body, ensure_ascii=False)}'"]
        return " ".join([*words, f'"$PANEL{self._path(operation)}"'])

    def _path(self, operation: Operation) -> str:
        path, query = operation.path, {}
        for each in operation.raw.get("parameters", ()):
            example = str(self._schemas.sample(each["schema"]))
            if each["in"] == "path":
                path = path.replace(f"{{{each['name']}}}", example)
            elif each["in"] == "query" and each.get("required"):
                query[each["name"]] = example
        return path + (f"?{urlencode(query, safe=':')}" if query else "")


def _parameter(parameter: Json) -> str:
    place = " (header)" if parameter["in"] == "header" else ""
    return f"`{parameter['name']}`{place}{', required' if parameter.get('required') else ''}"


def _errors(responses: Json) -> str:
    errors = [status for status in sorted(responses) if int(status) >= 400]
    if len(errors) < len(_COMMON_ERRORS):
        return f"Errors: {join_names(errors, len(errors))} only." if errors else ""
    others = [status for status in errors if status not in _COMMON_ERRORS]
    return f"Other errors: {join_names(others, len(others))}." if others else ""
