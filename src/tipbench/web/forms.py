"""Request bodies and pagination. Bodies are forms, file uploads, or JSON that is parsed after authentication."""

from __future__ import annotations

import base64
import binascii
import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple, TypeVar
from urllib.parse import parse_qsl

from fastapi import Depends, Query, Request
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from tipbench.web.errors import Invalid, validate_part

FORM_TYPE = "application/x-www-form-urlencoded"
JSON_TYPE = "application/json"
MULTIPART = "multipart/form-data"  # a form with a file
_MAX_FIELDS = 200  # of a form without files
_MAX_PARTS = 20  # of a multipart form: maximum number of fields, and of files

_M = TypeVar("_M", bound=BaseModel)


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
    return (await read_parts(request)).fields


async def read_parts(request: Request) -> Parts:
    """Return the fields and files of a form, the last value per name; parsed once per request."""
    cached: Parts | None = getattr(request.state, "parts", None)
    if cached is not None:
        return cached
    parts = Parts()
    if content_type(request) == FORM_TYPE:
        text = (await request.body()).decode("utf-8", "replace")
        try:
            parts.fields.update(parse_qsl(text, keep_blank_values=True, max_num_fields=_MAX_FIELDS))
        except ValueError as exc:
            raise Invalid(f"A form has at most {_MAX_FIELDS} fields.", path="body") from exc
    elif content_type(request) == MULTIPART:
        try:
            async with request.form(max_files=_MAX_PARTS, max_fields=_MAX_PARTS) as form:
                for name, value in form.multi_items():
                    if isinstance(value, str):
                        parts.fields[name] = value
                    else:
                        parts.files[name] = UploadedFile(value.filename or "", await value.read())
        except HTTPException as exc:
            raise Invalid(f"The multipart form cannot be parsed: {str(exc.detail)[:200]}.", path="body") from exc
    request.state.parts = parts
    return parts


async def read_json(request: Request) -> dict[str, Any]:
    """Parse the body as a JSON object; an empty body is an empty object. Raises Invalid."""
    body = await request.body()
    if not body.strip():
        return {}
    if content_type(request) != JSON_TYPE:
        raise Invalid(
            f"The body must be JSON with the content type {JSON_TYPE} (got {content_type(request)[:80]!r}).",
            path="body",
        )
    try:
        value = json.loads(body, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as exc:
        raise Invalid(f"The body is not valid JSON: {str(exc)[:200]}.", path="body") from exc
    if not isinstance(value, dict):
        raise Invalid(f"The body must be a JSON object (got {type(value).__name__}).", path="body")
    return value


def body_of(model: type[_M], require: Callable[..., Any]) -> Any:
    """Return a dependency that authenticates with `require`, then parses the body. FastAPI would parse it first."""

    # `Depends` is not in `Annotated`: FastAPI evaluates annotations with global names only, and `require` is local.
    async def read(request: Request, _caller: Any = Depends(require)) -> _M:  # noqa: B008
        return validate_part(model, await read_json(request), "body")

    return Depends(read)


def body_schema(
    model: type[BaseModel], example: dict[str, Any], *, about: str | None = None, required: bool = True
) -> dict[str, Any]:
    """Return the `openapi_extra` of a route whose body is parsed by `body_of`; `about` describes the body."""
    schema = model.model_json_schema()
    body: dict[str, Any] = {}
    if about:
        body["description"] = about
    if required:
        body["required"] = True
    definitions = schema.pop("$defs", {})
    body["content"] = {JSON_TYPE: {"schema": _inline_references(schema, definitions), "example": example}}
    return {"requestBody": body}


def _inline_references(schema: Any, definitions: dict[str, Any]) -> Any:
    """Replace references by their definitions. FastAPI publishes definitions only for bodies that it parses itself."""
    if isinstance(schema, list):
        return [_inline_references(each, definitions) for each in schema]
    if not isinstance(schema, dict):
        return schema
    keywords = dict(schema)
    if "$ref" in keywords:
        name = str(keywords.pop("$ref")).removeprefix("#/$defs/")
        keywords = {**definitions.get(name, {}), **keywords}
    return {key: _inline_references(value, definitions) for key, value in keywords.items()}


def _reject_constant(constant: str) -> object:
    raise ValueError(f"{constant} is not valid JSON")


DEFAULT_LIMIT = 50  # items per page
MAX_LIMIT = 500
MAX_CURSOR = 400  # characters

_T = TypeVar("_T")


class SortKey(NamedTuple):
    """Position of an item in a sorted list."""

    rank: int  # ascending; a negated time if the newest item is first
    id: str


Limit = Annotated[int, Query(ge=1, le=MAX_LIMIT, description=f"Maximum number of items per page, up to {MAX_LIMIT}.")]
Next = Annotated[
    str | None,
    Query(max_length=MAX_CURSOR, description="The `next` value of the previous page; omit it for the first page."),
]


def page_of(
    items: Sequence[_T], key: Callable[[_T], SortKey], *, limit: int, after: str | None
) -> tuple[Sequence[_T], str | None]:
    """Return the items of one page and the cursor of the next page; `items` must be sorted by `key`."""
    start = bisect_right(items, decode_cursor(after), key=key) if after is not None else 0
    page = items[start : start + limit]
    has_more = start + limit < len(items)
    next_cursor = encode_cursor(key(page[-1])) if has_more else None
    return page, next_cursor


def encode_cursor(key: SortKey) -> str:
    """Encode a sort key as a cursor for URLs."""
    return base64.urlsafe_b64encode(json.dumps(list(key)).encode()).rstrip(b"=").decode()


def decode_cursor(text: str) -> SortKey:
    """Decode a cursor. Raises Invalid."""
    try:
        padding = "=" * (-len(text) % 4)
        rank, id_ = json.loads(base64.urlsafe_b64decode(text + padding))
        if type(rank) is int and isinstance(id_, str):
            return SortKey(rank, id_)
    except (ValueError, TypeError, RecursionError, binascii.Error):
        pass
    raise Invalid("next must be the `next` value of the previous page; omit it for the first page.", path="query.next")
