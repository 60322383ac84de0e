"""Exports of the event log for other programs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.serving import learn, open_service, score_request
from tipbench.errors import NotEnoughData, UsageError
from tipbench.serve.event_export import export_events
from tipbench.serve.recommender import Recommender
from tipbench.serve.service import PolicyService

COUNT = 40


@pytest.fixture
def service(tmp_path: Path) -> Iterator[PolicyService]:
    with open_service(tmp_path) as service:
        learn(service, "egreedy/v3", COUNT)
        yield service


def export_lines(service: PolicyService, form: str, **options: Any) -> list[dict[str, Any]]:
    service.log.wait()
    return [json.loads(line) for line in export_events(service.log.database, form, **options)]


def test_json_lines_have_every_decision_signal_and_reward_by_tip(service: PolicyService) -> None:
    recommender = Recommender(service)
    recommender.switches.set_shadow("linucb-shadow", True)
    recommender.queue_for_shadows(recommender.recommend(score_request(event_id="r")))  # type: ignore[arg-type]
    recommender.wait()
    recommender.close()
    found = export_lines(service, "jsonl")
    assert len(found) == 2 * COUNT + 2
    served, shadow = found[-2:]
    assert (served["signal"], shadow["signal"]) == ("serve", "shadow:linucb-shadow")
    wanted = {"event_id", "policy", "user", "chosen", "probabilities", "scores", "agrees", "latency_ms", "at"}
    for line in (served, shadow):
        assert wanted <= set(line)
        assert set(line["probabilities"]) == {"t0", "t1", "t2"}
    assert len(export_lines(service, "jsonl", policy="linucb")) == 1
    assert "u1" not in {value for line in found for value in line.values() if isinstance(value, str)}


def test_vowpal_wabbit_reads_the_dsjson(service: PolicyService, tmp_path: Path) -> None:
    from vowpalwabbit import Workspace

    path = tmp_path / "events.dsjson"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in export_lines(service, "dsjson")))
    workspace = Workspace(f"--dsjson --cb_explore_adf --cb_type ips -d {path} --quiet")
    try:
        assert workspace.get_weighted_examples() == COUNT
        assert workspace.get_sum_loss() != 0.0
    finally:
        workspace.finish()


def test_dsjson_has_no_null_and_no_boolean(service: PolicyService) -> None:
    bare = [{"tip_id": "a", "task": {"is_overdue": True, "priority": None}}, {"tip_id": "b", "task": None}]
    answer = service.score("linucb", score_request(context={"open_tasks": None}, candidates=bare))
    service.reward("linucb", {"user_id": "u1", "event_id": answer.body["event_id"], "reward": 0.5})
    (line,) = export_lines(service, "dsjson", policy="linucb")
    assert line["c"]["shared"] == {"context": {"hour": 8.5}}
    assert line["c"]["_multi"] == [{"tip": {"tip_id": "a", "is_overdue": 1}}, {"tip": {"tip_id": "b"}}]


def test_dsjson_has_the_chosen_action_first_with_its_probability_and_cost(service: PolicyService) -> None:
    by_event = {line["event_id"]: line for line in export_lines(service, "jsonl") if "chosen" in line}
    rewards = {line["event_id"]: line["reward"] for line in export_lines(service, "jsonl") if "reward" in line}
    for line in export_lines(service, "dsjson"):
        logged = by_event[line["EventId"]]
        tips = [each["tip"]["tip_id"] for each in line["c"]["_multi"]]
        assert tips[line["_labelIndex"]] == tips[line["a"][0] - 1] == logged["chosen"]
        assert line["_label_probability"] == line["p"][0] == logged["probabilities"][logged["chosen"]]
        assert line["_label_cost"] == -rewards[line["EventId"]]
        assert sum(line["p"]) == pytest.approx(1)


def test_obp_feedback_has_the_shapes_of_its_dictionary(service: PolicyService) -> None:
    (feedback,) = export_lines(service, "obp")
    n, k = feedback["n_rounds"], feedback["n_actions"]
    assert (n, k) == (COUNT, 5)
    shapes = {name: np.shape(feedback[name]) for name in ("context", "action", "reward", "pscore", "pi_b")}
    assert shapes == {"context": (n, 4), "action": (n,), "reward": (n,), "pscore": (n,), "pi_b": (n, k, 1)}
    pi_b = np.array(feedback["pi_b"])
    np.testing.assert_allclose(pi_b.sum(axis=1), 1.0)
    np.testing.assert_array_equal(pi_b[np.arange(n), feedback["action"], 0], feedback["pscore"])


def test_an_unknown_format_and_an_empty_log_are_errors(tmp_path: Path) -> None:
    with open_service(tmp_path) as service:
        with pytest.raises(UsageError, match="jsonl, dsjson, obp, not 'csv'"):
            export_lines(service, "csv")
        with pytest.raises(UsageError, match="There is no policy 'egreedy/v9'"):
            export_lines(service, "jsonl", policy="egreedy/v9")
        with pytest.raises(NotEnoughData):
            export_lines(service, "obp")
        assert export_lines(service, "jsonl") == export_lines(service, "dsjson") == []
