"""Charts of a simulation, from the JSON of its result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tipbench.charts import LIGHT, Theme, import_altair

_WIDTH, _HEIGHT = 640, 260  # pixels
_DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3], [12, 4])  # lengths of dashes and gaps in pixels


def curves_chart(result: Mapping[str, Any], theme: Theme = LIGHT, *, width: int = _WIDTH) -> Any:
    """Return a chart with one line per policy: the mean reward up to each round."""
    alt = import_altair()
    names = [policy["name"] for policy in result["policies"]]
    rows = [
        {"policy": policy["name"], "round": round_number, "reward": reward}
        for policy in result["policies"]
        for round_number, reward in zip(policy["curve"]["round"], policy["curve"]["reward"], strict=True)
    ]
    colours = [theme.palette[index % len(theme.palette)] for index in range(len(names))]
    dashes = [_DASHES[index % len(_DASHES)] for index in range(len(names))]
    legend = alt.Legend(orient="bottom", columns=2, title=None, symbolStrokeWidth=2, columnPadding=24)
    config = result["config"]
    seeds = f"{result['seeds_done']} of {config['seeds']} seeds"
    title = f"World {config['world']}: {config['users']} users × {config['rounds']} rounds, {seeds}"
    return (
        alt.Chart(alt.Data(values=rows), title=title, width=width, height=_HEIGHT)
        .mark_line(strokeWidth=2)
        .encode(
            x=alt.X("round:Q", title="round", axis=alt.Axis(tickMinStep=1, format="d")),
            y=alt.Y("reward:Q", title="mean reward so far", scale=alt.Scale(zero=False)),
            color=alt.Color("policy:N", scale=alt.Scale(domain=names, range=colours), legend=legend),
            strokeDash=alt.StrokeDash("policy:N", scale=alt.Scale(domain=names, range=dashes), legend=legend),
        )
    )
