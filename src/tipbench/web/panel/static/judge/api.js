// The panel's API for one batch. Every answer has a `kind`; nothing is ever thrown for what a network may do.
import { csrfHeaders } from "../site.js";

const PATIENCE_MS = 20_000;
const CLOSING_MS = 120_000; // a sheet is applied meanwhile

/** What happened, in one word:
 *  ok · conflict (told.detail has the item as it is now) · closed · login · away (try again) · refused (do not). */
async function ask(method, url, body, { patience = PATIENCE_MS, keepalive = false } = {}) {
  const sent = body === undefined ? {} : { body: JSON.stringify(body) };
  const headers = { Accept: "application/json", ...csrfHeaders(), ...(sent.body ? { "Content-Type": "application/json" } : {}) };
  let response, told;
  try {
    const signal = AbortSignal.timeout(patience);
    response = await fetch(url, { method, headers, ...sent, keepalive, signal, redirect: "error", cache: "no-store" });
    told = await response.json();
  } catch {
    return { kind: response && response.status < 500 && !response.ok ? "refused" : "away", message: "", told: null };
  }
  const { code = "", message = "" } = told?.error ?? {};
  return { kind: response.ok ? "ok" : kindOf(response.status, code, told), code, message, told };
}

function kindOf(status, code, told) {
  if (code === "conflict" && told.detail?.answer) return "conflict";
  if (code === "batch_closed") return "closed";
  if (status === 401 || code === "csrf") return "login";
  return status >= 500 || status === 429 || status === 408 ? "away" : "refused";
}

/** One batch. */
export class Api {
  #base;

  constructor(base) {
    this.#base = base;
  }

  load() {
    return ask("GET", this.#base);
  }

  save(item, body, keepalive = false) {
    return ask("PUT", `${this.#base}/items/${encodeURIComponent(item)}`, body, { keepalive });
  }

  undo(item, version) {
    return ask("POST", `${this.#base}/items/${encodeURIComponent(item)}/undo`, { version });
  }

  close() {
    return ask("POST", `${this.#base}/close`, undefined, { patience: CLOSING_MS });
  }
}
