// The panel's API for one batch. Every result has a `kind`; network errors are results and never thrown.
import { csrfHeaders } from "../site.js";

const TIMEOUT_MS = 20_000;
const CLOSING_TIMEOUT_MS = 120_000; // closing applies a sheet

/** Sends a request and returns its result, by `kind`:
 *  ok · conflict (data.detail has the current item) · closed · login · away (retry) · refused (do not retry). */
async function request(method, url, body, timeout = TIMEOUT_MS) {
  const sent = body === undefined ? {} : { body: JSON.stringify(body) };
  const headers = { Accept: "application/json", ...csrfHeaders(), ...(sent.body ? { "Content-Type": "application/json" } : {}) };
  let response, data;
  try {
    const signal = AbortSignal.timeout(timeout);
    response = await fetch(url, { method, headers, ...sent, signal, redirect: "error", cache: "no-store" });
    data = await response.json();
  } catch {
    return { kind: response && response.status < 500 && !response.ok ? "refused" : "away", message: "", data: null };
  }
  const { code = "", message = "" } = data?.error ?? {};
  return { kind: response.ok ? "ok" : kindOf(response.status, code, data), message, data };
}

function kindOf(status, code, data) {
  if (code === "conflict" && data.detail?.answer) return "conflict";
  if (code === "batch_closed") return "closed";
  if (status === 401 || code === "csrf") return "login";
  return status >= 500 || status === 429 || status === 408 ? "away" : "refused";
}

export class BatchApi {
  #base;

  constructor(base) {
    this.#base = base;
  }

  load() {
    return request("GET", this.#base);
  }

  save(item, body) {
    return request("PUT", `${this.#base}/items/${encodeURIComponent(item)}`, body);
  }

  undo(item, version) {
    return request("POST", `${this.#base}/items/${encodeURIComponent(item)}/undo`, { version });
  }

  close() {
    return request("POST", `${this.#base}/close`, undefined, CLOSING_TIMEOUT_MS);
  }
}
