// Answers that the server has not confirmed. They are stored in this browser before they are sent, item by item,
// so that neither a reload nor a dead server loses them; sent one after the other, with retries and growing pauses.
import { same } from "./answer_formats.js";

const PREFIX = "tipbench.outbox.";
const FIRST_PAUSE_MS = 1000;
const MAX_PAUSE_MS = 30_000;
const MAX_SENT = 8;

/** Events: `saved` (detail: item, answer, batch), `stuck` (detail: item), `change`. */
export class Outbox extends EventTarget {
  #entries = new Map(); // item → {version, content, seconds, sent, at, due, stuck, other, message}
  // sent: contents sent since `version`; at: time of the last change; due: time to send it; stuck: why it is not sent;
  // other: the server's answer in a conflict
  #sheet;
  #tab;
  #send;
  #running = null;
  #sending = null;
  #timer = 0;
  #pause = 0;
  #resumeAt = 0;
  hasStorage = true; // whether this browser stores entries

  constructor(sheet, tab, send) {
    super();
    this.#sheet = sheet;
    this.#tab = tab;
    this.#send = send;
  }

  /** Takes over the entries that this tab stored before a reload, and those of closed tabs:
   *  item → {version, content, seconds, sent}. */
  take(alive) {
    const found = [];
    for (const name of storedNames(`${PREFIX}${this.#sheet}.`)) {
      const [item, tab] = name.slice(PREFIX.length + this.#sheet.length + 1).split(".");
      const entry = parsed(localStorage.getItem(name));
      if (entry && (tab === this.#tab || !alive.has(tab))) found.push({ name, item, tab, entry });
    }
    found.sort((one, other) => other.entry.at - one.entry.at); // newest first: the older entry of an item stays stored
    for (const { name, item, tab, entry } of found) {
      if (this.#entries.has(item)) continue;
      this.#entries.set(item, { ...entry, due: 0, stuck: null });
      if (tab !== this.#tab && this.#store(item)) localStorage.removeItem(name);
    }
    return this.#entries;
  }

  get size() {
    return this.#entries.size;
  }

  get away() {
    return this.#resumeAt > 0;
  }

  entry(item) {
    return this.#entries.get(item) ?? null;
  }

  /** waiting · sending · away · conflict · refused · closed · login; null when everything is saved. */
  status(item) {
    const entry = this.#entries.get(item);
    if (!entry) return null;
    return entry.stuck ?? (this.away ? "away" : this.#sending === item ? "sending" : "waiting");
  }

  /** Store the content of an item that was changed at `version`, and send it after `delay`. */
  put(item, version, content, seconds, delay) {
    const present = this.#entries.get(item);
    const entry = present ?? { version, sent: [], seconds: 0 };
    const stuck = entry.stuck === "refused" ? null : entry.stuck ?? null; // another content may be accepted
    const due = Date.now() + delay;
    this.#entries.set(item, Object.assign(entry, { content, seconds: entry.seconds + seconds, at: Date.now(), due, stuck }));
    this.#store(item);
    this.#schedule();
    this.#changed();
  }

  /** Drop an entry that equals the saved answer; false if another content may have reached the server. */
  drop(item) {
    const entry = this.#entries.get(item);
    if (entry && (entry.sent.length || this.#sending === item)) return false;
    this.#forget(item);
    return true;
  }

  /** Resolve a conflict with the judge's own content, which replaces the one of `version`. */
  overwrite(item, version) {
    const entry = this.#entries.get(item);
    Object.assign(entry, { version, sent: [], stuck: null, other: null, due: 0 });
    this.#store(item);
    this.flush();
  }

  /** Resolve a conflict with the other content. */
  discard(item) {
    this.#forget(item);
  }

  /** Send everything now. */
  flush() {
    for (const entry of this.#entries.values()) entry.due = 0;
    if (this.away) this.#resumeAt = 1; // in the past: send now, but stay `away` until the server responds
    return this.#run();
  }

  /** Send again what is stuck, except conflicts. */
  retryStuck() {
    for (const entry of this.#entries.values()) if (entry.stuck !== "conflict") entry.stuck = null;
    return this.flush();
  }

  #run() {
    this.#running ??= this.#deliverAll().finally(() => {
      this.#running = null;
      this.#schedule();
      this.#changed();
    });
    return this.#running;
  }

  async #deliverAll() {
    clearTimeout(this.#timer);
    for (let item = this.#next(); item !== null; item = this.#next()) {
      this.#sending = item;
      this.#changed();
      const reached = await this.#deliver(item, this.#entries.get(item));
      this.#sending = null;
      if (reached) {
        this.#pause = this.#resumeAt = 0;
        continue;
      }
      this.#pause = Math.min(MAX_PAUSE_MS, this.#pause * 2 || FIRST_PAUSE_MS);
      this.#resumeAt = Date.now() + this.#pause * (0.75 + Math.random() / 2);
      return;
    }
  }

  #next() {
    const now = Date.now();
    if (this.#resumeAt > now) return null;
    for (const [item, entry] of this.#entries) if (!entry.stuck && entry.due <= now) return item;
    return null;
  }

  /** Send one entry; false if the server was not reached. */
  async #deliver(item, entry) {
    const { version, content, seconds } = entry;
    if (!entry.sent.some((each) => same(each, content))) entry.sent = [...entry.sent, content].slice(-MAX_SENT);
    this.#store(item); // before sending: the response may be lost
    const result = await this.#send(item, { version, ...content, seconds: Math.round(seconds * 10) / 10 });
    if (this.#entries.get(item) !== entry) return true; // replaced during the request
    if (result.kind === "away") return false;
    if (result.kind === "ok") this.#confirmed(item, entry, content, seconds, result.data);
    else if (result.kind === "conflict") this.#resolveNewer(item, entry, result.data.detail.answer);
    else this.#stick(item, entry, result.kind, { message: result.message });
    return true;
  }

  #confirmed(item, entry, content, seconds, { answer, batch }) {
    Object.assign(entry, { version: answer.version, sent: [], seconds: Math.max(0, entry.seconds - seconds) });
    if (same(entry.content, content)) this.#forget(item);
    else this.#store(item);
    this.dispatchEvent(new CustomEvent("saved", { detail: { item, answer, batch } }));
  }

  /** The item has a newer version: by another client, or by our own request whose response was lost. */
  #resolveNewer(item, entry, other) {
    const otherContent = this.contentOf(item, other);
    if (same(otherContent, entry.content)) {
      this.#forget(item);
      this.dispatchEvent(new CustomEvent("saved", { detail: { item, answer: other, batch: null } }));
    } else if (entry.sent.some((each) => same(each, otherContent)) && other.version === entry.version + 1) {
      Object.assign(entry, { version: other.version, sent: [], seconds: 0 });
      this.#store(item);
    } else {
      this.#stick(item, entry, "conflict", { other });
    }
  }

  /** Set by the editor. */
  contentOf(_item, answer) {
    return answer;
  }

  #stick(item, entry, stuck, more) {
    Object.assign(entry, { stuck }, more);
    this.dispatchEvent(new CustomEvent("stuck", { detail: { item, stuck } }));
  }

  #schedule() {
    if (this.#running) return;
    clearTimeout(this.#timer);
    const waiting = [...this.#entries.values()].filter((entry) => !entry.stuck);
    if (!waiting.length) return;
    const first = Math.max(this.#resumeAt, Math.min(...waiting.map((entry) => entry.due)));
    this.#timer = setTimeout(() => this.#run(), Math.max(0, first - Date.now()));
  }

  #store(item) {
    const { version, content, seconds, sent, at } = this.#entries.get(item);
    try {
      localStorage.setItem(this.#name(item), JSON.stringify({ version, content, seconds, sent, at }));
      this.hasStorage = true;
    } catch {
      this.hasStorage = false;
    }
    return this.hasStorage;
  }

  #forget(item) {
    this.#entries.delete(item);
    try {
      localStorage.removeItem(this.#name(item));
    } catch {
      // no storage: nothing was stored
    }
    this.#changed();
  }

  #name(item) {
    return `${PREFIX}${this.#sheet}.${item}.${this.#tab}`;
  }

  #changed() {
    this.dispatchEvent(new Event("change"));
  }
}

function storedNames(prefix) {
  try {
    return Object.keys(localStorage).filter((name) => name.startsWith(prefix));
  } catch {
    return []; // storage is switched off
  }
}

function parsed(text) {
  try {
    const entry = JSON.parse(text);
    const isValid = Number.isInteger(entry.version) && typeof entry.content?.state === "string" && Array.isArray(entry.sent);
    return isValid ? { ...entry, at: Number(entry.at) || 0, seconds: Number(entry.seconds) || 0 } : null;
  } catch {
    return null;
  }
}
