// Who the tips are for, and at which hour.
import { el, said, visible } from "./words.js";

const WIDE = matchMedia("(min-width: 700px)");

export class ScenarioView {
  #box;
  #summary;
  #card;

  constructor(box) {
    this.#box = box;
    this.#summary = box.querySelector("summary");
    this.#card = box.querySelector(".scenario-card");
    const fit = () => (box.open = WIDE.matches);
    WIDE.addEventListener("change", fit);
    fit();
  }

  show({ weekday, day, slot, persona }) {
    this.#summary.replaceChildren(
      said(persona.name, "strong"), ", ", said(persona.role), " ",
      el("span", { class: "scenario-hour" }, "· ", el("strong", {}, visible(slot.time)), visible(` ${weekday}`)));
    this.#card.replaceChildren(
      el("p", { class: "scenario-about" }, el("strong", {}, visible(`${weekday}, ${dayOf(day, "long")}, ${slot.label}.`)), " ", said(persona.about)),
      ...(persona.preferences.length
        ? [el("p", { class: "scenario-about" }, el("strong", {}, "Prefers: "), said(persona.preferences.join("; ")), ".")] : []),
      el("div", { class: "scenario-lists" },
        ...[part("Tasks", persona.tasks.map((each) => task(each, day))),
          part("Habits", persona.habits.map((each) => said(each, "li")))].filter(Boolean)));
    this.#card.scrollTop = 0;
    if (!WIDE.matches) this.#box.open = false;
  }
}

function part(title, entries) {
  if (!entries.length) return null;
  return el("div", {}, el("h2", { class: "small-head" }, title), el("ul", {}, ...entries));
}

function task({ title, priority, due, overdue }, day) {
  const when = overdue ? "overdue" : due === day ? "due today" : due ? `due ${dayOf(due, "short")}` : "no date";
  return el("li", {}, said(title), " ", el("span", { class: `task-due ${overdue ? "task-late" : "muted"}` }, visible(`${when}, prio ${priority}`)));
}

function dayOf(text, month) {
  const date = new Date(`${text}T00:00:00`);
  return Number.isNaN(date.getTime()) ? text : date.toLocaleDateString(undefined, { day: "numeric", month });
}
