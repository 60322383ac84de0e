// The judge page: creates its parts and connects them.
import { BatchApi } from "./api.js";
import { BatchEditor } from "./batch_editor.js";
import * as dialogs from "./dialogs.js";
import { listen } from "./keys.js";
import { Outbox } from "./outbox.js";
import { DuelFormat, ScoringFormat, isDone } from "./answer_formats.js";
import { Tabs } from "./tabs.js";
import { BarView, paintBanner } from "./view_bar.js";
import { ConflictView } from "./view_conflict.js";
import { DuelView } from "./view_duel.js";
import { QueueView } from "./view_queue.js";
import { RubricView, shortKeys, showScales } from "./view_rubric.js";
import { ScenarioView } from "./view_scenario.js";
import { TipsView } from "./view_tips.js";

const STALE_AFTER_MS = 20_000; // a page hidden for longer loads the batch again
const byId = (id) => document.getElementById(id);
const root = byId("desk");
const { kind, url, sheet } = root.dataset;

async function start() {
  document.querySelector(".needs-script-why").hidden = true;
  const api = new BatchApi(url);
  const data = await loadBatch(api);
  if (!data) return;
  const answerFormat = kind === "duel" ? new DuelFormat() : new ScoringFormat(data.rubric.scales);
  let editor = null;
  const tabs = new Tabs(sheet, (item, answer) => editor?.update(item, answer));
  const alive = await tabs.others();
  const outbox = new Outbox(sheet, tabs.name, (item, body) => api.save(item, body));
  editor = new BatchEditor(data, answerFormat, outbox, api);
  editor.resume(outbox.take(alive));
  editor.addEventListener("saved", ({ detail: { id, answer } }) => tabs.publish(id, answer));
  const view = createViews(editor, outbox);
  connectCommands(editor, outbox, api, view);
  keepUpToDate(editor, outbox, api);
  byId("waiting").hidden = true;
  root.hidden = false;
  editor.go(firstItem(editor));
}

/** Loads the batch, with retries until the server responds. */
async function loadBatch(api) {
  for (let pause = 500; ; pause = Math.min(pause * 2, 10_000)) {
    const result = await api.load();
    if (result.kind === "ok" && result.data.batch.status === "open") return result.data;
    if (result.kind === "ok" || result.kind === "login") return void location.reload(); // the server's page has the reason
    const away = result.kind === "away";
    byId("waiting-words").textContent = away ? "The panel is unreachable. Trying again…" : result.message || "This batch cannot be shown.";
    if (!away) return null;
    await new Promise((resolve) => setTimeout(resolve, pause));
  }
}

function firstItem(editor) {
  const linked = Number(location.hash.slice(1)) - 1;
  if (editor.items[linked]) return linked;
  return Math.max(0, editor.items.findIndex((item) => !isDone(item.content.state)));
}

/** Creates the views and updates them after each change. Returns the answer's view, the elements by `data-part`, and a
 *  function that moves the focus to the current scale or button. */
function createViews(editor, outbox) {
  const parts = Object.fromEntries([...root.querySelectorAll("[data-part]")].map((each) => [each.dataset.part, each]));
  const queue = new QueueView(parts.queue, editor, outbox);
  const scenario = new ScenarioView(parts.scenario);
  const answer = kind === "duel" ? new DuelView(parts.answer, editor) : new TipsView(parts.answer, editor);
  const rubric = kind === "duel" ? null : new RubricView(parts, editor);
  const others = [new BarView(parts, editor, outbox), new ConflictView(parts.conflict, editor, outbox)];
  if (kind === "duel") showScales(parts.steps, editor.rubric);
  parts.keys.replaceChildren(...shortKeys(kind));
  const refresh = () => {
    for (const view of [answer, ...others, ...(rubric ? [rubric] : [])]) view.refresh(editor.item);
    queue.refresh();
    paintBanner(parts.banner, outbox, stuckOf(editor, outbox));
  };
  const focus = () => {
    const typing = document.activeElement?.matches?.("textarea, input");
    if (typing || dialogs.anyOpen()) return;
    if (editor.spot === null) parts.submit.focus({ preventScroll: true });
    else answer.focus();
  };
  let focused = null;
  editor.addEventListener("change", () => {
    const spot = JSON.stringify(editor.spot);
    refresh();
    if (spot !== focused) focus(); // a response of the server changes no position and must not move the focus
    focused = spot;
  });
  editor.addEventListener("item", () => {
    focused = JSON.stringify(editor.spot);
    scenario.show(editor.item.raw.scenario);
    answer.show(editor.item);
    refresh();
    queue.center(editor.at);
    document.activeElement?.blur();
    focus();
    document.title = `${editor.at + 1} of ${editor.items.length} · Judge · tipbench`;
  });
  editor.addEventListener("message", ({ detail }) => announce(parts, detail));
  outbox.addEventListener("stuck", ({ detail }) => {
    if (detail.stuck === "conflict") announce(parts, "Changed elsewhere: choose a version.");
  });
  return { answer, parts, focus };
}

function stuckOf(editor, outbox) {
  const all = editor.items.map((item) => outbox.status(item.raw.item));
  return all.includes("login") ? "login" : all.includes("closed") ? "closed" : null;
}

let messageTimer = 0;
function announce({ message }, words) {
  message.textContent = words;
  clearTimeout(messageTimer);
  messageTimer = setTimeout(() => (message.textContent = ""), 6000);
}

function connectCommands(editor, outbox, api, { answer, parts, focus }) {
  const currentTip = () => editor.spot?.tip ?? editor.item.raw.tips.length - 1;
  const lastScale = () => editor.rubric.scales.length - 1;
  const finish = () => dialogs.askFinish(editor, completeDrafts(editor));
  const act = {
    score: (digit) => {
      const spot = editor.spot ?? { tip: currentTip(), scale: lastScale() };
      editor.score(spot.tip, spot.scale, digit === "0" ? 10 : Number(digit));
    },
    left: () => editor.move(0, -1), right: () => editor.move(0, 1), up: () => editor.move(-1, 0), down: () => editor.move(1, 0),
    format: () => editor.contestFormat(), overlong: () => editor.contestLength(currentTip()), note: () => answer.openNote(currentTip()),
    a: () => editor.choose("a"), b: () => editor.choose("b"), tie: () => editor.choose("tie"),
    submit: () => { document.activeElement?.blur(); editor.submit(); },
    next: () => editor.go(editor.at + 1), before: () => editor.go(editor.at - 1),
    undo: () => editor.undo(), skip: () => dialogs.askSkip(editor.item), help: dialogs.showKeys,
    leave: () => { document.activeElement.blur(); focus(); },
  };
  dialogs.install(kind, editor);
  listen(kind, act, dialogs.anyOpen);
  for (const button of root.querySelectorAll("[data-do]")) {
    button.addEventListener("click", () => ({ ...act, finish, rubric: dialogs.showRubric })[button.dataset.do]());
  }
  editor.addEventListener("done", finish);
  byId("finish-now").addEventListener("click", () => close(outbox, api));
  byId("finish-drafts").addEventListener("click", () => submitDrafts(editor, finish));
  for (const dialog of document.querySelectorAll("dialog")) dialog.addEventListener("close", () => focus());
  parts.brief.addEventListener("click", () => parts.box.classList.toggle("is-open"));
}

function completeDrafts(editor) {
  return editor.items.filter((item) => item.content.state === "draft" && editor.answerFormat.missing(item.content).length === 0);
}

function submitDrafts(editor, finish) {
  for (const item of completeDrafts(editor)) {
    editor.go(editor.items.indexOf(item));
    editor.submitCurrent();
  }
  finish();
}

/** Sends all answers, closes the batch, and shows the server's page with the result. */
async function close(outbox, api) {
  dialogs.showFinishing("Saving…");
  await outbox.flush();
  if (outbox.size) await outbox.flush(); // the first call may have joined a running round
  if (outbox.size) {
    return dialogs.showFinishProblem(outbox.away
      ? "The panel is unreachable. Your scores are saved in this browser; finish once it is reachable."
      : "Some items are not saved yet: those with an exclamation mark in the queue. Look at them first.");
  }
  dialogs.showFinishing("Applying the scores…");
  const result = await api.close();
  if (result.kind === "ok") location.reload();
  else dialogs.showFinishProblem(result.message || "The panel is unreachable. Nothing is lost; try again shortly.");
}

/** Counts judging time, loads answers saved elsewhere, and resends once the connection is back. */
function keepUpToDate(editor, outbox, api) {
  for (const event of ["keydown", "pointerdown", "pointermove", "wheel", "touchmove"]) {
    addEventListener(event, () => editor.countTime(), { passive: true, capture: true });
  }
  addEventListener("online", () => outbox.flush());
  addEventListener("pagehide", () => outbox.flush());
  let hiddenAt = 0;
  document.addEventListener("visibilitychange", async () => {
    if (document.hidden) {
      hiddenAt = Date.now();
      outbox.flush();
    } else if (Date.now() - hiddenAt > STALE_AFTER_MS) {
      outbox.retryStuck();
      const result = await api.load();
      if (result.kind !== "ok") return;
      if (result.data.batch.status !== "open" && !outbox.size) location.reload();
      for (const { item, answer } of result.data.items ?? []) editor.update(item, answer);
    }
  });
}

start();
