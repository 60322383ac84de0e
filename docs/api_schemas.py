"""Descriptions and examples of the schemas of an OpenAPI document, for docs/generate.py."""  # noqa: INP001 - as there

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

Json = dict[str, Any]


class Schemas:
    """The schemas of one document."""

    def __init__(self, document: Json) -> None:
        self._schemas: Json = document["components"]["schemas"]

    def fields(self, schema: Json, depth: int, prefix: str = "") -> Iterator[tuple[str, str, str]]:
        """Yield path, type and meaning of an object's properties, down to `depth` levels: `items[].run_id`."""
        for name, raw in self._resolved(schema).get("properties", {}).items():
            path = f"{prefix}{name}"
            yield f"`{path}`", self.type_of(raw), self.meaning(raw)
            inner = self._resolved(self.without_null(raw))
            if depth > 1 and inner.get("type") == "array":
                yield from self.fields(self.without_null(inner["items"]), depth - 1, f"{path}[].")
            elif depth > 1:
                yield from self.fields(inner, depth - 1, f"{path}.")

    def _resolved(self, schema: Json) -> Json:
        reference = schema.get("$ref", "")
        if not reference:
            return schema
        found = self._schemas.get(reference.removeprefix("#/components/schemas/"))
        if found is None:
            raise SystemExit(f"The OpenAPI document refers to {reference}, which is not in it")
        return dict(found)

    def without_null(self, schema: Json) -> Json:
        """Return the schema of the values other than null."""
        choices = [each for each in schema.get("anyOf", ()) if each.get("type") != "null"]
        return choices[0] if choices else schema

    def type_of(self, schema: Json) -> str:
        """Return the type of a schema in words."""
        kinds = schema.get("anyOf") or schema.get("oneOf") or [schema]
        return " or ".join(dict.fromkeys(self._one_type(self._resolved(each)) for each in kinds))

    def _one_type(self, schema: Json) -> str:
        if "const" in schema:
            return f"`{schema['const']}`"
        if "enum" in schema:
            return ", ".join("null" if each is None else f"`{each}`" for each in schema["enum"])
        if schema.get("type") == "array":
            return f"list of {self.type_of(schema.get('items', {}))}"
        kind = str(schema.get("type", "anything"))
        return {"string": "text", "boolean": "true, false"}.get(kind, kind)

    def meaning(self, schema: Json, description: str = "") -> str:
        """Return the description, bounds and default of a schema; `description` replaces its own."""
        text = "" if "$ref" in schema else description or schema.get("description") or ""
        bounds = {**schema, **self.without_null(schema)}
        low, high = bounds.get("minimum"), bounds.get("maximum")
        if low is not None and high is not None:
            text = f"{text} {low:.12g} to {high:.12g}."
        if (default := schema.get("default")) not in (None, [], ""):
            text = f"{text} Default `{json.dumps(default, ensure_ascii=False)}`."
        return " ".join(text.split())

    def sample(self, schema: Json) -> Any:
        """Return an example value: that of the schema, or one made from its parts."""
        if "examples" in schema:
            return schema["examples"][0]
        if "example" in schema:
            return schema["example"]
        if any(each.get("type") == "null" for each in schema.get("anyOf", ())):
            return None
        schema = self._resolved(schema)
        if "const" in schema or "enum" in schema:
            return schema.get("const", schema.get("enum", [None])[0])
        if schema.get("examples"):
            return schema["examples"][0]
        if "properties" in schema:
            return {name: self.sample(each) for name, each in schema["properties"].items()}
        if schema.get("type") == "array":
            return [self.sample(schema["items"])] if "$ref" in schema.get("items", {}) else []
        return {"string": "…", "integer": 1, "number": 0.5, "boolean": False, "object": {}}.get(schema.get("type", ""))
