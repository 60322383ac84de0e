"""Panels with content for a real browser, the paths of their pages, and browser tabs that record what a page does."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote, urlencode

import httpx

from support.hostile import MARK, hostile_names, hostile_texts, valid_name
from support.judging import fill, record_cells
from support.panel_site import Site, panel_site
from support.sample_experiment import SampleExperiment, SampleTexts, empty_experiment, record_sample
from support.scripted_runner import ScriptedRunner
from support.serving import learn, open_service
from tipbench.jobs.command import collect_request, judge_request
from tipbench.jobs.job import Job, JobState, JobStatus
from tipbench.jobs.store import JobFilter
from tipbench.judge.sheet_store import find_sheet
from tipbench.plan.collect_config import EXPERIMENT_PREFIX, make_config
from tipbench.record import events
from tipbench.record.store import MemoryStore
from tipbench.serve.policy import POLICIES
from tipbench.serve.switches import ShadowCounts
from tipbench.simulate.promotion_gate import Size
from tipbench.simulate.simulation import SimulationConfig, simulate
from tipbench.web.auth import Role
from tipbench.workflows.promotion import check_promotion, switches_of
from tipbench.workflows.simulation import record_simulation

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Dialog, Page, Response, Route

Visitor = Literal["admin", "judge", "nobody"]
EMPTY = "tip-bench-empty"
UNJUDGED = "tip-bench-unjudged"
_SECRET_COOKIE = "tipbench_session"
_TIMEOUT_MS = 120_000  # long, for a busy machine
# Elements and attributes that no text may create; the pages themselves have none of these.
INJECTED = (
    f"[{MARK}], script:not([src]), iframe, object, embed, base, marquee, foreignObject, [style], "
    "[onerror], [onload], [onclick], [onfocus], [onmouseover], [onbegin], [href^='javascript:' i], [href^='data:' i], "
    "[src^='data:text' i], form[action^='//'], link[href^='//'], meta[http-equiv='refresh']"
)


@dataclass(frozen=True)
class SamplePanel:
    """A panel with its content and the paths of its pages by name."""

    site: Site
    content: SampleExperiment
    texts: SampleTexts
    pages: Mapping[str, str]

    def jobs(self) -> Sequence[Job]:
        return self.site.panel.jobs.store.page(JobFilter(), limit=100).items


@dataclass
class BrowserTab:
    """A tab that records requests to other hosts, console errors and missing resources."""

    page: Page
    origin: str
    external_requests: list[str] = field(default_factory=list)
    console_errors: list[str] = field(default_factory=list)
    missing_resources: list[str] = field(default_factory=list)
    requested_url: str = ""

    def listen(self) -> None:
        """Record console messages and missing resources; the page itself may be missing on purpose."""

        def on_dialog(dialog: Dialog) -> None:
            self.console_errors.append(f"dialog: {dialog.message}")
            dialog.dismiss()

        def on_console(line: ConsoleMessage) -> None:
            if line.type == "error":
                self.console_errors.append(line.text)

        def on_response(response: Response) -> None:
            if response.status >= 400 and response.url != self.requested_url:
                self.missing_resources.append(f"{response.status} {response.url}")

        self.page.on("dialog", on_dialog)
        self.page.on("pageerror", lambda error: self.console_errors.append(f"error: {error}"))
        self.page.on("console", on_console)
        self.page.on("response", on_response)

    def go(self, path: str) -> int:
        """Open a page, expand everything on it and return its status."""
        self.requested_url = self.origin + path
        response = self.page.goto(self.requested_url, wait_until="load")
        assert response is not None
        self.expand_all()
        return response.status

    def clear_records(self) -> None:
        """Clear what was recorded so far."""
        for records in (self.external_requests, self.console_errors, self.missing_resources):
            records.clear()

    def expand_all(self) -> None:
        """Expand all collapsed parts."""
        self.page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")

    def text(self) -> str:
        """Return all text of the page, including the values of fields."""
        script = """[document.documentElement.textContent,
            ...[...document.querySelectorAll('input, textarea, option')].map(each => each.value)].join('\\n')"""
        return str(self.page.evaluate(script))

    def injected_elements(self) -> list[str]:
        """Return the elements that a text has created; there must be none."""
        script = f"""[...document.querySelectorAll({INJECTED!r})].map(each => each.outerHTML.slice(0, 200))"""
        return [str(each) for each in self.page.evaluate(script)]

    def sideways_overflow(self) -> str | None:
        """Return the elements that make a page scroll sideways, or None."""
        script = """() => { const wide = document.documentElement.clientWidth;
            if (document.documentElement.scrollWidth <= wide) return null;
            const out = [...document.body.querySelectorAll('*')]
                .filter(each => each.getBoundingClientRect().right > wide + 1);
            return document.documentElement.scrollWidth + ' > ' + wide + ': '
                + out.slice(0, 3).map(e => e.outerHTML.slice(0, 160)).join(' | '); }"""
        found = self.page.evaluate(script)
        return None if found is None else str(found)


class TabOpener:
    """Opens browser tabs as a user; requests to other hosts are aborted and recorded."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._contexts: list[BrowserContext] = []

    def __call__(self, site: Site, role: Visitor = "admin", *, width: int = 1280, **more: Any) -> BrowserTab:
        """Return a tab of a new browser context, logged in."""
        tab = self.without_session(site.url, width=width, **more)
        if role != "nobody":
            cookie = {"name": _SECRET_COOKIE, "value": _session(site, role), "url": site.url}
            tab.page.context.add_cookies([cookie])  # type: ignore[list-item]
        return tab

    def without_session(self, url: str, *, width: int = 1280, **more: Any) -> BrowserTab:
        """Return a tab of a new browser context without a session."""
        context = self._browser.new_context(viewport={"width": width, "height": 900}, reduced_motion="reduce", **more)
        context.set_default_timeout(_TIMEOUT_MS)
        self._contexts.append(context)
        tab = BrowserTab(context.new_page(), url)
        context.route("**/*", lambda route: _block_external(tab, route))
        tab.listen()
        return tab

    def close(self) -> None:
        for context in self._contexts:
            context.close()


def _block_external(tab: BrowserTab, route: Route) -> None:
    if route.request.url.startswith((f"{tab.origin}/", "data:image/")):
        route.continue_()
    else:
        tab.external_requests.append(route.request.url)
        route.abort()


def _session(site: Site, role: Visitor) -> str:
    """Log in and return the value of the session cookie."""
    secret = site.admin if role == "admin" else site.judge
    with httpx.Client(base_url=site.url, trust_env=False) as client:
        response = client.post("/login", json={"token": secret})
        assert response.status_code == 200, response.text
        return str(client.cookies[_SECRET_COOKIE])


@contextmanager
def serve_sample_panel(folder: Path) -> Iterator[SamplePanel]:
    """Serve a panel with ordinary content."""
    texts = SampleTexts()
    store = MemoryStore()
    content = record_sample(store, texts=texts)
    empty_experiment(store, EMPTY)
    record_unjudged(store)
    with panel_site(folder / "home", store, runner=_scripted_runner(texts)) as site:
        _submit_jobs(site, content, texts)
        policies = record_policies(folder / "home", store, "trial on staging")
        yield SamplePanel(site, content, texts, {**page_paths(site, content), **policies})


@contextmanager
def serve_hostile_panel(folder: Path) -> Iterator[SamplePanel]:
    """Serve a panel in which every name and text is hostile."""
    texts = hostile_texts(folder / "suite")
    store = MemoryStore()
    names = [EXPERIMENT_PREFIX + name for name in hostile_names(180)]
    for name in names:
        store.ensure_experiment(name)
    content = record_sample(store, names[4] + "/a b?c=d&e#f", texts)
    empty_experiment(store, EMPTY)
    record_unjudged(store)
    with panel_site(folder / "home", store, runner=_scripted_runner(texts)) as site:
        for name in hostile_names(60):
            site.panel.authenticator.tokens.create(Role.JUDGE, name, life_s=None)
        _submit_jobs(site, content, texts)
        policies = record_policies(folder / "home", store, names[0])
        yield SamplePanel(site, content, texts, {**page_paths(site, content), **policies})


def record_policies(home: Path, store: MemoryStore, text: str) -> dict[str, str]:
    """Record decisions of a policy server, promotions and a simulation; return their pages by name."""
    with open_service(home) as service:
        for policy in POLICIES:
            learn(service, policy, 6, prefix=policy.replace("/", "-"))
    with switches_of(home) as switches:
        switches.set_shadow("egreedy-v2-shadow", True)
        switches.add_shadow_counts("egreedy-v2-shadow", ShadowCounts(calls=1200, dropped=3, errors=1))
        switches.switch_unchecked("egreedy/v3", user=text, reason=text)
    check_promotion(home, "egreedy/v2", size=Size(1, 20, 8), user=text)
    config = SimulationConfig(users=20, rounds=8, seeds=1, ablation="egreedy/v3")
    run_id = record_simulation(store, simulate(config, workers=1).to_json())
    return {"policies": "/policies?user_id=u1", "simulation": f"/simulations/{run_id}"}


def record_unjudged(store: MemoryStore) -> None:
    """Record an experiment with unjudged answers."""
    store.mark_changed(record_cells(store, experiment=UNJUDGED, n_scenarios=2).experiment_id)


def page_paths(site: Site, content: SampleExperiment) -> dict[str, str]:
    """Return the paths of all admin pages by name."""
    here = f"/experiments/{quote(content.name, safe='')}"
    first, last = content.pairs[0], content.pairs[-1]
    baseline = urlencode({"baseline": f"{last.model}/{last.prompt}"})
    pair = urlencode({"model": first.model, "prompt": first.prompt})
    jobs = {
        f"job {number}": f"/jobs/{job.id}" for number, job in enumerate(site.panel.jobs.store.page(JobFilter()).items)
    }
    runs = {f"run {sort}": f"{here}/runs/{run_id}" for sort, run_id in content.runs.items()}
    return {
        "experiments": "/",
        "run form": "/run",
        "jobs": "/jobs",
        "simulations": "/simulations",
        "promotions": "/promotions",
        **jobs,
        "leaderboard": here,
        "leaderboard with a baseline": f"{here}?{baseline}",
        "leaderboard by model": f"{here}?by=model&provisional=true",
        "empty leaderboard": f"/experiments/{EMPTY}",
        "leaderboard without scores": f"/experiments/{UNJUDGED}",
        "pair": f"{here}/pairs?{pair}",
        "scenario matrix": f"{here}/scenarios",
        "pair against a baseline": f"{here}/pairs?{pair}&{baseline}",
        "runs": f"{here}/runs",
        "runs that failed": f"{here}/runs?state=failed",
        "runs of judging": f"{here}/runs?kind=judging",
        "refused models": f"{here}/runs?kind=refused",
        "no runs": f"/experiments/{EMPTY}/runs",
        **runs,
        "judges": f"{here}/judges",
        "no judges": f"/experiments/{EMPTY}/judges",
        "settings": "/settings",
        "judging": "/judge",
        "judging of an experiment": f"/judge?{urlencode({'experiment': content.name})}",
        "missing page": "/no/such/page",
        "missing experiment": "/experiments/tip-bench-never",
    }


def _scripted_runner(texts: SampleTexts) -> ScriptedRunner:
    return ScriptedRunner(
        ends=lambda job: _job_status(texts, job),
        emitted=lambda job: _events(texts, ended=job.key not in ("running", "lost")),
        printed="\n".join(texts.tips),
    )


def _job_status(texts: SampleTexts, job: Job) -> JobStatus:
    statuses = {
        "running": JobStatus(JobState.RUNNING),
        "lost": JobStatus(JobState.LOST, reason=texts.failures[0]),
        "failed": JobStatus(JobState.FAILED, 1, texts.failures[-1]),
    }
    return statuses.get(job.key or "", JobStatus(JobState.SUCCEEDED, 0))


def _events(texts: SampleTexts, *, ended: bool) -> list[events.Event]:
    """Return the events of a collect with one finished and one half-finished model."""
    first, second, *_ = texts.models
    prompt = next(iter(texts.suite.prompts))
    emitted: list[events.Event] = [events.Started("1"), events.BlockStarted(first, 2)]
    emitted += [events.CellFinished(first, prompt, "x@y", at + 1, 2, 0, None, 80, 20.0) for at in range(2)]
    emitted += [events.BlockFinished(first), events.BlockStarted(second, 8, 1)]
    emitted += [events.CellFinished(second, prompt, texts.tips[0], 2, 8, 1, texts.failures[0])]
    emitted += [events.Message(text, warning=bool(at % 2)) for at, text in enumerate(texts.failures)]
    if ended:
        memory = events.Evidence(412, 1, 0.9, 2, 0, texts.foreign)
        refused = tuple(name for name, _ in texts.refused)
        done = events.Collected("x", 96, 0, 96, 1, refused, 12.0, "javascript:alert(1)")
        emitted += [memory, done, events.Exit(0)]
    else:
        emitted += [events.Waiting(texts.failures[0], 60.0)]
    return emitted


def _submit_jobs(site: Site, content: SampleExperiment, texts: SampleTexts) -> None:
    """Submit jobs that end in each state, and one that stays in the queue."""
    config = make_config({"models": "a:1b", "experiment": EXPERIMENT_PREFIX + "x"})
    models = ",".join(valid_name(name, 190).replace(" ", "-").replace(",", ";") for name in texts.models)
    config = config.model_copy(update={"models": models, "experiment": content.name})
    for key in ("succeeded", "failed", "lost", "running", "queued"):
        request = replace(collect_request(config, started_by=texts.judges[0]), resources=(key[:1],))
        if key == "queued":
            request = replace(request, resources=("r",))  # the resource of the running job
        site.panel.jobs.submit(request, idempotency_key=key)
    judging = judge_request({"with": "rules", "experiment": content.name}, ollama_url="http://x", started_by="boss")
    site.panel.jobs.submit(judging, idempotency_key="judge")


def submit_forms(tab: BrowserTab, panel: SamplePanel, folder: Path) -> Iterator[str]:
    """Yield the name of each page that follows a submitted form."""
    page, texts, here = tab.page, panel.texts, panel.pages["judges"]
    hostile = "; ".join(texts.tips)[:3000]
    for name in ("models", "experiment"):
        _open_form(tab, "/run")
        page.locator(f"input[type=text][name={name}]").fill(hostile)
        page.get_by_role("button", name="Show plan").click()
        page.locator("#outcome").wait_for()
        yield f"run form with wrong {name}"
    _open_form(tab, f"/run?{urlencode({'experiment': panel.content.name})}")
    page.locator("input[type=text][name=models]").fill("baseline:template")
    page.get_by_role("button", name="Show plan").click()
    page.locator("#plan-result, #outcome").first.wait_for()
    yield "plan"
    wrong = folder / f"{valid_name(texts.tips[0], 60).replace('/', '∕')}.json"
    wrong.write_text(
        json.dumps({"format": hostile, "experiment": panel.content.name, "sheet": hostile, "items": [hostile]})
    )
    _upload(tab, here, wrong)
    yield "refused import"
    filled = folder / "filled.json"
    filled.write_text(json.dumps(_filled_sheet(panel)))
    _upload(tab, here, filled)
    page.locator("#preview").wait_for()
    yield "preview of an import"
    _open_form(tab, here)
    page.locator("#export input[name=judge]").fill(texts.judges[1])
    with page.expect_navigation():
        page.get_by_role("button", name="Create sheet").click()
    yield "export"
    _open_form(tab, "/settings")
    page.locator("input[name=name]").fill(texts.judges[0])
    page.locator("form", has=page.locator("input[name=name]")).locator("button[type=submit]").click()
    page.locator("#new-token").wait_for()
    yield "new token"


def _open_form(tab: BrowserTab, path: str) -> None:
    """Open a form without the browser's validation, so that the panel validates it."""
    tab.go(path)
    tab.page.evaluate("document.querySelectorAll('form').forEach(each => each.noValidate = true)")
    tab.page.evaluate("document.querySelectorAll('[maxlength]').forEach(each => each.removeAttribute('maxlength'))")


def _upload(tab: BrowserTab, path: str, file: Path) -> None:
    _open_form(tab, path)
    tab.page.locator("input[type=file]").set_input_files(file)
    with tab.page.expect_navigation():
        tab.page.get_by_role("button", name="Preview").click()


def _filled_sheet(panel: SamplePanel) -> Any:
    driver = panel.content.driver
    judging = find_sheet(driver.store, driver.experiment, panel.content.open_sheet)
    assert judging is not None
    raw = fill(judging)
    notes = cycle(text[:2000] for text in panel.texts.tips)
    for item in raw["items"]:
        for tip in item["tips"]:
            tip["note"] = next(notes)
    return raw


def is_shown(text: str, page: str) -> bool:
    """Return whether a page shows the text; unprintable characters may be shown in any way."""
    parts = "".join(each if each.isprintable() else "\0" for each in text).split("\0")
    start = 0
    for part in filter(None, (part.strip() for part in parts)):
        start = page.find(part, start) + len(part)
        if start < len(part):
            return False
    return True
