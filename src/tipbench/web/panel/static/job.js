// Live updates of a job's page. Events only signal a change; the server renders the page, and only the parts that
// differ are replaced. The page works without this script.

import { localTimes } from "./site.js";

const PAUSE_MS = 700; // minimum time between two updates
const NEWS = ["snapshot", "progress", "job", "end"];

const job = document.getElementById("job");
const connection = document.getElementById("connection");
const words = document.getElementById("connection-words");
const log = document.getElementById("log");
let source;
let retryMs = 2000;
let looking = false;
let again = false;

function tell(state, text) {
  connection.dataset.state = state;
  if (words) words.textContent = text;
}

/** Put in what differs. A part that somebody is just using (its menu is open) waits for the next time. */
function putIn(fresh) {
  const live = document.getElementById("live");
  for (const part of [...fresh.children]) {
    const old = document.getElementById(part.id);
    if (!old || old.innerHTML === part.innerHTML) continue;
    if (part.id === "part-actions" && sameButtons(old, part)) continue;
    old.replaceWith(part);
  }
  for (const name of ["title", "announce", "ended"]) live.dataset[name] = fresh.dataset[name];
  document.title = live.dataset.title;
  putInChip(fresh.dataset);
  const announce = document.getElementById("announce");
  if (announce.dataset.last !== live.dataset.announce) {
    if (announce.dataset.last) announce.textContent = live.dataset.announce;
    announce.dataset.last = live.dataset.announce;
  }
}

/** The header's word on what runs now: it stood there before, so it changes or goes. */
function putInChip({ chip: text, chipUrl: url }) {
  const chip = document.getElementById("header-chip");
  if (!chip) return;
  if (!text) return chip.remove();
  chip.href = url;
  chip.querySelector(".badge").lastChild.textContent = ` ${text}`;
}

/** Only a hidden key differs: the same buttons, so an open question stays open. */
function sameButtons(old, fresh) {
  const faces = (part) => [...part.querySelectorAll("button, a, summary")].map((each) => each.textContent + (each.href ?? "")).join("|");
  return faces(old) === faces(fresh);
}

async function look() {
  if (looking) {
    again = true;
    return;
  }
  looking = true;
  try {
    const response = await fetch(job.dataset.live, { headers: { Accept: "text/html" } });
    if (response.redirected) return loggedOut();
    if (!response.ok) throw new Error(String(response.status));
    const fresh = new DOMParser().parseFromString(await response.text(), "text/html").getElementById("live");
    if (fresh) {
      localTimes(fresh); // format times as on the page, or every part with a time would differ
      putIn(fresh);
    }
    await readLog();
  } catch {
    if (source) tell("lost", "Connection lost, reconnecting");
  } finally {
    setTimeout(() => {
      looking = false;
      if (again) {
        again = false;
        look();
      }
    }, PAUSE_MS);
  }
}

async function readLog() {
  if (!log.open) return;
  const response = await fetch(job.dataset.log);
  if (!response.ok || response.redirected) return;
  const text = document.getElementById("log-text");
  const atEnd = text.scrollTop + text.clientHeight >= text.scrollHeight - 8;
  text.textContent = (await response.text()) || "No output yet.";
  if (atEnd) text.scrollTop = text.scrollHeight;
}

function loggedOut() {
  source?.close();
  source = null;
  tell("lost", "Your session has ended. Reload the page to log in again.");
}

function listen() {
  source = new EventSource(job.dataset.events);
  source.onopen = () => {
    retryMs = 2000;
    tell("live", "Live");
  };
  source.onerror = () => {
    tell("lost", "Connection lost, reconnecting");
    if (source.readyState !== EventSource.CLOSED) return; // the browser reconnects
    setTimeout(() => { if (source) { look(); listen(); } }, retryMs);
    retryMs = Math.min(retryMs * 2, 30000);
  };
  for (const name of NEWS) source.addEventListener(name, look);
  source.addEventListener("end", () => {
    source.close();
    source = null;
    tell("ended", "Ended");
  });
}

log.addEventListener("toggle", readLog);
document.getElementById("announce").dataset.last = document.getElementById("live").dataset.announce;
if (document.getElementById("live").dataset.ended === "no") listen();
