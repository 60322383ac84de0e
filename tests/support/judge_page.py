"""A panel for judging, and its batch page in a real browser with the key presses counted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from support.judging import EXPERIMENT, Rule, SheetDriver, agreed, fill, record_cells
from support.panel_pages import BrowserTab, TabOpener
from support.panel_site import JUDGE, Site, panel_site
from tipbench.judge.sheet_store import StoredSheet, find_sheet
from tipbench.record.store import MemoryStore
from tipbench.web.auth import Identity, Role
from tipbench.web.batch_items import ItemRequest
from tipbench.web.batch_store import Kind
from tipbench.web.batches import batch_service_of

if TYPE_CHECKING:
    from playwright.sync_api import Page

_TIP_FIELDS = ("scores", "overlong", "note")


@dataclass(frozen=True)
class JudgingSite:
    """A panel with pending answers."""

    site: Site
    driver: SheetDriver
    judge: str = JUDGE

    @property
    def identity(self) -> Identity:
        return Identity(self.judge, Role.JUDGE, "in-the-test")

    def with_new_judge(self) -> JudgingSite:
        """Return the same panel for a new judge without a batch."""
        name = f"judge-{uuid4().hex[:8]}"
        _, secret = self.site.panel.authenticator.tokens.create(Role.JUDGE, name, life_s=None)
        return replace(self, site=replace(self.site, judge=secret), judge=name)

    def open(self, kind: Kind = Kind.SHEET, limit: int | None = None) -> str:
        """Open a batch for the judge and return its sheet."""
        return batch_service_of(self.site.app).open(self.identity, EXPERIMENT, kind=kind, limit=limit).batch.sheet

    def stored_sheet(self, sheet: str) -> StoredSheet:
        experiment = self.driver.experiment
        found = find_sheet(self.driver.store, experiment, sheet)
        assert found is not None
        return found

    def batch(self, sheet: str) -> dict[str, Any]:
        """Return the batch on the server."""
        return batch_service_of(self.site.app).detail(self.identity, sheet).model_dump(exclude_unset=True)

    def answer(self, sheet: str, number: int) -> dict[str, Any]:
        """Return the saved answer of an item, by its position from 1."""
        found: dict[str, Any] = self.batch(sheet)["items"][number - 1]["answer"]
        return found

    def submit(self, sheet: str, rule: Rule = agreed, *, omit_last: int = 0) -> None:
        """Submit all items but the last `omit_last` by a rule, without the page."""
        filled, saved = fill(self.stored_sheet(sheet), rule)["items"], self.batch(sheet)["items"]
        for item, current in list(zip(filled, saved, strict=True))[: len(saved) - omit_last]:
            tips = [{name: tip[name] for name in _TIP_FIELDS} for tip in item["tips"]]
            body = {"version": current["answer"]["version"], "state": "submitted", "tips": tips}
            batch_service_of(self.site.app).save(self.identity, sheet, item["item"], ItemRequest.model_validate(body))


@contextmanager
def judging_site(home: Path, **cells: Any) -> Iterator[JudgingSite]:
    """A panel on a store in memory, by default with 48 answered cells."""
    store = MemoryStore()
    driver = SheetDriver(store, record_cells(store, **cells))
    store.mark_changed(driver.experiment.experiment_id)
    with panel_site(home, store) as site:
        yield JudgingSite(site, driver)


@dataclass
class BatchPage:
    """The open page of a batch."""

    tab: BrowserTab
    sheet: str
    presses: int = 0

    @property
    def page(self) -> Page:
        return self.tab.page

    def press(self, *keys: str) -> None:
        """Press the keys in order and count them."""
        for key in keys:
            self.page.keyboard.press(key)
        self.presses += len(keys)

    def score(self, item: Mapping[str, Any]) -> None:
        """Press the keys of all scores of a filled item."""
        self.press(*(str(score) for tip in item["tips"] for score in tip["scores"].values()))

    def wait_until_ready(self) -> None:
        self.page.locator("#desk:not([hidden])").wait_for()

    @property
    def number(self) -> int:
        """The number of the current item."""
        return int(self.page.locator("[data-part=title]").inner_text().split()[1])

    def wait_for_item(self, number: int) -> None:
        """Wait until that item is shown."""
        self.page.locator("[data-part=title]", has_text=f"Item {number} of").wait_for()

    @property
    def save_state(self) -> str:
        return self.page.locator(".save-state").inner_text().strip()

    def wait_for_state(self, text: str) -> None:
        """Wait until the state of the current item has this text."""
        self.page.locator(".save-state", has_text=text).wait_for()

    def scores(self) -> list[int | None]:
        """Return the scores on the page, in order."""
        script = """[...document.querySelectorAll('.group')].map(group =>
            Number(group.querySelector('[aria-checked=true]')?.dataset.score) || null)"""
        found: list[int | None] = self.page.evaluate(script)
        return found

    def queue_state(self, number: int) -> str:
        """Return an item's state in the queue."""
        return str(self.page.locator(".queue-item").nth(number - 1).get_attribute("data-state"))

    def unsent_count(self) -> int:
        """Return the number of items that this browser has not sent yet."""
        script = "Object.keys(localStorage).filter(name => name.startsWith('tipbench.outbox.')).length"
        return int(self.page.evaluate(script))

    def finish(self) -> None:
        """Confirm the open dialog."""
        self.page.get_by_role("button", name="Finish batch", exact=True).click()


def open_batch_page(open_tab: TabOpener, site: Site, sheet: str, **more: Any) -> BatchPage:
    """Open the page of a batch as a judge."""
    batch_page = BatchPage(open_tab(site, "judge", **more), sheet)
    assert batch_page.tab.go(f"/judge/batches/{sheet}") == 200
    batch_page.wait_until_ready()
    return batch_page


def open_in_new_tab(batch_page: BatchPage) -> BatchPage:
    """Open the same batch in another tab of the same browser."""
    other = BatchPage(BrowserTab(batch_page.page.context.new_page(), batch_page.tab.origin), batch_page.sheet)
    other.page.goto(batch_page.page.url.partition("#")[0])
    other.wait_until_ready()
    return other
