"""From a URL's query to the question it asks: one reading for the API and the pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from fastapi import Depends, Query

from tipbench.compare.matrix import ALL, Pair, parse_pair
from tipbench.errors import UsageError
from tipbench.judge.checking import name_fault, tidy_name
from tipbench.record.reading import read_filter
from tipbench.web.errors import Invalid
from tipbench.web.queries import BoardAsk

Where = tuple[tuple[str, str], ...]
_LONGEST = 500


def where_of(texts: Sequence[str], named: Mapping[str, str] | None = None) -> Where:
    """KEY=VALUE texts as a filter, each key once, in the order they were given."""
    filters = dict(named or {})
    for text in texts:
        try:
            key, value = read_filter(text[:_LONGEST])
        except UsageError as exc:
            raise Invalid(str(exc).removeprefix("--"), path="query.where") from exc
        if filters.setdefault(key, value) != value:
            raise Invalid(
                f"{key} is asked for twice, as {filters[key]} and {value}; no cell is both.", path="query.where"
            )
    return tuple(filters.items())


def board_ask(
    baseline: Annotated[
        str | None, Query(max_length=_LONGEST, description="MODEL/PROMPT: show differences to this pair too.")
    ] = None,
    where: Annotated[
        list[str], Query(max_length=20, description="KEY=VALUE: any tag, or params.NAME; repeatable.")
    ] = [],  # noqa: B006 - FastAPI copies it
    judge: Annotated[str | None, Query(max_length=200, description="Only this judge's scores.")] = None,
    by: Annotated[Literal["model", "prompt"] | None, Query(description="Rank models, or prompts.")] = None,
    cluster: Annotated[
        Literal["persona"] | None, Query(description="Claim more: about other personas. Takes more scenarios.")
    ] = None,
    provisional: Annotated[
        bool, Query(description="The provisional judge's scores, also where people have judged.")
    ] = False,
) -> BoardAsk:
    """The options of `tipbench compare` as a URL has them."""
    if judge is not None and provisional:
        raise Invalid(
            "judge names a judge whose scores count; provisional shows those that do not. Choose one.",
            path="query.judge",
        )
    return BoardAsk(
        where=where_of(where),
        judge=_judge(judge),
        provisional=provisional,
        baseline=_baseline(baseline, by),
        by=by,
        cluster=cluster,
    )


BoardQuery = Annotated[BoardAsk, Depends(board_ask)]


def _judge(name: str | None) -> str | None:
    if name is None:
        return None
    if fault := name_fault(name):
        raise Invalid(f"judge takes {fault} (got {name[:80]!r}).", path="query.judge")
    return tidy_name(name)


def _baseline(text: str | None, by: str | None) -> Pair | None:
    """A pair; among models or prompts their name alone will do."""
    if text is None:
        return None
    if by == "model":
        return Pair(text.strip().removesuffix(f"/{ALL}"), ALL)
    if by == "prompt":
        return Pair(ALL, text.strip().removeprefix(f"{ALL}/"))
    pair = parse_pair(text.strip())
    if pair is None:
        raise Invalid(
            f"baseline takes MODEL/PROMPT (got {text[:120]!r}); for example qwen2.5:0.5b/v1", path="query.baseline"
        )
    return pair
