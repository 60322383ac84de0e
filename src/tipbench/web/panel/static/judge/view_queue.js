// The queue: every item by its number and state, and nothing else that could tell one from another.
import { el } from "./words.js";

const STATES = {
  empty: ["", "not begun"], draft: ["◐", "draft"], submitted: ["✓", "done"], skipped: ["↷", "skipped"],
  conflict: ["!", "changed elsewhere"], refused: ["!", "not taken"],
};

export class QueueView {
  #buttons;
  #list;

  constructor(list, desk, outbox) {
    this.#list = list;
    this.#buttons = desk.items.map((item, at) =>
      el("button", { type: "button", class: "queue-item", onclick: () => desk.go(at) },
        el("span", { class: "queue-number" }, String(at + 1)), el("span", { class: "queue-mark", "aria-hidden": "true" })));
    list.replaceChildren(...this.#buttons.map((button) => el("li", {}, button)));
    this.refresh = () => {
      desk.items.forEach((item, at) => this.#paint(this.#buttons[at], item, at, at === desk.at, outbox.status(item.raw.item)));
    };
  }

  /** Keeps the present item in the middle of the strip, without moving the page. */
  center(at) {
    const button = this.#buttons[at];
    const list = this.#list;
    list.scrollLeft = button.offsetLeft - list.offsetLeft - (list.clientWidth - button.clientWidth) / 2;
    list.scrollTop = button.offsetTop - list.offsetTop - (list.clientHeight - button.clientHeight) / 2;
  }

  #paint(button, item, at, current, status) {
    const state = status === "conflict" || status === "refused" ? status : item.content.state;
    const [mark, words] = STATES[state];
    button.dataset.state = state;
    button.lastChild.textContent = mark;
    button.setAttribute("aria-label", `Item ${at + 1}, ${words}`);
    button.toggleAttribute("aria-current", current);
    if (current) button.setAttribute("aria-current", "true");
  }
}
