// Leaderboard: select fields submit on change, and new results are announced. The page works without this script.

const POLL_MS = 15_000;
const MAX_POLL_MS = 120_000; // while the server does not respond
const MAX_POLLS = 480; // per page; after that it has to be reloaded

function submitOnChange() {
  for (const select of document.querySelectorAll("select[data-submits]")) {
    const button = select.form.querySelector('button[type="submit"]');
    if (button) button.hidden = true;
    let byKey = false; // arrow keys move through the options, so submit on Enter or blur only
    select.addEventListener("keydown", (event) => {
      if (event.key === "Enter") select.form.requestSubmit();
      else if (event.key.startsWith("Arrow") || event.key.length === 1) {
        byKey = true;
        if (button) button.hidden = false;
      }
    });
    select.addEventListener("pointerdown", () => { byKey = false; });
    select.addEventListener("change", () => { if (!byKey) select.form.requestSubmit(); });
  }
}

/** Polls the experiment's revision and shows a notice when it has changed; pauses while the page is hidden. */
function watchRevision(notice, template) {
  let polls = 0;
  let wait = POLL_MS;
  let timer;

  const schedule = () => {
    clearTimeout(timer);
    if (polls < MAX_POLLS && !document.hidden) timer = setTimeout(poll, wait);
  };

  async function poll() {
    polls += 1;
    try {
      const response = await fetch(notice.dataset.url, { headers: { Accept: "application/json" }, cache: "no-store" });
      if (response.status === 401 || response.status === 403 || response.status === 404) return;
      if (!response.ok) throw new Error(String(response.status));
      const { revision } = await response.json();
      wait = POLL_MS;
      if ((revision ?? "") !== notice.dataset.revision) {
        notice.replaceChildren(template.content.cloneNode(true));
        notice.hidden = false;
        return;
      }
    } catch {
      wait = Math.min(2 * wait, MAX_POLL_MS);
    }
    schedule();
  }

  document.addEventListener("visibilitychange", () => {
    if (notice.hidden && !document.hidden) timer = setTimeout(poll, 500);
    else clearTimeout(timer);
  });
  schedule();
}

/** Keeps the scroll position when sorting reloads the page. Without this script it opens at the table. */
function keepScrollPosition() {
  const key = "tipbench.place";
  try {
    const [path, y] = JSON.parse(sessionStorage.getItem(key) ?? "[]");
    sessionStorage.removeItem(key);
    if (path === location.pathname) scrollTo(0, y);
    for (const link of document.querySelectorAll("a.sort, .section-head a")) {
      link.hash = ""; // it would scroll to the table after this script
      link.addEventListener("click", () => sessionStorage.setItem(key, JSON.stringify([location.pathname, scrollY])));
    }
  } catch { /* no storage: the page opens at the table */ }
}

submitOnChange();
keepScrollPosition();
const notice = document.getElementById("fresh");
const template = document.getElementById("fresh-words");
if (notice && template) watchRevision(notice, template);
