// The editor of a batch: its items with their answers, the judge's position, and the steps that can be undone.
import { isDone, same } from "./answer_formats.js";
import { recall, remember } from "./tabs.js";

const DRAFT_MS = 500; // combines several key presses into one request
const MAX_STEPS = 300;
const IDLE_S = 60; // a longer pause does not count as judging time

/** Events: `item` (another item is shown), `change`, `message` (detail: text), `done` (no item is open). */
export class BatchEditor extends EventTarget {
  #outbox;
  #api;
  #steps;
  #lastActive = performance.now();
  #spent = new Map(); // item → seconds not sent yet
  #joinsNext = false; // whether the next change belongs to the same step
  at = 0; // index of the current item
  spot = { tip: 0, scale: 0 }; // the scale to be scored next; null: at the submit button

  constructor(data, answerFormat, outbox, api) {
    super();
    Object.assign(this, { answerFormat, batch: data.batch, rubric: data.rubric });
    this.#outbox = outbox;
    this.#api = api;
    // raw: the item as loaded; saved: the answer on the server; content: the answer as shown
    this.items = data.items.map((raw) => ({ raw, saved: raw.answer, content: answerFormat.read(raw, raw.answer) }));
    this.#steps = stepsOf(recall(this.#stepsName), this.items.length);
    outbox.contentOf = (id, answer) => answerFormat.read(this.#byId(id).raw, answer);
    outbox.addEventListener("saved", ({ detail }) => this.#saved(detail));
    outbox.addEventListener("change", () => this.#emit("change"));
  }

  /** Restore unsent answers over those of the server. */
  resume(entries) {
    for (const [id, entry] of entries) {
      const item = this.#byId(id);
      if (!item) continue;
      entry.content = this.answerFormat.read(item.raw, entry.content);
      entry.sent = entry.sent.map((each) => this.answerFormat.read(item.raw, each));
      item.content = entry.content;
    }
    this.#outbox.flush();
  }

  get item() {
    return this.items[this.at];
  }

  get open() {
    return this.items.filter((item) => !isDone(item.content.state));
  }

  count(state) {
    return this.items.filter((item) => item.content.state === state).length;
  }

  /** Estimated seconds left, from the judge's own median; null while unknown. */
  get secondsLeft() {
    const own = this.items.filter((item) => item.saved.state === "submitted" && item.saved.seconds > 0)
      .map((item) => item.saved.seconds).sort((a, b) => a - b);
    if (own.length < 3) return null;
    return own[Math.floor(own.length / 2)] * this.open.length;
  }

  // moving

  go(at, spot = null) {
    if (at < 0 || at >= this.items.length) return;
    this.countTime();
    if (at !== this.at) this.#outbox.flush();
    this.at = at;
    this.spot = spot ?? this.answerFormat.missing(this.item.content)[0] ?? { tip: 0, scale: 0 };
    history.replaceState(null, "", `#${at + 1}`);
    this.#emit("item");
  }

  /** Go to the next open item. */
  goToNextOpen() {
    const order = this.items.map((_, step) => (this.at + 1 + step) % this.items.length);
    const next = order.find((at) => !isDone(this.items[at].content.state));
    if (next === undefined) this.#emit("done");
    else this.go(next);
  }

  move(tips, scales) {
    const [nTips, nScales] = [this.item.raw.tips.length, this.rubric.scales.length];
    const from = this.spot ?? { tip: nTips - 1, scale: nScales };
    const tip = from.tip + tips;
    if (tips && (tip < 0 || tip >= nTips)) return;
    // The scales of all tips in one row, with the submit button at its end.
    const submit = nTips * nScales;
    const to = Math.min(Math.max(tip * nScales + from.scale + scales, 0), submit);
    this.spot = to === submit ? null : { tip: Math.floor(to / nScales), scale: to % nScales };
    this.#emit("change");
  }

  select(tip, scale) {
    this.spot = { tip, scale };
    this.#emit("change");
  }

  // scoring

  score(tip, scale, value) {
    const { name, min, max } = this.rubric.scales[scale];
    if (!Number.isInteger(value) || value < min || value > max) return this.showMessage(`${name} goes from ${min} to ${max}.`);
    this.#change((content) => (content.tips[tip].scores[name] = value));
    this.spot = { tip, scale };
    this.#moveOn();
  }

  choose(winner) {
    this.#change((content) => (content.winner = winner), { more: true });
    this.submit();
  }

  contestFormat() {
    this.#change((content) => (content.format_ok = !content.format_ok));
    this.#emit("change");
  }

  contestLength(tip) {
    this.#change((content) => (content.tips[tip].overlong = !content.tips[tip].overlong));
    this.#emit("change");
  }

  /** `first` is true for the first change since the field was focused: everything typed there is one step. */
  note(tip, text, first) {
    this.#change((content) => (content.tips[tip].note = text), { step: first });
  }

  /** Submit a complete item, which counts when the batch closes; otherwise go to the first missing score. */
  submit() {
    const missing = this.answerFormat.missing(this.item.content);
    if (missing.length) {
      this.spot = missing[0];
      this.#emit("change");
      return this.showMessage(missing.length === 1 ? "One score is missing." : `${missing.length} scores are missing.`);
    }
    this.submitCurrent();
    this.goToNextOpen();
  }

  /** Submit the current item, which is complete, without moving on. */
  submitCurrent() {
    if (this.item.content.state === "submitted") return;
    this.#set(this.answerFormat.withState(this.item.content, "submitted"), { delay: 0 });
  }

  skip(reason) {
    this.#set(this.answerFormat.withState(this.item.content, "skipped", reason.replace(/\s+/g, " ").trim()), { delay: 0 });
    this.goToNextOpen();
  }

  /** Undo the last step of this tab in any item, or else the server's last step. */
  async undo() {
    const step = this.#steps.pop();
    if (step) {
      remember(this.#stepsName, JSON.stringify(this.#steps));
      this.at = step.at;
      this.#set(this.answerFormat.read(this.item.raw, step.before), { step: false, delay: 0 });
      this.go(step.at, step.spot ?? { tip: 0, scale: 0 });
      return this.showMessage(`Undone, in item ${step.at + 1}.`);
    }
    const { item } = this;
    if (this.#outbox.status(item.raw.item)) return this.showMessage("This item is being saved. Try again shortly.");
    if (!item.saved.can_undo) return this.showMessage("There is nothing to undo here.");
    const result = await this.#api.undo(item.raw.item, item.saved.version);
    const answer = result.kind === "ok" ? result.data.answer : result.kind === "conflict" ? result.data.detail.answer : null;
    if (!answer) return this.showMessage(result.message || "The panel is unreachable. Try again shortly.");
    this.#accept(item, answer);
    this.showMessage("Undone.");
  }

  // conflicts

  keepMine() {
    const id = this.item.raw.item;
    this.#outbox.overwrite(id, this.#outbox.entry(id).other.version);
    this.showMessage("Kept your version.");
  }

  takeOther() {
    const { item } = this;
    const { other, content } = this.#outbox.entry(item.raw.item);
    this.#outbox.discard(item.raw.item);
    this.#accept(item, other);
    this.#noteStep(content); // an undo restores the judge's own version
    this.go(this.at);
    this.showMessage("Took the other version.");
  }

  /** Take over an answer of another tab or of the server, except while a change of this tab is unsent. */
  update(id, answer) {
    const item = this.#byId(id);
    if (!item || answer.version <= item.saved.version || this.#outbox.status(id)) return;
    this.#steps = this.#steps.filter((step) => this.items[step.at] !== item);
    this.#accept(item, answer);
  }

  /** Count the time since the last activity for the current item. */
  countTime() {
    const now = performance.now();
    const passed = (now - this.#lastActive) / 1000;
    this.#lastActive = now;
    if (document.hidden || passed > IDLE_S) return;
    const id = this.item.raw.item;
    this.#spent.set(id, (this.#spent.get(id) ?? 0) + passed);
  }

  showMessage(text) {
    this.dispatchEvent(new CustomEvent("message", { detail: text }));
  }

  // internal

  get #stepsName() {
    return `tipbench.steps.${this.batch.sheet}`;
  }

  #byId(id) {
    return this.items.find((item) => item.raw.item === id) ?? null;
  }

  #change(change, options = {}) {
    const { item } = this;
    this.#set(this.answerFormat.changed(item.raw, item.content, change), options);
  }

  /** `more`: another change follows at once, and both are one step. */
  #set(content, { step = true, delay = DRAFT_MS, more = false } = {}) {
    const { item } = this;
    const id = item.raw.item;
    this.countTime();
    if (same(content, item.content)) return;
    if (step && !this.#joinsNext) this.#noteStep(item.content);
    this.#joinsNext = more;
    item.content = content;
    if (more) return;
    const seconds = this.#spent.get(id) ?? 0;
    if (same(content, this.answerFormat.read(item.raw, item.saved)) && this.#outbox.drop(id)) return this.#emit("change");
    this.#spent.delete(id);
    this.#outbox.put(id, item.saved.version, content, seconds, delay);
  }

  #noteStep(before) {
    this.#steps = [...this.#steps, { at: this.at, before, spot: this.spot }].slice(-MAX_STEPS);
    remember(this.#stepsName, JSON.stringify(this.#steps));
  }

  /** After the last scale, move to the first missing score, else to the submit button. */
  #moveOn() {
    const { tip, scale } = this.spot;
    const next = scale + 1 < this.rubric.scales.length ? { tip, scale: scale + 1 } : { tip: tip + 1, scale: 0 };
    const exists = next.tip < this.item.raw.tips.length;
    this.spot = exists ? next : this.answerFormat.missing(this.item.content)[0] ?? null;
    this.#emit("change");
  }

  #saved({ item: id, answer, batch }) {
    const item = this.#byId(id);
    if (!item) return;
    item.saved = answer;
    if (batch) this.batch = batch;
    this.dispatchEvent(new CustomEvent("saved", { detail: { id, answer } }));
    this.#emit("change");
  }

  #accept(item, answer) {
    item.saved = answer;
    item.content = this.answerFormat.read(item.raw, answer);
    this.#emit(item === this.item ? "item" : "change");
  }

  #emit(name) {
    this.dispatchEvent(new Event(name));
  }
}

function stepsOf(text, nItems) {
  try {
    const steps = JSON.parse(text ?? "[]");
    return steps.filter((step) => step.at >= 0 && step.at < nItems && step.before).slice(-MAX_STEPS);
  } catch {
    return [];
  }
}
