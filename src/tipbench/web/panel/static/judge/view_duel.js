// Two answers side by side; one key chooses the better one.
import { el, key, userText, toTop } from "./elements.js";

const CHOICES = [["a", "A is better", "a"], ["tie", "Both alike", "t"], ["b", "B is better", "b"]];

export class DuelView {
  #root;
  #choices;
  #sides;

  constructor(root, editor) {
    this.#root = root;
    this.#sides = { a: el("div", { class: "side-tips" }), b: el("div", { class: "side-tips" }) };
    this.#choices = CHOICES.map(([winner, words, shortcut]) => el("button", {
      type: "button", role: "radio", class: "choice-button", "aria-checked": "false", "aria-keyshortcuts": shortcut,
      "data-winner": winner, onclick: () => editor.choose(winner),
    }, words, " ", key(shortcut)));
    const side = (name) => el("section", { class: "side", "aria-label": `Answer ${name.toUpperCase()}`, "data-side": name },
      el("h2", { class: "side-name" }, name.toUpperCase()), this.#sides[name]);
    root.replaceChildren(
      el("div", { class: "sides", role: "group", "aria-label": "Both answers", tabindex: "0" }, side("a"), side("b")),
      el("div", { class: "choices-bar", role: "radiogroup", "aria-label": "Which answer is better?" }, ...this.#choices));
  }

  show(item) {
    for (const name of ["a", "b"]) this.#sides[name].replaceChildren(...item.raw[name].map(tipOf));
    toTop(this.#root.firstElementChild);
    this.refresh(item);
  }

  refresh({ content: { winner } }) {
    for (const button of this.#choices) {
      button.setAttribute("aria-checked", String(button.dataset.winner === winner));
      button.tabIndex = button.dataset.winner === (winner ?? "a") ? 0 : -1;
    }
    for (const side of this.#root.querySelectorAll(".side")) side.classList.toggle("is-chosen", side.dataset.side === winner);
  }

  focus() {
    this.#choices.find((button) => button.tabIndex === 0)?.focus({ preventScroll: true });
  }
}

function tipOf(tip) {
  return el("div", { class: "side-tip" }, userText(tip.tip, "p", { class: "tip-text" }),
    tip.rationale ? userText(tip.rationale, "p", { class: "tip-why" }) : null);
}
