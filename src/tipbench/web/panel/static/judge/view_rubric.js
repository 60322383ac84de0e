// The steps of the scale that is being scored, with one anchor from each end.
import { el, key, userText, visible } from "./elements.js";

/** Returns one anchor above and one below the middle of the scale: of the same scenario if possible, else of the same
 *  persona, else any. They change from item to item, so that a judge sees all of them. */
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
  #editor;
  #shown = "";

  constructor(parts, editor) {
    this.#parts = parts;
    this.#editor = editor;
  }

  refresh(item) {
    const { spot, rubric } = this.#editor;
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
      step.onclick = () => this.#editor.score(at.tip, at.scale, Number(step.dataset.score));
    }
    const words = chosen === null ? scale.about : scale.steps.find((step) => step.score === chosen)?.text ?? "";
    this.#parts.brief.replaceChildren(el("span", { class: "brief-words" },
      userText(chosen === null ? scale.name : `${scale.name} ${chosen}`, "strong"), ": ", userText(words)));
  }

  #build(scale, item) {
    const { rubric } = this.#editor;
    this.#parts.name.textContent = visible(scale.name);
    this.#parts.about.textContent = visible(scale.about);
    this.#parts.steps.replaceChildren(...scale.steps.map(({ score, text }) => el("li", {},
      el("button", { type: "button", class: "step", "data-score": score, "aria-pressed": "false" },
        el("span", { class: "step-score" }, String(score)), userText(text, "span", { class: "step-text" })))));
    const anchors = twoAnchors(rubric.anchors, scale, item.raw.scenario.id, item.raw.number);
    this.#parts.anchors.replaceChildren(...anchors.map((anchor) => anchorCard(anchor, rubric, scale.name)));
    this.#parts.box.scrollTop = 0;
  }
}

function anchorCard(anchor, rubric, current) {
  const scores = rubric.scales.map(({ name }) => {
    const text = `${name} ${anchor.scores[name]}`;
    return name === current ? userText(text, "strong") : userText(text, "span", { class: "muted" });
  });
  return el("li", { class: "anchor" },
    el("p", { class: "anchor-scores" }, ...scores.flatMap((each, at) => (at ? [" · ", each] : [each]))),
    userText(anchor.tip, "p", { class: "anchor-tip" }),
    userText(anchor.why, "p", { class: "anchor-why" }));
}

/** Lists all scales with their meaning, for duels. */
export function showScales(list, rubric) {
  list.replaceChildren(...rubric.scales.map((scale) => el("li", {}, userText(scale.name, "strong"), ": ", userText(scale.about))));
}

/** Returns a short list of the keys. */
export function shortKeys(kind) {
  const lines = kind === "sheet"
    ? [["1", "–", "5", "score"], ["←", "→", "scale"], ["↑", "↓", "tip"]]
    : [["a", "b", "which is better"], ["t", "alike"]];
  return lines.map((line) => el("span", {}, ...line.slice(0, -1).map((each) => (each === "–" ? "–" : key(each))), ` ${line.at(-1)}`));
}
