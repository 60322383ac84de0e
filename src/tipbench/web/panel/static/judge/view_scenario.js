// The scenario of the current item: persona, time and tasks.
import { el, userText, visible } from "./elements.js";

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
      userText(persona.name, "strong"), ", ", userText(persona.role), " ",
      el("span", { class: "scenario-hour" }, "· ", el("strong", {}, visible(slot.time)), visible(` ${weekday}`)),
      // On a narrow screen the card is folded; the tasks, needed to score relevance, stay visible.
      el("span", { class: "scenario-brief not-wide" }, userText(persona.tasks.map((each) => each.title).join("; "))));
    this.#card.replaceChildren(
      el("p", { class: "scenario-about" }, el("strong", {}, visible(`${weekday}, ${dayOf(day, "long")}, ${slot.label}.`)), " ", userText(persona.about)),
      ...(persona.preferences.length
        ? [el("p", { class: "scenario-about" }, el("strong", {}, "Prefers: "), userText(persona.preferences.join("; ")), ".")] : []),
      el("div", { class: "scenario-lists" },
        ...[part("Tasks", persona.tasks.map((each) => task(each, day))),
          part("Habits", persona.habits.map((each) => userText(each, "li")))].filter(Boolean)));
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
  return el("li", {}, userText(title), " ", el("span", { class: `task-due ${overdue ? "task-late" : "muted"}` }, visible(`${when}, priority ${priority}`)));
}

function dayOf(text, month) {
  const date = new Date(`${text}T00:00:00`);
  return Number.isNaN(date.getTime()) ? text : date.toLocaleDateString(undefined, { day: "numeric", month });
}
