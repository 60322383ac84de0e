"""Which runs are asked for: one reading of the query for the list, its table, its page and the way from run to run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field

from tipbench.record.reading import FILTERS
from tipbench.record.run import RunKind, RunState
from tipbench.web.asking import where_of
from tipbench.web.errors import checked
from tipbench.web.paging import LIMIT, MOST
from tipbench.web.queries import RunsAsk

MOST_WHERE = 20
_LONGEST_VALUE = 250
_LONGEST_MARK = 400
_NAMED = {**FILTERS, "persona": "params.persona", "judge_pending": "judge_pending"}
_Text = Annotated[str | None, Field(max_length=_LONGEST_VALUE)]


class RunFilters(BaseModel):
    """The query of a list of runs."""

    model_config = ConfigDict(frozen=True)

    model: _Text = None
    prompt: _Text = None
    scenario: _Text = None
    persona: _Text = None
    state: RunState | None = None
    kind: RunKind = RunKind.CELL
    judge_pending: bool | None = Field(None, description="Whether a judge's scores are waited for.")
    superseded: bool = Field(False, description="Also tries that a later one has replaced.")
    where: list[str] = Field(
        [],
        max_length=MOST_WHERE,
        description="KEY=VALUE: any tag, or params.NAME; repeatable.",
        examples=["suite=tips"],
    )
    limit: int = Field(LIMIT, ge=1, le=MOST, description=f"Items on a page, at most {MOST}.")
    next: str | None = Field(
        None, max_length=_LONGEST_MARK, description="The `next` of the page before; left out for the first page."
    )

    @property
    def ask(self) -> RunsAsk:
        """What is asked of the query. Invalid when it asks for two values of one key."""
        named = {name: _said(getattr(self, name)) for name in _NAMED}
        filters = {_NAMED[name]: value for name, value in named.items() if value is not None}
        return RunsAsk(where_of(self.where, filters), str(self.kind), self.limit, self.next, self.superseded)

    @property
    def narrowed(self) -> bool:
        """Whether anything is left out but by kind."""
        return any(getattr(self, name) is not None for name in _NAMED) or bool(self.where)

    def query(self, **changes: object) -> str:
        """These filters as a URL has them, with other values for some; what is as usual is left out."""
        values = {**{name: getattr(self, name) for name in type(self).model_fields}, **changes}
        usual = {name: field.get_default() for name, field in type(self).model_fields.items()}
        pairs = [
            (name, _said(each))
            for name, value in values.items()
            if value != usual[name]
            for each in (value if isinstance(value, list) else [value])
        ]
        return urlencode([(name, text) for name, text in pairs if text is not None], errors="backslashreplace")


RunsQuery = Annotated[RunFilters, Query()]


def filters_of(query: Mapping[str, Any]) -> RunFilters:
    """The filters of a page's address, in which an empty field of its form says nothing."""
    said = {name: value for name, value in query.items() if value not in ("", None) and name != "where"}
    where = [text for text in query.get("where", []) if text.strip()]
    return checked(RunFilters, {**said, "where": where}, "query")


def _said(value: object) -> str | None:
    if isinstance(value, bool):
        return str(value).lower()
    return None if value is None else str(value)
