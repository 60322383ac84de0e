// Scenario matrix: arrow keys move between scores; between scenarios, ← and → open the previous and the next one.
// The pages work without this script.

const table = document.querySelector(".matrix table");

/** Returns the score `down` rows and `right` columns away, or undefined. */
function neighbour(link, down, right) {
  const cell = link.closest("td, th");
  const rows = [...table.tBodies[0].rows];
  const row = rows[rows.indexOf(cell.parentElement) + down];
  for (let at = cell.cellIndex + right; row && at >= 0 && at < row.cells.length; at += right || 1) {
    const found = row.cells[at].querySelector("a");
    if (found || !right) return found ?? undefined;
  }
  return undefined;
}

if (table) {
  const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  const links = [...table.tBodies[0].querySelectorAll("a")];
  for (const link of links.slice(1)) link.tabIndex = -1; // one stop for the tab key; arrows reach the others
  table.addEventListener("keydown", (event) => {
    const move = moves[event.key];
    const here = event.target.closest("tbody a");
    if (!move || !here || event.ctrlKey || event.metaKey || event.altKey) return;
    const there = neighbour(here, ...move);
    if (!there) return;
    event.preventDefault();
    here.tabIndex = -1;
    there.tabIndex = 0;
    there.focus();
  });
} else {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.shiftKey || event.target !== document.body) return;
    const wanted = { ArrowLeft: "prev", ArrowRight: "next" }[event.key];
    if (wanted) document.querySelector(`main a[rel="${wanted}"]`)?.click();
  });
}
