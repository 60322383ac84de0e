// Progressive enhancements of all pages. Every page works without this script.

/** The CSRF header for changes made by scripts: `fetch(url, {method: "POST", headers: csrfHeaders()})`. */
export function csrfHeaders() {
  const meta = document.querySelector('meta[name="csrf-token"]');
  return meta ? { [meta.dataset.header]: meta.content } : {};
}

function copyButtons() {
  if (!navigator.clipboard) return; // available over TLS or on localhost only; the text can be selected by hand
  for (const button of document.querySelectorAll("[data-copy]")) {
    const source = document.getElementById(button.dataset.copy);
    if (!source) continue;
    button.hidden = false;
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(source.textContent);
        button.textContent = "Copied";
      } catch {
        button.textContent = "Select it";
        getSelection()?.selectAllChildren(source);
      }
    });
  }
}

/** Ignores a second submit of a form while the first one is being sent. */
function sendOnce() {
  document.addEventListener("submit", (event) => {
    const form = event.target;
    if (event.defaultPrevented || form.method !== "post" || form.dataset.again !== undefined) return;
    if (form.dataset.sent) {
      event.preventDefault();
      return;
    }
    form.dataset.sent = "yes";
    setTimeout(() => delete form.dataset.sent, 8000);
  });
  addEventListener("pageshow", () => {
    for (const form of document.querySelectorAll("form[data-sent]")) delete form.dataset.sent;
  });
}

/** Replaces UTC times by local ones with their zone; UTC is shown on hover. */
export function localTimes(within = document) {
  const parts = { day: "numeric", month: "short", year: "numeric", hour: "2-digit", minute: "2-digit", timeZoneName: "short" };
  const minutes = new Intl.DateTimeFormat(undefined, parts);
  const seconds = new Intl.DateTimeFormat(undefined, { ...parts, second: "2-digit" });
  for (const time of within.querySelectorAll("time[datetime]:not([title])")) {
    const moment = new Date(time.dateTime);
    if (Number.isNaN(moment.getTime())) continue;
    time.title = time.textContent;
    const ago = time.dataset.style === "ago" ? recent(moment) : null;
    if (ago) time.title = `${minutes.format(moment)} (${time.title})`;
    time.textContent = ago ?? (time.dataset.style === "seconds" ? seconds : minutes).format(moment);
  }
}

/** "2 min ago", up to a day; null for older times and for a clock that is ahead. */
function recent(moment) {
  const minutes = Math.floor((Date.now() - moment) / 60000);
  if (minutes < 0 || minutes >= 24 * 60) return null;
  if (minutes < 1) return "just now";
  return minutes < 60 ? `${minutes} min ago` : `${Math.floor(minutes / 60)} h ago`;
}

/** Keeps at most one confirmation open; Escape closes it. */
function confirmations() {
  const open = () => document.querySelectorAll("details.confirm[open]");
  document.addEventListener("toggle", (event) => {
    const opened = event.target;
    if (!opened.matches?.("details.confirm") || !opened.open) return;
    for (const other of open()) if (other !== opened) other.open = false;
  }, true);
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    for (const each of open()) {
      each.open = false;
      each.querySelector("summary")?.focus();
    }
  });
}

copyButtons();
sendOnce();
localTimes();
confirmations();
