// The wording of the scale that is being scored, and two anchors that show how far apart its ends are.
import { el, key, said, visible } from "./words.js";

/** One anchor from the upper and one from the lower end of the scale: of the same person if there are, else of others,
 *  another pair from item to item, so that in an hour all of them are seen. */
export function twoAnchors(anchors, { name, min, max }, scenario, number) {
  const middle = (min + max) / 2;
  const person = String(scenario).split("@")[0];
  const near = (anchor) => (anchor.scenario === scenario ? 0 : anchor.scenario.split("@")[0] === person ? 1 : 2);
  const pick = (fits) => {
    const fitting = anchors.filter((anchor) => fits(anchor.scores[name]));
    const nearest = Math.min(...fitting.map(near));
    const close = fitting.filter((anchor) => near(anchor) === nearest);
    return close.length ? close[number % close.length] : null;
  };
  return [pick((score) => score > middle), pick((score) => score < middle)].filter((anchor) => anchor !== null);
}

export class RubricView {
  #parts;
  #desk;
  #shown = "";

  constructor(parts, desk) {
    this.#parts = parts;
    this.#desk = desk;
  }

  refresh(item) {
    const { spot, rubric } = this.#desk;
    const at = spot ?? { tip: item.raw.tips.length - 1, scale: rubric.scales.length - 1 };
    const scale = rubric.scales[at.scale];
    const chosen = item.content.tips[at.tip].scores[scale.name];
    const shown = `${item.raw.item} ${at.scale}`;
    if (shown !== this.#shown) this.#build(scale, item);
    this.#shown = shown;
    this.#parts.tip.textContent = `tip ${at.tip + 1}`;
    for (const step of this.#parts.steps.querySelectorAll("button")) {
      const on = Number(step.dataset.score) === chosen;
      step.setAttribute("aria-pressed", String(on));
      step.onclick = () => this.#desk.score(at.tip, at.scale, Number(step.dataset.score));
    }
    const words = chosen === null ? scale.about : scale.steps.find((step) => step.score === chosen)?.text ?? "";
    this.#parts.brief.replaceChildren(el("span", { class: "brief-words" },
      said(chosen === null ? scale.name : `${scale.name} ${chosen}`, "strong"), ": ", said(words)));
  }

  #build(scale, item) {
    const { rubric } = this.#desk;
    this.#parts.name.textContent = visible(scale.name);
    this.#parts.about.textContent = visible(scale.about);
    this.#parts.steps.replaceChildren(...scale.steps.map(({ score, text }) => el("li", {},
      el("button", { type: "button", class: "step", "data-score": score, "aria-pressed": "false" },
        el("span", { class: "step-score" }, String(score)), said(text, "span", { class: "step-text" })))));
    const anchors = twoAnchors(rubric.anchors, scale, item.raw.scenario.id, item.raw.number);
    this.#parts.anchors.replaceChildren(...anchors.map((anchor) => anchorCard(anchor, rubric, scale.name)));
    this.#parts.box.scrollTop = 0;
  }
}

function anchorCard(anchor, rubric, current) {
  const scores = rubric.scales.map(({ name }) => {
    const text = `${name} ${anchor.scores[name]}`;
    return name === current ? said(text, "strong") : said(text, "span", { class: "muted" });
  });
  return el("li", { class: "anchor" },
    el("p", { class: "anchor-scores" }, ...scores.flatMap((each, at) => (at ? [" · ", each] : [each]))),
    said(anchor.tip, "p", { class: "anchor-tip" }),
    said(anchor.why, "p", { class: "anchor-why" }));
}

/** For duels: what the scales are about, all of them. */
export function showScales(list, rubric) {
  list.replaceChildren(...rubric.scales.map((scale) => el("li", {}, said(scale.name, "strong"), ": ", said(scale.about))));
}

/** The keys in short. */
export function shortKeys(kind) {
  const lines = kind === "sheet"
    ? [["1", "–", "5", "score"], ["←", "→", "scale"], ["↑", "↓", "tip"]]
    : [["a", "b", "which is better"], ["t", "alike"]];
  return lines.map((line) => el("span", {}, ...line.slice(0, -1).map((each) => (each === "–" ? "–" : key(each))), ` ${line.at(-1)}`));
}
