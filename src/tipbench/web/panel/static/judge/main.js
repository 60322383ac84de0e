// The judge page: puts the parts together.
import { Api } from "./api.js";
import { Desk } from "./desk.js";
import * as dialogs from "./dialogs.js";
import { listen } from "./keys.js";
import { Outbox } from "./outbox.js";
import { DuelPaper, ScoringPaper, ended } from "./paper.js";
import { Tabs } from "./tabs.js";
import { BarView, paintBanner } from "./view_bar.js";
import { ConflictView } from "./view_conflict.js";
import { DuelView } from "./view_duel.js";
import { QueueView } from "./view_queue.js";
import { RubricView, shortKeys, showScales } from "./view_rubric.js";
import { ScenarioView } from "./view_scenario.js";
import { TipsView } from "./view_tips.js";

const FRESH_MS = 20_000; // a page that was out of sight for longer asks what others have saved
const byId = (id) => document.getElementById(id);
const root = byId("desk");
const { kind, url, sheet } = root.dataset;

async function begin() {
  document.querySelector(".needs-script-why").hidden = true;
  const api = new Api(url);
  const told = await loaded(api);
  if (!told) return;
  const paper = kind === "duel" ? new DuelPaper() : new ScoringPaper(told.rubric.scales);
  let desk = null;
  const tabs = new Tabs(sheet, (item, answer) => desk?.heard(item, answer));
  const alive = await tabs.others(sheet);
  const outbox = new Outbox(sheet, tabs.name, (item, body) => api.save(item, body));
  desk = new Desk(told, paper, outbox, api);
  desk.resume(outbox.take(alive));
  desk.addEventListener("saved", ({ detail: { id, answer } }) => tabs.tell(id, answer));
  const show = views(desk, outbox);
  commands(desk, outbox, api, show);
  refreshing(desk, outbox, api);
  byId("waiting").hidden = true;
  root.hidden = false;
  desk.go(firstItem(desk));
}

/** The batch as the server has it; asks until it answers. */
async function loaded(api) {
  for (let pause = 500; ; pause = Math.min(pause * 2, 10_000)) {
    const result = await api.load();
    if (result.kind === "ok" && result.told.batch.status === "open") return result.told;
    if (result.kind === "ok" || result.kind === "login") return void location.reload(); // the server's page says more
    const away = result.kind === "away";
    byId("waiting-words").textContent = away ? "The panel is unreachable. Trying again…" : result.message || "This batch cannot be shown.";
    if (!away) return null;
    await new Promise((resolve) => setTimeout(resolve, pause));
  }
}

function firstItem(desk) {
  const asked = Number(location.hash.slice(1)) - 1;
  if (desk.items[asked]) return asked;
  return Math.max(0, desk.items.findIndex((item) => !ended(item.content.state)));
}

/** Builds the views and keeps them up to date; returns the one with the answer. */
function views(desk, outbox) {
  const parts = Object.fromEntries([...root.querySelectorAll("[data-part]")].map((each) => [each.dataset.part, each]));
  const queue = new QueueView(parts.queue, desk, outbox);
  const scenario = new ScenarioView(parts.scenario);
  const answer = kind === "duel" ? new DuelView(parts.answer, desk) : new TipsView(parts.answer, desk);
  const rubric = kind === "duel" ? null : new RubricView(parts, desk);
  const rest = [new BarView(parts, desk, outbox), new ConflictView(parts.conflict, desk, outbox)];
  if (kind === "duel") showScales(parts.steps, desk.rubric);
  parts.keys.replaceChildren(...shortKeys(kind));
  const refresh = () => {
    for (const view of [answer, ...rest, ...(rubric ? [rubric] : [])]) view.refresh(desk.item);
    queue.refresh();
    paintBanner(parts.banner, outbox, stuckOf(desk, outbox));
  };
  const focus = () => {
    const typing = document.activeElement?.matches?.("textarea, input");
    if (typing || dialogs.anyOpen()) return;
    if (desk.spot === null) parts.submit.focus({ preventScroll: true });
    else answer.focus();
  };
  let asked = null;
  desk.addEventListener("change", () => {
    const spot = JSON.stringify(desk.spot);
    refresh();
    if (spot !== asked) focus(); // the network has changed something: the focus stays where it is
    asked = spot;
  });
  desk.addEventListener("item", () => {
    asked = JSON.stringify(desk.spot);
    scenario.show(desk.item.raw.scenario);
    answer.show(desk.item);
    refresh();
    queue.center(desk.at);
    document.activeElement?.blur();
    focus();
    document.title = `${desk.at + 1} of ${desk.items.length} · Judge · tipbench`;
  });
  desk.addEventListener("say", ({ detail }) => announce(parts, detail));
  outbox.addEventListener("stuck", ({ detail }) => {
    if (detail.stuck === "conflict") announce(parts, "Changed elsewhere: choose a version.");
  });
  return { answer, parts, focus };
}

function stuckOf(desk, outbox) {
  const all = desk.items.map((item) => outbox.status(item.raw.item));
  return all.includes("login") ? "login" : all.includes("closed") ? "closed" : null;
}

let quiet = 0;
function announce({ message }, words) {
  message.textContent = words;
  clearTimeout(quiet);
  quiet = setTimeout(() => (message.textContent = ""), 6000);
}

function commands(desk, outbox, api, { answer, parts, focus }) {
  const tip = () => desk.spot?.tip ?? desk.item.raw.tips.length - 1;
  const last = () => desk.rubric.scales.length - 1;
  const finish = () => dialogs.askFinish(desk, wholeDrafts(desk));
  const act = {
    score: (digit) => {
      const spot = desk.spot ?? { tip: tip(), scale: last() };
      desk.score(spot.tip, spot.scale, digit === "0" ? 10 : Number(digit));
    },
    left: () => desk.move(0, -1), right: () => desk.move(0, 1), up: () => desk.move(-1, 0), down: () => desk.move(1, 0),
    format: () => desk.contestFormat(), overlong: () => desk.contestLength(tip()), note: () => answer.openNote(tip()),
    a: () => desk.choose("a"), b: () => desk.choose("b"), tie: () => desk.choose("tie"),
    submit: () => { document.activeElement?.blur(); desk.submit(); },
    next: () => desk.go(desk.at + 1), before: () => desk.go(desk.at - 1),
    undo: () => desk.undo(), skip: () => dialogs.askSkip(desk.item), help: dialogs.showKeys,
    leave: () => { document.activeElement.blur(); focus(); },
  };
  dialogs.install(kind, desk);
  listen(kind, act, dialogs.anyOpen);
  for (const button of root.querySelectorAll("[data-do]")) {
    button.addEventListener("click", () => ({ ...act, finish, rubric: dialogs.showRubric })[button.dataset.do]());
  }
  desk.addEventListener("all", finish);
  byId("finish-now").addEventListener("click", () => close(outbox, api));
  byId("finish-drafts").addEventListener("click", () => submitDrafts(desk, finish));
  for (const dialog of document.querySelectorAll("dialog")) dialog.addEventListener("close", () => focus());
  parts.brief.addEventListener("click", () => parts.box.classList.toggle("is-open"));
}

function wholeDrafts(desk) {
  return desk.items.filter((item) => item.content.state === "draft" && desk.paper.missing(item.content).length === 0);
}

function submitDrafts(desk, finish) {
  for (const item of wholeDrafts(desk)) {
    desk.go(desk.items.indexOf(item));
    desk.submitHere();
  }
  finish();
}

/** Everything that was said goes out first; then the batch is counted, and the server's page shows how it went. */
async function close(outbox, api) {
  dialogs.finishing("Saving…");
  await outbox.flush();
  if (outbox.size) await outbox.flush(); // it may have been in the middle of a round
  if (outbox.size) {
    return dialogs.finishProblem(outbox.away
      ? "The panel is unreachable. Your scores are saved in this browser; finish once it is reachable."
      : "Some items are not saved yet: those with an exclamation mark in the queue. Look at them first.");
  }
  dialogs.finishing("Applying the scores…");
  const result = await api.close();
  if (result.kind === "ok") location.reload();
  else dialogs.finishProblem(result.message || "The panel is unreachable. Nothing is lost; try again shortly.");
}

/** Time counts while something is done; what others have saved comes in; a connection that is back is used at once. */
function refreshing(desk, outbox, api) {
  for (const event of ["keydown", "pointerdown", "pointermove", "wheel", "touchmove"]) {
    addEventListener(event, () => desk.active(), { passive: true, capture: true });
  }
  addEventListener("online", () => outbox.flush());
  addEventListener("pagehide", () => outbox.flush());
  let hidden = 0;
  document.addEventListener("visibilitychange", async () => {
    if (document.hidden) {
      hidden = Date.now();
      outbox.flush();
    } else if (Date.now() - hidden > FRESH_MS) {
      outbox.unstick();
      const result = await api.load();
      if (result.kind !== "ok") return;
      if (result.told.batch.status !== "open" && !outbox.size) location.reload();
      for (const { item, answer } of result.told.items ?? []) desk.heard(item, answer);
    }
  });
}

begin();
