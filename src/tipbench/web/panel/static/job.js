// Live updates of a job's page. Events only signal a change; the server renders the page, and only the parts that
// differ are replaced. The page works without this script.

import { localTimes } from "./site.js";

const PAUSE_MS = 700; // minimum time between two updates
const UPDATES = ["snapshot", "progress", "job", "end"];

const job = document.getElementById("job");
const connection = document.getElementById("connection");
const connectionText = document.getElementById("connection-words");
const log = document.getElementById("log");
let source;
let retryMs = 2000;
let refreshing = false;
let refreshAgain = false; // an event came during a refresh

function showConnection(state, text) {
  connection.dataset.state = state;
  if (connectionText) connectionText.textContent = text;
}

/** Replace the parts of the page that have changed. */
function replaceParts(fresh) {
  const live = document.getElementById("live");
  for (const part of [...fresh.children]) {
    const old = document.getElementById(part.id);
    if (!old || old.innerHTML === part.innerHTML) continue;
    if (part.id === "part-actions" && sameButtons(old, part)) continue;
    old.replaceWith(part);
  }
  for (const name of ["title", "announce", "ended"]) live.dataset[name] = fresh.dataset[name];
  document.title = live.dataset.title;
  updateJobsLink(fresh.dataset);
  const announce = document.getElementById("announce");
  if (announce.dataset.last !== live.dataset.announce) {
    if (announce.dataset.last) announce.textContent = live.dataset.announce;
    announce.dataset.last = live.dataset.announce;
  }
}

/** Update or remove the header's link to the running jobs; a link is never added. */
function updateJobsLink({ jobsText: text, jobsUrl: url }) {
  const link = document.getElementById("jobs-link");
  if (!link) return;
  if (!text) return link.remove();
  link.href = url;
  link.querySelector(".badge").lastChild.textContent = ` ${text}`;
}

/** Whether two sets of actions have the same buttons and differ only in hidden fields; an open confirmation then stays open. */
function sameButtons(old, fresh) {
  const labels = (part) => [...part.querySelectorAll("button, a, summary")].map((each) => each.textContent + (each.href ?? "")).join("|");
  return labels(old) === labels(fresh);
}

async function refresh() {
  if (refreshing) {
    refreshAgain = true;
    return;
  }
  refreshing = true;
  try {
    const response = await fetch(job.dataset.live, { headers: { Accept: "text/html" } });
    if (response.redirected) return loggedOut();
    if (!response.ok) throw new Error(String(response.status));
    const fresh = new DOMParser().parseFromString(await response.text(), "text/html").getElementById("live");
    if (fresh) {
      localTimes(fresh); // format times as on the page, or every part with a time would differ
      replaceParts(fresh);
    }
    await readLog();
  } catch {
    if (source) showConnection("lost", "Connection lost, reconnecting");
  } finally {
    setTimeout(() => {
      refreshing = false;
      if (refreshAgain) {
        refreshAgain = false;
        refresh();
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
  showConnection("lost", "Your session has ended. Reload the page to log in again.");
}

function connect() {
  source = new EventSource(job.dataset.events);
  source.onopen = () => {
    retryMs = 2000;
    showConnection("live", "Live");
  };
  source.onerror = () => {
    showConnection("lost", "Connection lost, reconnecting");
    if (source.readyState !== EventSource.CLOSED) return; // the browser reconnects
    setTimeout(() => { if (source) { refresh(); connect(); } }, retryMs);
    retryMs = Math.min(retryMs * 2, 30000);
  };
  for (const name of UPDATES) source.addEventListener(name, refresh);
  source.addEventListener("end", () => {
    source.close();
    source = null;
    showConnection("ended", "Ended");
  });
}

/** Advance the clocks, which start at the server's time. */
function advanceClocks() {
  for (const clock of document.querySelectorAll("[data-clock]")) {
    clock.from ??= performance.now() - Number(clock.dataset.clock) * 1000;
    const elapsed = Math.floor((performance.now() - clock.from) / 1000);
    const [hours, minutes, seconds] = [Math.floor(elapsed / 3600), Math.floor(elapsed / 60) % 60, elapsed % 60].map(String);
    const text = hours === "0" ? `${minutes}:${seconds.padStart(2, "0")}` : `${hours}:${minutes.padStart(2, "0")}:${seconds.padStart(2, "0")}`;
    if (clock.textContent !== text) clock.textContent = text;
  }
}

setInterval(advanceClocks, 500);
log.addEventListener("toggle", readLog);
document.getElementById("announce").dataset.last = document.getElementById("live").dataset.announce;
if (document.getElementById("live").dataset.ended === "no") connect();
