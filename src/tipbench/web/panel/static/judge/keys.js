// The keyboard: one table per kind of batch, also shown in the help.

/** Keys of both kinds: [keys, what they do, the command]. */
const COMMON = [
  [["Ctrl+Enter"], "Submit and go to the next open item", "submit"],
  [["j", "PageDown"], "Next item", "next"],
  [["k", "PageUp"], "Previous item", "before"],
  [["u"], "Undo the last step", "undo"],
  [["s"], "Skip, with a reason", "skip"],
  [["?"], "Show these keys", "help"],
];

export const TABLES = {
  sheet: [
    [["1", "2", "3", "4", "5"], "Score the framed scale and move on", "score"],
    [["ArrowLeft"], "Previous scale", "left"],
    [["ArrowRight"], "Next scale", "right"],
    [["ArrowUp"], "Previous tip", "up"],
    [["ArrowDown"], "Next tip", "down"],
    [["f"], "Disagree with the format flag", "format"],
    [["o"], "Disagree with the length flag", "overlong"],
    [["n"], "Write a note; Escape ends it", "note"],
    ...COMMON,
  ],
  duel: [
    [["a", "ArrowLeft"], "A is better, and on to the next", "a"],
    [["b", "ArrowRight"], "B is better, and on to the next", "b"],
    [["t", "ArrowDown"], "Both alike, and on to the next", "tie"],
    ...COMMON,
  ],
};

/** Calls `act[command](key)` for each key press, except while `resting()` is true, as when a dialog is open. */
export function listen(kind, act, resting) {
  const commands = new Map(TABLES[kind].flatMap(([keys, , command]) => keys.map((name) => [name, command])));
  if (kind === "sheet") for (const digit of "06789") commands.set(digit, "score"); // a rubric may have longer scales
  document.addEventListener("keydown", (event) => {
    if (event.defaultPrevented || event.isComposing || resting()) return;
    const command = commands.get(nameOf(event));
    if (isTyping(event.target)) {
      if (event.key === "Escape") act.leave();
      if (command !== "submit") return;
    }
    if (!command || (event.repeat && !["next", "before"].includes(command))) return;
    event.preventDefault();
    act[command](event.key);
  });
}

function nameOf(event) {
  if (event.altKey) return null;
  if (event.ctrlKey || event.metaKey) return event.key === "Enter" ? "Ctrl+Enter" : null;
  return event.key.length === 1 ? event.key.toLowerCase() : event.key;
}

function isTyping(target) {
  return target.matches?.("input:not([type=radio]):not([type=checkbox]), textarea, select, [contenteditable]") ?? false;
}
