"""Reading and validation of a suite's TOML files. Errors include the file and line."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, StringConstraints, ValidationError
from pydantic_core import ErrorDetails

from tipbench.errors import SuiteError

MAX_BYTES = 1_000_000
MAX_LINE = 2000  # characters of a `Line`
_MAX_VALUE_LINES = 1000  # `_lines_of_keys` takes time quadratic in the lines of a value, so it stops beyond this number

Place = tuple[str | int, ...]  # a location in pydantic's format: ("personas", 0, "tasks", 2, "priority")


class Schema(BaseModel):
    """Base class of the file schemas. Rejects unknown keys and implicit conversions."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


def is_id(text: str) -> bool:
    """Return whether a text is a valid id, safe in file names, URLs, MLflow filters and comma-separated options."""
    return re.fullmatch(r"[a-z0-9-]{1,64}", text) is not None


def _check_id(text: str) -> str:
    if not is_id(text):
        raise ValueError("must be 1 to 64 characters out of a-z, 0-9 and '-'")
    return text


def _check_one_line(text: str) -> str:
    if any(ord(char) < 32 for char in text):
        raise ValueError("must be one line, without control characters")
    return text


Id = Annotated[str, AfterValidator(_check_id)]
Line = Annotated[
    str, StringConstraints(strip_whitespace=True, min_length=1, max_length=MAX_LINE), AfterValidator(_check_one_line)
]
AnySchema = TypeVar("AnySchema", bound=Schema)


def read_text(path: Path) -> str:
    """Return the text of a suite's file. Raises SuiteError if it is missing, over 1 MB or not UTF-8."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise SuiteError(path, None, "the file is missing. A suite needs it; see docs/suites.md.") from None
    except OSError as exc:
        raise SuiteError(path, None, f"the file cannot be read: {exc.strerror}.") from exc
    if len(content) > MAX_BYTES:
        raise SuiteError(path, None, f"the file is over {MAX_BYTES // 1_000_000} MB; suite files are short texts.")
    try:
        return content.decode()
    except UnicodeDecodeError as exc:
        line = content.count(b"\n", 0, exc.start) + 1
        raise SuiteError(path, line, "this line is not UTF-8. Save the file as UTF-8.") from exc


@dataclass(frozen=True)
class TomlText:
    """TOML text and its location: a whole file, or the TOML head of rubric.md."""

    path: Path
    text: str
    first_line: int = 1  # line of the file at which the text begins

    @classmethod
    def read(cls, path: Path) -> TomlText:
        return cls(path, read_text(path))

    def parse(self, schema: type[AnySchema]) -> AnySchema:
        """Parse the text and validate it against the schema. Raises SuiteError for the first error."""
        try:
            parsed = tomllib.loads(self.text)
        except tomllib.TOMLDecodeError as exc:
            reason = str(exc)
            line = len(self.text.split("\n"))  # the last one, for an error at the end of the document
            # In Python 3.11, the error has the line only in its message.
            if position := re.search(r" \(at (?:line (?P<line>\d+), column \d+|end of document)\)$", reason):
                reason = reason[: position.start()]
                line = int(position["line"] or line)
            raise SuiteError(self.path, self.first_line - 1 + line, f"not valid TOML: {reason}.") from None
        except RecursionError:
            raise SuiteError(self.path, None, "not valid TOML: nested too deeply.") from None
        try:
            return schema.model_validate(parsed)
        except ValidationError as exc:
            first, *others = exc.errors(include_url=False)
            more = f" ({len(others)} more in this file)" if others else ""
            raise self.error(first["loc"], _explain(first, schema) + more) from None

    def error(self, place: Place, reason: str) -> SuiteError:
        """Return a SuiteError with the line of the key or table at `place`."""
        return SuiteError(self.path, self.first_line - 1 + find_line(self.text, place), reason)


def _explain(error: ErrorDetails, schema: type[BaseModel]) -> str:
    *parents, last = error["loc"] or ("",)  # an error of the whole file has no location
    name = f"'{last}'"
    if isinstance(last, int):  # an index in a list
        name = f"'{parents[-1]}', entry {last + 1},"
    context = error.get("ctx", {})
    value = repr(error["input"]) if isinstance(error["input"], str) else str(error["input"])
    if len(value) > 60:
        value = f"{value[:57]}..."
    match error["type"]:
        case "missing":
            return f"{name} is missing."
        case "extra_forbidden":
            for field in parents:  # find the schema of the innermost table; an int is an index in a list
                if isinstance(field, str) and field in schema.model_fields:
                    schema = next(_schemas_in(schema.model_fields[field].annotation), schema)
            return f"unknown key {name}. Known here: {', '.join(schema.model_fields)}."
        case "too_short":
            return f"{name} must have at least {context['min_length']} entries; it has {context['actual_length']}."
        case "too_long":
            return f"{name} must have at most {context['max_length']} entries; it has {context['actual_length']}."
        case "greater_than_equal":
            return f"{name} must be at least {context['ge']}; found {value}."
        case "less_than_equal":
            return f"{name} must be at most {context['le']}; found {value}."
        case "value_error":
            return f"{name} {context['error']}; found {value}."
        case _:
            rule = re.sub(r"^(Input|String|Value) ", "", error["msg"]).replace("should", "must", 1)
            return f"{name} {rule}; found {value}."


def _schemas_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the schemas in a type annotation, such as `list[PersonaSchema] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _schemas_in(argument)


def find_line(text: str, place: Place) -> int:
    """Return the line number of a key or table. If it is missing, return that of the nearest enclosing table."""
    lines = _lines_of_keys(text)
    while place:
        if place in lines:
            return lines[place]
        # A table may have no line of its own, only keys such as `table.key = 1`.
        lines_inside = [line for key, line in lines.items() if key[: len(place)] == place]
        if lines_inside:
            return min(lines_inside)
        place = place[:-1]
    return 1


def _lines_of_keys(text: str) -> dict[Place, int]:
    """Return the first line of each key and table. Parses each statement alone, because `tomllib` reports no lines."""
    lines: dict[Place, int] = {}
    entries: Counter[Place] = Counter()  # number of entries so far, by array of tables
    table: Place = ()  # the table of the current statement
    statement: list[str] = []  # its lines so far
    for number, line in enumerate(text.split("\n"), start=1):
        statement.append(line)
        try:
            value: Any = tomllib.loads("\n".join(statement))
        except tomllib.TOMLDecodeError:  # the value continues on the next line
            if len(statement) > _MAX_VALUE_LINES:
                break
            continue
        first_line = number - len(statement) + 1
        is_header = statement[0].lstrip().startswith("[")
        statement = []
        # `a.b = 1` is parsed as {"a": {"b": 1}}, and `[a.b]` as {"a": {"b": {}}}.
        names: list[str] = []  # the parts of a dotted key
        while isinstance(value, dict) and value:
            name, value = next(iter(value.items()))
            names.append(name)
        if is_header and isinstance(value, list):  # [[array of tables]]
            array = (*_table_place(names[:-1], entries), names[-1])
            table = (*array, entries[array])
            entries[array] += 1
            lines[table] = first_line
        elif is_header:
            table = _table_place(names, entries)
            lines[table] = first_line
        elif names:  # not a blank line or a comment
            lines[(*table, *names)] = first_line
    return lines


def _table_place(names: list[str], entries: Counter[Place]) -> Place:
    """Return the place of a table, with the index of the latest entry after each array of tables."""
    place: Place = ()
    for name in names:
        place = (*place, name)
        if entries[place]:
            place = (*place, entries[place] - 1)
    return place
