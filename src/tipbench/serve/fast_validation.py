"""Validation of requests that is fast for the usual ones: msgspec accepts them, and pydantic decides about all others.

msgspec's types are made from the JSON Schema of pydantic's, which also documents the API. They accept nothing that
pydantic refuses, and less than it accepts: not 7.0 for a count, and no tallies by category. What they refuse is
validated by pydantic, which accepts it or raises an error that names the wrong field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Union

import msgspec
from pydantic import TypeAdapter

_LIMITS = {
    "minimum": "ge",
    "maximum": "le",
    "minLength": "min_length",
    "maxLength": "max_length",
    "minItems": "min_length",
    "maxItems": "max_length",
    "pattern": "pattern",
}
_SIMPLE = {"string": str, "number": float, "integer": int, "boolean": bool, "null": None}
_UNDERSTOOD = {*_LIMITS, "type", "items", "properties", "required", "additionalProperties", "$defs"}
_TEXTS = {"title", "description", "examples"}  # these limit nothing
_EXACT = 2**53
_NOTHING = Annotated[int, msgspec.Meta(ge=1, le=0)]  # accepts no value


def fast_validation(adapter: TypeAdapter[Any], check: Callable[[Any], object]) -> Callable[[bytes], Any]:
    """Return a function from JSON to a valid request; it raises pydantic's ValidationError.

    `check` does what no JSON Schema can express: it raises ValueError for requests that pydantic refuses or changes.
    """
    schema = adapter.json_schema()
    accept = msgspec.json.Decoder(_type_of(schema, schema.get("$defs", {}))).decode
    decode = msgspec.json.Decoder().decode
    validate = adapter.validator.validate_json

    def validated(body: bytes) -> Any:
        try:
            accept(body)
            request = decode(body)
            check(request)
        except (msgspec.MsgspecError, ValueError):
            return validate(body)
        return request

    return validated


def _type_of(schema: Mapping[str, Any], defs: Mapping[str, Any]) -> Any:
    words = schema.keys() - _TEXTS
    if words == {"$ref"}:
        return _type_of(defs[schema["$ref"].rpartition("/")[2]], defs)
    if words == {"anyOf"}:
        return Union[tuple(_type_of(each, defs) for each in schema["anyOf"])]  # noqa: UP007
    if words - _UNDERSTOOD or schema.get("additionalProperties"):
        return _NOTHING
    if schema["type"] == "object":
        fields = [
            (name, _type_of(each, defs), *(() if name in schema.get("required", ()) else (None,)))
            for name, each in schema["properties"].items()
        ]
        return msgspec.defstruct(schema["title"], fields, kw_only=True, forbid_unknown_fields=True, gc=False)
    limits = {_LIMITS[word]: value for word, value in schema.items() if word in _LIMITS}
    if schema["type"] == "number":  # beyond these, an integer may be another number than pydantic's float
        limits = {"ge": -_EXACT, "le": _EXACT, **limits}
    if "pattern" in limits:
        limits["pattern"] = limits["pattern"].removesuffix("$") + r"\Z"  # in Python `$` accepts a newline at the end
    kind = list[_type_of(schema["items"], defs)] if schema["type"] == "array" else _SIMPLE[schema["type"]]  # type: ignore[misc]
    return Annotated[kind, msgspec.Meta(**limits)] if limits else kind
