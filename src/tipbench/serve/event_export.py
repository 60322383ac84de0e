"""Export of the event log: JSON lines, VowpalWabbit's dsjson, and the arrays of the Open Bandit Pipeline.

| format | lines |
|---|---|
| jsonl | one per decision, signal (a shadow's choice) and reward |
| dsjson | one per decision with a reward, for `vw --dsjson --cb_explore_adf` |
| obp | a single one, a JSON object with the arrays of obp's bandit feedback; the arms are the tips |

Every line of jsonl has the key `signal`: "shadow:NAME" for a shadow's choice, "serve" for a decision of `/recommend`,
and null for a decision of a route that names its policy and for a reward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic_core import to_json

from tipbench.errors import NotEnoughData, UsageError
from tipbench.serve.event_log import Entry, read_entries, read_entry
from tipbench.serve.features import time_features
from tipbench.serve.policy import check_policy
from tipbench.serve.request import parse_time
from tipbench.sqlite import Database
from tipbench.text import iso

FORMATS = ("jsonl", "dsjson", "obp")


def export_events(database: Database, export_format: str, *, policy: str | None = None) -> Iterator[str]:
    """Yield the lines of an export; without `policy`, of all policies."""
    if export_format not in FORMATS:
        raise UsageError(f"Events are exported as {', '.join(FORMATS)}, not {export_format!r}.")
    if policy is not None:
        check_policy(policy)
    if export_format == "jsonl":
        # "score" is a decision, "late" a late reward
        for entry in read_entries(database, kinds=("score", "signal", "reward", "late")):
            if policy is None or entry.policy == policy:
                yield to_json(_json_line(entry)).decode()
    elif export_format == "dsjson":
        for decision, reward in _rewarded_decisions(database, policy):
            yield to_json(_dsjson_line(decision, reward)).decode()
    else:
        yield to_json(_obp_feedback(database, policy)).decode()


def _rewarded_decisions(database: Database, policy: str | None) -> Iterator[tuple[Entry, Entry]]:
    """Yield (decision, reward) of each rewarded decision, in the order of the rewards. Ignores late rewards."""
    for reward in read_entries(database, kinds=("reward",)):
        if policy is None or reward.policy == policy:
            decision = read_entry(database, reward.body["score"])  # the decision's entry number
            if decision is not None:
                yield decision, reward


def _json_line(entry: Entry) -> dict[str, Any]:
    body = entry.body
    ids = {"event_id": entry.event, "policy": entry.policy, "user": entry.user}
    head = {"signal": body.get("signal"), **ids, "received": iso(entry.received)}
    if entry.kind == "signal":
        return {**head, **body}
    if entry.kind == "score":
        tips = [candidate["tip_id"] for candidate in body["request"]["candidates"]]
        by_tip = {name: dict(zip(tips, body[name], strict=True)) for name in ("probabilities", "scores")}
        # A decision agrees with itself; the `agrees` of a signal is whether the shadow chose the same tip.
        return {**head, **body, **by_tip, "agrees": True}
    return {**head, "reward": entry.reward, "late": entry.kind == "late", **body}


def _dsjson_line(decision: Entry, reward: Entry) -> dict[str, Any]:
    """Return a line of VowpalWabbit's dsjson format; the cost is −reward.

    The chosen action comes first in `a` and `p`; `_multi` has the candidates in the order of the request.
    """
    body = decision.body
    candidates = body["request"]["candidates"]
    chosen = [candidate["tip_id"] for candidate in candidates].index(body["chosen"])
    order = [chosen, *(i for i in range(len(candidates)) if i != chosen)]
    hour = reward.body["hour"]  # the decision's hour, stored with the reward
    context = {**(body["request"].get("context") or {}), "hour": hour}
    # The values of a task are moved to its tip, because VowpalWabbit's namespaces are flat.
    tips = [{**candidate, **(candidate.get("task") or {}), "task": None} for candidate in candidates]
    return {
        "_label_cost": -(reward.reward or 0.0),  # `or` is only for mypy: a reward entry has a reward
        "_label_probability": body["probabilities"][chosen],
        "_label_Action": chosen + 1,
        "_labelIndex": chosen,
        "Version": "1",
        "EventId": decision.event,
        "Timestamp": iso(decision.received),
        "a": [i + 1 for i in order],
        "p": [body["probabilities"][i] for i in order],
        "c": {"shared": {"context": _vw_features(context)}, "_multi": [{"tip": _vw_features(tip)} for tip in tips]},
    }


def _vw_features(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values without null, and booleans as 0 or 1: VowpalWabbit supports neither."""
    return {
        name: int(value) if isinstance(value, bool) else value for name, value in values.items() if value is not None
    }


def _obp_feedback(database: Database, policy: str | None) -> dict[str, Any]:
    """Return bandit feedback for the Open Bandit Pipeline; a tip that was not a candidate has probability 0."""
    rounds = list(_rewarded_decisions(database, policy))
    if not rounds:
        raise NotEnoughData("No rewarded decision is logged, so there is no feedback to export.")
    tips = sorted(
        {candidate["tip_id"] for decision, _ in rounds for candidate in decision.body["request"]["candidates"]}
    )
    arm_of = {tip: number for number, tip in enumerate(tips)}
    actions, distributions, contexts = [], [], []
    for decision, _ in rounds:
        distribution = [[0.0] for _ in tips]  # obp has a third axis: the position of the tip in a list
        candidates = decision.body["request"]["candidates"]
        for candidate, probability in zip(candidates, decision.body["probabilities"], strict=True):
            distribution[arm_of[candidate["tip_id"]]] = [probability]
        distributions.append(distribution)
        actions.append(arm_of[decision.body["chosen"]])
        contexts.append(time_features(parse_time(decision.body["at"])))  # hour_sin, hour_cos, dow_sin, dow_cos
    return {
        "n_rounds": len(rounds),
        "n_actions": len(tips),
        "arms": tips,
        "context": contexts,
        "action": actions,
        "position": None,
        "reward": [reward.reward for _, reward in rounds],
        "pscore": [distribution[action][0] for distribution, action in zip(distributions, actions, strict=True)],
        "pi_b": distributions,
    }
