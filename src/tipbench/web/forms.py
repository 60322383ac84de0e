"""Request bodies: forms, file uploads, and JSON that is read only after authentication."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

from fastapi import Request
from starlette.exceptions import HTTPException

from tipbench.web.errors import Invalid

FORM = "application/x-www-form-urlencoded"
JSON = "application/json"
MULTIPART = "multipart/form-data"  # a form with a file
_MOST_FIELDS = 200
_MOST_PARTS = 20


@dataclass(frozen=True)
class UploadedFile:
    """An uploaded file. The name is untrusted: display it, never open it."""

    name: str
    content: bytes


@dataclass(frozen=True)
class Parts:
    """Fields and files of a multipart form."""

    fields: dict[str, str] = field(default_factory=dict)
    files: dict[str, UploadedFile] = field(default_factory=dict)


def content_type(request: Request) -> str:
    """Return the content type without parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def read_form(request: Request) -> dict[str, str]:
    """Return the fields of a form, the last value per name; empty if the body is not a form."""
    if content_type(request) == MULTIPART:
        return (await read_parts(request)).fields
    if content_type(request) != FORM:
        return {}
    text = (await request.body()).decode("utf-8", "replace")
    try:
        return dict(parse_qsl(text, keep_blank_values=True, max_num_fields=_MOST_FIELDS))
    except ValueError as exc:
        raise Invalid(f"A form has at most {_MOST_FIELDS} fields.", path="body") from exc


async def form_value(request: Request, name: str) -> str | None:
    """Return a field of a form, or None."""
    return (await read_form(request)).get(name)


async def read_parts(request: Request) -> Parts:
    """Return the fields and files of a form; parsed once per request."""
    known: Parts | None = getattr(request.state, "parts", None)
    if known is None:
        known = request.state.parts = await _take_apart(request)
    return known


async def _take_apart(request: Request) -> Parts:
    if content_type(request) != MULTIPART:
        return Parts(fields=await read_form(request))
    parts = Parts()
    try:
        async with request.form(max_files=_MOST_PARTS, max_fields=_MOST_PARTS) as form:
            for name, value in form.multi_items():
                if isinstance(value, str):
                    parts.fields[name] = value
                else:
                    parts.files[name] = UploadedFile(value.filename or "", await value.read())
    except HTTPException as exc:
        raise Invalid(f"The form with its file cannot be read ({str(exc.detail)[:200]}).", path="body") from exc
    return parts


async def read_json(request: Request) -> dict[str, Any]:
    """Parse the body as a JSON object; an empty body is an empty object. Raises Invalid."""
    body = await request.body()
    if not body.strip():
        return {}
    if content_type(request) != JSON:
        raise Invalid(f"The body is JSON, sent as {JSON} (got {content_type(request)[:80]!r}).", path="body")
    try:
        value = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as exc:
        raise Invalid(f"The body is no JSON: {str(exc)[:200]}.", path="body") from exc
    if not isinstance(value, dict):
        raise Invalid(f"The body is a JSON object (got {type(value).__name__}).", path="body")
    return value


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is no number of JSON's")
