// Leaderboard: select fields submit on change, and new results are announced. The page works without this script.

const EVERY_MS = 15_000;
const LONGEST_MS = 120_000; // between two polls of a server that does not respond
const MOST = 480; // polls per page; after that it has to be reloaded

function submitOnChoice() {
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

/** Asks now and then whether the experiment's revision is another one; never while nobody looks. */
function watch(place, words) {
  let asked = 0;
  let wait = EVERY_MS;
  let timer;

  const later = () => {
    clearTimeout(timer);
    if (asked < MOST && !document.hidden) timer = setTimeout(ask, wait);
  };

  async function ask() {
    asked += 1;
    try {
      const response = await fetch(place.dataset.url, { headers: { Accept: "application/json" }, cache: "no-store" });
      if (response.status === 401 || response.status === 403 || response.status === 404) return;
      if (!response.ok) throw new Error(String(response.status));
      const { revision } = await response.json();
      wait = EVERY_MS;
      if ((revision ?? "") !== place.dataset.revision) {
        place.replaceChildren(words.content.cloneNode(true));
        place.hidden = false;
        return;
      }
    } catch {
      wait = Math.min(2 * wait, LONGEST_MS);
    }
    later();
  }

  document.addEventListener("visibilitychange", () => {
    if (place.hidden && !document.hidden) timer = setTimeout(ask, 500);
    else clearTimeout(timer);
  });
  later();
}

submitOnChoice();
const place = document.getElementById("fresh");
const words = document.getElementById("fresh-words");
if (place && words) watch(place, words);
