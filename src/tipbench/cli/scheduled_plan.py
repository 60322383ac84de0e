"""The first task of a scheduled run: what may run, where it runs, and what is refused. Nothing is generated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tipbench.addresses import identity_of, is_loopback
from tipbench.cli.console import say
from tipbench.cli.scheduled import Conf, print_event, read_conf, tell
from tipbench.errors import ModelRefused, OllamaAway, UsageError
from tipbench.jobs.events import Collected
from tipbench.plan.config import CollectConfig
from tipbench.settings import Settings, load_settings

if TYPE_CHECKING:
    from tipbench.generate.engine import ModelFacts
    from tipbench.plan.suite import Suite
    from tipbench.record.planning import Plan

Hosts = Mapping[str, str | None]  # by the task that collects there; None for the server of the configuration
_Answer = tuple[str, "dict[str, ModelFacts]", dict[str, str]]  # of a task's server: what may run there, why others not


@dataclass(frozen=True)
class Found:
    """What the servers say: facts of what may run, the tasks that could run it, and for the others why not."""

    facts: Mapping[str, ModelFacts]
    places: Mapping[str, tuple[str, ...]]
    refused: Mapping[str, str]


def plan_models(conf: Conf, hosts: Hosts) -> dict[str, Any]:
    """Which task collects which models; a refused or missing one is kept in MLflow as a run with its reason."""
    from tipbench.plan.grid import suite_for

    settings = load_settings()
    config = read_conf(conf, settings)
    servers = choose_hosts(config, hosts, named=bool(conf.get("ollama_url")))
    suite = suite_for(config)
    found = _ask_all(config, servers, settings)
    if found.refused and not config.skip_refused:
        raise ModelRefused(" ".join(found.refused.values()) + " Set skip_refused to run the others.")
    made = _recorded_plan(config, suite, found, settings)
    if not found.facts:
        raise ModelRefused(" ".join(found.refused.values()))
    _tell_refused(config, found)
    sizes = {model: facts.params_b or 0.0 for model, facts in found.facts.items() if model not in made.aliases}
    given = spread(sizes, found.places)
    shares = {task: given.get(task, []) for task in hosts}
    for task, models in shares.items():
        say(f"{task}: {', '.join(models) or 'nothing'}")
    return {
        "experiment": config.experiment,
        **shares,
        "refused": [{"model": model, "reason": reason} for model, reason in found.refused.items()],
        "cells": len(made.cells),
        "to_generate": len(made.missing),
    }


def _tell_refused(config: CollectConfig, found: Found) -> None:
    """In words, and for the panel, whose account of a run has every refusal, as a collect's own."""
    reasons = tuple(found.refused.values())
    for reason in reasons:
        say(f"refused: {reason}")
    if reasons:
        print_event(Collected(config.experiment, cells=0, recorded_before=0, generated=0, failed=0, refused=reasons))


def choose_hosts(config: CollectConfig, hosts: Hosts, *, named: bool) -> dict[str, str]:
    """The servers a run may use, by task. With a list of hosts, an address of the conf must be one of them.

    A loopback address that is not listed names whoever triggered the run, not a worker: it counts as none.
    """
    if None in hosts.values():
        return dict.fromkeys(hosts, config.ollama_url)
    listed = {task: str(url) for task, url in hosts.items()}
    if not named:
        return listed
    wanted = {task: url for task, url in listed.items() if identity_of(url) == identity_of(config.ollama_url)}
    if not wanted and not is_loopback(config.ollama_url):
        raise UsageError(
            f"conf ollama_url takes one of the listed hosts: {', '.join(listed.values())} (got {config.ollama_url}). "
            "Leave it out to spread the models over all of them, or add the host to ollama_hosts."
        )
    return wanted or listed


def spread(sizes: Mapping[str, float], places: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Each model to one of its places, so that sums of sizes are about even; the same models go the same way again.

    By size and not by what is left to generate, so that a run that is continued finds a model where it was.
    """
    load: dict[str, float] = {}
    share: dict[str, str] = {}
    for model in sorted(sizes, key=lambda name: (-sizes[name], name)):
        task = min(places[model], key=lambda place: (load.get(place, 0.0), places[model].index(place)))
        load[task] = load.get(task, 0.0) + sizes[model]
        share[model] = task
    return {task: [model for model in sizes if share[model] == task] for task in dict.fromkeys(share.values())}


def _ask_all(config: CollectConfig, servers: Mapping[str, str], settings: Settings) -> Found:
    """Ask each server for its models; engines of our own (embedded, baseline) belong to the first one's box."""
    from tipbench.generate.engine import engine_of

    own = [model for model in config.model_names if engine_of(model) != "ollama"]
    theirs = [model for model in config.model_names if engine_of(model) == "ollama"]
    answers: list[_Answer] = [(next(iter(servers)), *_ask(config, own, settings))] if own else []
    answers += _ask_servers(config, servers, theirs, settings) if theirs else []
    return _merged(config.model_names, answers)


def _ask_servers(
    config: CollectConfig, servers: Mapping[str, str], models: Sequence[str], settings: Settings
) -> list[_Answer]:
    """A server that is away is waited for while the others lack a model; then what only it may have is refused.

    OllamaAway when no other answers, or nothing may be refused.
    """
    from tipbench.record.collect import patiently

    def ask() -> list[_Answer]:
        answers, away = _ask_each(config, servers, models, settings)
        if away and {model for _task, facts, _refused in answers for model in facts} != set(models):
            raise away[0]
        for gone in away:
            say(f"warning: {gone} Its models run elsewhere.")
        return answers

    try:
        return patiently(ask, "Ollama", config.server_wait_s, tell)
    except OllamaAway:
        answers, away = _ask_each(config, servers, models, settings)
        if not config.skip_refused or len(away) == len(servers):
            raise
        return answers


def _ask_each(
    config: CollectConfig, servers: Mapping[str, str], models: Sequence[str], settings: Settings
) -> tuple[list[_Answer], list[OllamaAway]]:
    """What each server says, and which are away: those have no model, with that as the reason."""
    answers: list[_Answer] = []
    away: list[OllamaAway] = []
    for task, url in servers.items():
        try:
            answers.append((task, *_ask(config.model_copy(update={"ollama_url": url}), models, settings)))
        except OllamaAway as exc:
            answers.append((task, {}, dict.fromkeys(models, str(exc))))
            away.append(exc)
    return answers, away


def _ask(
    config: CollectConfig, models: Iterable[str], settings: Settings
) -> tuple[dict[str, ModelFacts], dict[str, str]]:
    from tipbench.generate.engines import EngineNeeds, ask_facts, build_engines, close_engines

    asked = config.model_copy(update={"models": ",".join(models)})
    engines = build_engines(asked.model_names, EngineNeeds(asked, settings.home, say))
    try:
        return ask_facts(engines, asked)
    finally:
        close_engines(engines, say)


def _merged(models: Iterable[str], answers: Sequence[_Answer]) -> Found:
    facts: dict[str, ModelFacts] = {}
    places: dict[str, tuple[str, ...]] = {}
    refused: dict[str, str] = {}
    for model in models:
        having = [(task, found[model]) for task, found, _ in answers if model in found]
        if having:
            facts[model] = having[0][1]
            places[model] = tuple(task for task, fact in having if fact.digest == facts[model].digest)
        else:
            refused[model] = " ".join(dict.fromkeys(no[model] for _, _, no in answers if model in no))
    return Found(facts, places, refused)


def _recorded_plan(config: CollectConfig, suite: Suite, found: Found, settings: Settings) -> Plan:
    """The plan against what is recorded; refusals are written down on the way."""
    import time

    from tipbench.cli.session import free_memory_for, open_keeper
    from tipbench.record.collect import patiently
    from tipbench.record.outcome import Setting
    from tipbench.record.planning import make_plan, read_recorded
    from tipbench.record.summary import refused_run

    keeper = open_keeper(settings, config.mlflow_url)
    try:
        say(f"MLflow: {keeper.how}")
        store = keeper.store
        wait_s = config.server_wait_s
        experiment = patiently(lambda: store.ensure_experiment(config.experiment), "MLflow", wait_s, tell)
        for model, reason in found.refused.items():
            run = refused_run(model, reason, int(time.time() * 1000))
            store.record(experiment.experiment_id, run, maybe_there=True)
        if found.refused:
            store.touch(experiment.experiment_id)
        recorded = read_recorded(store, experiment.experiment_id, Setting(config, suite, "").conditions)
    finally:
        keeper.close()
    return make_plan(suite, config, found.facts, found.refused, recorded, lambda m: free_memory_for(m, config))
