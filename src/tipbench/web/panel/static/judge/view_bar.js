// The bar: progress of the batch, save state of the current item, and its actions.
import { clockTime, counted, el, roughly } from "./elements.js";

const STUCK = {
  login: "Your session has ended. Your answers are kept in this browser: log in again to send them.",
  closed: "This batch was closed in another tab. Later answers are kept in this browser: reopen the batch to send them.",
};
const SAVED = { empty: "Not scored", draft: "Draft saved", submitted: "Submitted", skipped: "Skipped" };

export class BarView {
  #parts;
  #editor;
  #outbox;

  constructor(parts, editor, outbox) {
    this.#parts = parts;
    this.#editor = editor;
    this.#outbox = outbox;
  }

  refresh(item) {
    const { count, progress, left, state, submit, title } = this.#parts;
    const editor = this.#editor;
    const done = editor.count("submitted");
    const skipped = editor.count("skipped");
    progress.max = editor.items.length;
    progress.value = done + skipped;
    count.textContent = `${done} of ${editor.items.length} done${skipped ? `, ${skipped} skipped` : ""}`;
    left.textContent = this.#timeLeft(); // its space is reserved, so nothing moves when it appears
    title.textContent = `Item ${editor.at + 1} of ${editor.items.length}`;
    const shown = saveState(item, this.#outbox);
    state.dataset.state = shown.state;
    if (state.lastChild.textContent !== shown.words) state.lastChild.textContent = shown.words;
    state.firstChild.textContent = shown.mark;
    const ready = editor.answerFormat.missing(item.content).length === 0;
    submit.classList.toggle("primary", ready);
    submit.firstChild.textContent = item.content.state === "submitted" ? "Go on" : "Submit";
    this.#parts.hint.textContent = hint(editor, item, ready);
  }

  #timeLeft() {
    if (!this.#editor.open.length) return ", nothing left";
    const seconds = this.#editor.secondsLeft;
    return seconds === null ? "" : `, ${roughly(seconds)} left`;
  }
}

/** The save state of an item: a state for the style, a mark and a text. */
export function saveState(item, outbox) {
  const status = outbox.status(item.raw.item);
  switch (status) {
    case null: {
      const when = item.saved.updated ? ` ${clockTime(item.saved.updated)}` : "";
      return { state: item.saved.state, mark: { empty: "○", draft: "◐", submitted: "✓", skipped: "↷" }[item.saved.state], words: SAVED[item.saved.state] + when };
    }
    case "conflict":
      return { state: "conflict", mark: "!", words: "Conflict: changed elsewhere, choose a version" };
    case "refused":
      return { state: "refused", mark: "!", words: `Rejected: ${outbox.entry(item.raw.item).message}` };
    case "login":
      return { state: "away", mark: "!", words: "Session ended: saved in this browser" };
    case "closed":
      return { state: "away", mark: "!", words: "Batch closed elsewhere: saved in this browser" };
    case "away":
      return { state: "away", mark: "↻", words: outbox.hasStorage ? "Offline: saved in this browser" : "Offline: keep this page open" };
    default:
      return { state: "saving", mark: "◌", words: "Saving…" };
  }
}

function hint(editor, item, ready) {
  if (item.content.state === "skipped") return `Skipped: ${item.content.reason}`;
  if (item.content.state === "submitted") return item.raw.tips ? "A new score opens it again." : "Another choice replaces it.";
  if (ready) return editor.spot === null || !editor.rubric.scales ? "All scored: Ctrl+Enter submits it." : "All scored.";
  return "";
}

/** Shows or hides the page's banner: offline, logged out, batch closed. */
export function paintBanner(box, outbox, stuck) {
  const offline = `The panel is unreachable. You can continue: ${counted(outbox.size, "item is", "items are")} kept in this browser and sent later.`;
  const words = STUCK[stuck] ?? (outbox.away ? offline : null);
  box.hidden = words === null;
  if (!words || box.dataset.words === words) return;
  box.dataset.words = words;
  const reload = el("button", { type: "button", class: "button small", onclick: () => location.reload() }, "Reload the page");
  box.replaceChildren(el("span", { "aria-hidden": "true", class: "alert-mark" }, "!"), el("p", {}, words), ...(stuck ? [reload] : []));
}
