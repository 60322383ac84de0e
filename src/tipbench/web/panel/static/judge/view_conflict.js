// Two versions of one item, side by side, until the judge has chosen.
import { clockTime, el, said } from "./words.js";

export class ConflictView {
  #box;
  #desk;
  #outbox;

  constructor(box, desk, outbox) {
    this.#box = box;
    this.#desk = desk;
    this.#outbox = outbox;
  }

  refresh(item) {
    const entry = this.#outbox.status(item.raw.item) === "conflict" ? this.#outbox.entry(item.raw.item) : null;
    this.#box.hidden = entry === null;
    if (!entry) return this.#box.replaceChildren();
    const { paper } = this.#desk;
    const mine = paper.lines(item.content);
    const other = paper.lines(paper.read(item.raw, entry.other));
    const rows = mine.flatMap(([name, text], at) => (text === other[at][1] ? [] : [el("tr", {},
      el("th", { scope: "row" }, name), said(text, "td", { class: "text" }), said(other[at][1], "td", { class: "text" }))]));
    const head = ["What", "Yours, here", `The other, saved ${clockTime(entry.other.updated)}`];
    this.#box.replaceChildren(
      el("h2", { class: "conflict-title" }, el("span", { "aria-hidden": "true" }, "! "), "This item was changed elsewhere"),
      el("p", {}, "Another tab or device saved it since you saw it. Nothing was overwritten. Choose a version. Differences:"),
      el("div", { class: "table-box", role: "region", "aria-label": "Both versions", tabindex: 0 },
        el("table", {}, el("thead", {}, el("tr", {}, ...head.map((each) => el("th", { scope: "col" }, each)))), el("tbody", {}, ...rows))),
      el("p", { class: "actions" },
        el("button", { type: "button", class: "button primary", onclick: () => this.#desk.keepMine() }, "Keep mine"),
        el("button", { type: "button", class: "button", onclick: () => this.#desk.takeOther() }, "Take the other")));
  }
}
