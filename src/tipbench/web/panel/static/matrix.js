// Scenario matrix: arrow keys move between scores; between scenarios, ← and → open the previous and the next one.
// The pages work without this script.

const table = document.querySelector(".matrix table");

/** Returns the score in the next row (`down` is 1 or -1), or the next score in the same row (`right` is 1 or -1). */
function neighbour(link, down, right) {
  const cell = link.closest("td, th");
  const row = cell.parentElement;
  const rows = [...table.tBodies[0].rows];
  if (down) return rows[rows.indexOf(row) + down]?.cells[cell.cellIndex].querySelector("a");
  const cells = [...row.cells];
  const others = right > 0 ? cells.slice(cell.cellIndex + 1) : cells.slice(0, cell.cellIndex).reverse();
  return others.map((each) => each.querySelector("a")).find((found) => found);
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
