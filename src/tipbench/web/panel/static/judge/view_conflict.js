// Two versions of one item, side by side, until the judge has chosen one.
import { clockTime, el, userText } from "./elements.js";

export class ConflictView {
  #box;
  #editor;
  #outbox;

  constructor(box, editor, outbox) {
    this.#box = box;
    this.#editor = editor;
    this.#outbox = outbox;
  }

  refresh(item) {
    const entry = this.#outbox.status(item.raw.item) === "conflict" ? this.#outbox.entry(item.raw.item) : null;
    this.#box.hidden = entry === null;
    if (!entry) return this.#box.replaceChildren();
    const { answerFormat } = this.#editor;
    const mine = answerFormat.lines(item.content);
    const other = answerFormat.lines(answerFormat.read(item.raw, entry.other));
    const rows = mine.flatMap(([name, text], at) => (text === other[at][1] ? [] : [el("tr", {},
      el("th", { scope: "row" }, name), userText(text, "td", { class: "text" }), userText(other[at][1], "td", { class: "text" }))]));
    const head = ["What", "Yours, here", `The other, saved ${clockTime(entry.other.updated)}`];
    this.#box.replaceChildren(
      el("h2", { class: "conflict-title" }, el("span", { "aria-hidden": "true" }, "! "), "This item was changed elsewhere"),
      el("p", {}, "Another tab or device saved it since you saw it. Nothing was overwritten. Choose a version. Differences:"),
      el("div", { class: "table-box", role: "region", "aria-label": "Both versions", tabindex: 0 },
        el("table", {}, el("thead", {}, el("tr", {}, ...head.map((each) => el("th", { scope: "col" }, each)))), el("tbody", {}, ...rows))),
      el("p", { class: "actions" },
        el("button", { type: "button", class: "button primary", onclick: () => this.#editor.keepMine() }, "Keep mine"),
        el("button", { type: "button", class: "button", onclick: () => this.#editor.takeOther() }, "Take the other")));
  }
}
