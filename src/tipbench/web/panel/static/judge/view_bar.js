// The bar: how far the batch is, how the present item is kept, and what can be done with it.
import { clockTime, counted, el, roughly } from "./words.js";

const SAVED = { empty: "Not scored", draft: "Draft saved", submitted: "Submitted", skipped: "Skipped" };

export class BarView {
  #parts;
  #desk;
  #outbox;

  constructor(parts, desk, outbox) {
    this.#parts = parts;
    this.#desk = desk;
    this.#outbox = outbox;
  }

  refresh(item) {
    const { count, progress, left, state, submit, title } = this.#parts;
    const desk = this.#desk;
    const done = desk.count("submitted");
    const skipped = desk.count("skipped");
    progress.max = desk.items.length;
    progress.value = done + skipped;
    count.textContent = `${done} of ${desk.items.length} done${skipped ? `, ${skipped} skipped` : ""}`;
    left.textContent = this.#timeLeft(); // its place is kept: nothing moves when it comes
    title.textContent = `Item ${desk.at + 1} of ${desk.items.length}`;
    const told = saveState(item, this.#outbox);
    state.dataset.state = told.state;
    if (state.lastChild.textContent !== told.words) state.lastChild.textContent = told.words;
    state.firstChild.textContent = told.mark;
    const ready = desk.paper.missing(item.content).length === 0;
    submit.classList.toggle("primary", ready);
    submit.firstChild.textContent = item.content.state === "submitted" ? "Go on" : "Submit";
    this.#parts.hint.textContent = hint(desk, item, ready);
  }

  #timeLeft() {
    if (!this.#desk.open.length) return ", nothing left";
    const seconds = this.#desk.secondsLeft;
    return seconds === null ? "" : `, ${roughly(seconds)} left`;
  }
}

/** How an item is kept: in one word for the style, in a mark, in words. */
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
      return { state: "away", mark: "↻", words: outbox.keeps ? "Offline: saved in this browser" : "Offline: keep this page open" };
    default:
      return { state: "saving", mark: "◌", words: "Saving…" };
  }
}

function hint(desk, item, ready) {
  if (item.content.state === "skipped") return `Skipped: ${item.content.reason}`;
  if (item.content.state === "submitted") return item.raw.tips ? "A new score opens it again." : "Another choice replaces it.";
  if (ready) return desk.spot === null || !desk.rubric.scales ? "All scored: Ctrl+Enter submits it." : "All scored.";
  return "";
}

/** What concerns the whole page: offline, logged out. */
export function paintBanner(box, outbox, stuck) {
  const words = stuck === "login"
    ? ["Your session has ended. Your answers are kept in this browser: log in again to send them.", true]
    : stuck === "closed"
      ? ["This batch was closed in another tab. Later answers are kept in this browser: reopen the batch to send them.", true]
      : outbox.away
        ? [`The panel is unreachable. You can continue: ${counted(outbox.size, "item is", "items are")} kept in this browser and sent later.`, false]
        : null;
  box.hidden = words === null;
  if (!words || box.dataset.words === words[0]) return;
  box.dataset.words = words[0];
  const again = el("button", { type: "button", class: "button small", onclick: () => location.reload() }, "Reload the page");
  box.replaceChildren(el("span", { "aria-hidden": "true", class: "alert-mark" }, "!"), el("p", {}, words[0]), ...(words[1] ? [again] : []));
}
