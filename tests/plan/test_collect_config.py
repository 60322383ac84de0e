"""CollectConfig: valid and invalid values, and the messages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tipbench.errors import UsageError
from tipbench.plan.collect_config import CollectConfig, make_config, split_names


def test_defaults_are_those_of_the_contract() -> None:
    config = CollectConfig()
    assert config.model_names == ("qwen2.5:0.5b", "qwen2.5:1.5b", "gemma3:1b", "llama3.2:3b")
    assert config.prompt_versions == ("v1", "v2-mentor", "v3-few-shot")
    assert (config.n_tips, config.n_scenarios, config.temperature, config.max_model_b) == (5, 0, 0.7, 4.0)
    assert (config.repeats, config.seed, config.num_ctx, config.num_predict) == (1, 42, 4096, 1024)
    assert (config.concurrency, config.timeout_s, config.server_wait_s, config.unload) == (1, 300, 300, "model")
    assert not any((config.evict, config.skip_refused, config.allow_unknown_size, config.wait, config.diversity))
    assert config.experiment == "tip-bench-auto"
    assert config.suite == "tips"


def test_keys_are_those_of_the_contract_and_no_others() -> None:
    assert list(CollectConfig.model_fields) == [
        "models",
        "prompts",
        "n_tips",
        "n_scenarios",
        "temperature",
        "experiment",
        "max_model_b",
        "ollama_url",
        "mlflow_url",
        "diversity",
        "looks",
        "suite",
        "repeats",
        "seed",
        "num_ctx",
        "num_predict",
        "concurrency",
        "timeout_s",
        "server_wait_s",
        "unload",
        "evict",
        "skip_refused",
        "allow_unknown_size",
        "wait",
    ]


def test_every_field_is_described() -> None:
    assert all(info.description for info in CollectConfig.model_fields.values())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"experiment": "my-experiment"}, "starts with tip-bench-"),
        ({"experiment": "tip-bench-" + "x" * 300}, "at most 200"),
        ({"models": " , "}, "at least one"),
        ({"models": "a\x00b"}, "is not a name"),
        ({"n_tips": 0}, "n_tips"),
        ({"n_tips": "many"}, "'many'"),
        ({"temperature": float("nan")}, "temperature"),
        ({"num_ctx": 512, "num_predict": 512}, "smaller than num_ctx"),
        ({"unload": "never"}, "unload"),
        ({"ollama_url": "localhost:11434"}, "write http://host:port"),
        ({"mlflow_url": "file:///tmp"}, "not a web address"),
        ({"ollama_url": "http://x:99999"}, "not a web address"),
        ({"modles": "a"}, "modles is not a setting"),
    ],
)
def test_an_invalid_value_is_refused_with_its_key(values: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_config(values)


def test_the_message_names_where_the_value_came_from() -> None:
    with pytest.raises(UsageError, match=r"TIPBENCH_N_TIPS: .*got '99'"):
        make_config({"n_tips": "99"}, {"n_tips": "TIPBENCH_N_TIPS"})


def test_models_may_be_a_list() -> None:
    assert make_config({"models": ["a:1b", "b:1b"]}).models == "a:1b,b:1b"


def test_unloading_after_each_call_implies_one_worker() -> None:
    assert make_config({"unload": "call", "concurrency": 8}).workers == 1
    assert make_config({"concurrency": 8}).workers == 8


@given(st.lists(st.text("abc:/.-0123", min_size=1, max_size=5), max_size=8))
def test_duplicate_names_are_dropped_and_the_order_is_preserved(names: list[str]) -> None:
    assert list(split_names(" , ".join(names))) == list(dict.fromkeys(names))
