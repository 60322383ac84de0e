// The queue: every item by its number and state, and nothing that could reveal its kind.
import { el } from "./elements.js";

const STATES = {
  empty: ["", "not begun"], draft: ["◐", "draft"], submitted: ["✓", "done"], skipped: ["↷", "skipped"],
  conflict: ["!", "changed elsewhere"], refused: ["!", "rejected"],
};

export class QueueView {
  #list;
  #editor;
  #outbox;
  #buttons;

  constructor(list, editor, outbox) {
    this.#list = list;
    this.#editor = editor;
    this.#outbox = outbox;
    this.#buttons = editor.items.map((item, at) =>
      el("button", { type: "button", class: "queue-item", onclick: () => editor.go(at) },
        el("span", { class: "queue-number" }, String(at + 1)), el("span", { class: "queue-mark", "aria-hidden": "true" })));
    list.replaceChildren(...this.#buttons.map((button) => el("li", {}, button)));
  }

  refresh() {
    this.#editor.items.forEach((item, at) => {
      const button = this.#buttons[at];
      const status = this.#outbox.status(item.raw.item);
      const state = status === "conflict" || status === "refused" ? status : item.content.state;
      const [mark, words] = STATES[state];
      button.dataset.state = state;
      button.lastChild.textContent = mark;
      button.setAttribute("aria-label", `Item ${at + 1}, ${words}`);
      if (at === this.#editor.at) button.setAttribute("aria-current", "true");
      else button.removeAttribute("aria-current");
    });
  }

  /** Scrolls the strip so that the current item is in the middle, without scrolling the page. */
  center(at) {
    const button = this.#buttons[at];
    const list = this.#list;
    list.scrollLeft = button.offsetLeft - list.offsetLeft - (list.clientWidth - button.clientWidth) / 2;
    list.scrollTop = button.offsetTop - list.offsetTop - (list.clientHeight - button.clientHeight) / 2;
  }
}
