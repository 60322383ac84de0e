// The tips of the current item, each with its scales, flag and note.
import { PANES_SCROLL, el, key, userText, toTop, visible } from "./elements.js";

export class TipsView {
  #root;
  #editor;
  #tips = [];
  #format;

  constructor(root, editor) {
    this.#root = root;
    this.#editor = editor;
  }

  show(item) {
    this.#format = this.#flag("f", "format", () => this.#editor.contestFormat());
    this.#tips = item.raw.tips.map((tip, at) => this.#tip(tip, at));
    this.#root.replaceChildren(
      el("div", { class: "item-flag" }, this.#format.box), ...this.#tips.map((tip) => tip.card));
    toTop(this.#root);
    this.refresh(item);
  }

  refresh(item) {
    const { spot, rubric } = this.#editor;
    const { content, raw } = item;
    paintFlag(this.#format, content.format_ok ? "The answer has the requested format" : "The answer does not have the requested format",
      content.format_ok === raw.format_ok, content.format_ok);
    this.#tips.forEach((tip, at) => {
      const given = content.tips[at];
      const limit = rubric.word_limit;
      tip.card.classList.toggle("is-current", spot?.tip === at);
      paintFlag(tip.flag, given.overlong ? `Longer than ${limit} words` : `Within ${limit} words`,
        given.overlong === raw.tips[at].overlong, !given.overlong);
      if (document.activeElement !== tip.note) tip.note.value = given.note;
      tip.noteBox.hidden = !given.note && document.activeElement !== tip.note;
      tip.noteButton.setAttribute("aria-expanded", String(!tip.noteBox.hidden));
      tip.groups.forEach((group, scale) =>
        paintGroup(group, given.scores[rubric.scales[scale].name], spot?.tip === at && spot.scale === scale));
    });
  }

  /** Focuses the current scale and scrolls it into view. */
  focus() {
    const { spot } = this.#editor;
    if (!spot) return;
    const { groups, card } = this.#tips[spot.tip];
    const { box } = groups[spot.scale];
    box.focus({ preventScroll: true }); // the group, not one of its scores: nothing is chosen yet
    (PANES_SCROLL.matches && card.offsetHeight < this.#root.clientHeight ? card : box).scrollIntoView({ block: "nearest" });
  }

  openNote(at) {
    const { noteBox, note } = this.#tips[at];
    noteBox.hidden = false;
    note.focus();
    note.setSelectionRange(note.value.length, note.value.length);
  }

  #tip(tip, at) {
    const flag = this.#flag("o", "length", () => this.#editor.contestLength(at));
    const groups = this.#editor.rubric.scales.map((scale, number) => this.#group(scale, number, at));
    const note = el("textarea", { class: "note-text", rows: 2, maxlength: 4000, "aria-label": `Note on tip ${at + 1}` });
    const noteBox = el("div", { class: "note-box", hidden: true }, note);
    const noteButton = el("button", {
      type: "button", class: "button small quiet", "aria-keyshortcuts": "n", onclick: () => this.openNote(at),
    }, "Note ", key("n"));
    let fresh = true;
    note.addEventListener("focus", () => { fresh = true; this.#editor.spot = { tip: at, scale: this.#editor.spot?.scale ?? 0 }; });
    note.addEventListener("input", () => { this.#editor.note(at, note.value, fresh); fresh = false; });
    note.addEventListener("blur", () => this.refresh(this.#editor.item));
    const card = el("section", { class: "tip", "aria-label": `Tip ${at + 1}` },
      el("div", { class: "tip-head" }, el("h2", { class: "small-head" }, `Tip ${at + 1}`), flag.box, noteButton),
      userText(tip.tip, "p", { class: "tip-text" }),
      tip.rationale ? el("p", { class: "tip-why" }, el("span", { class: "tip-why-label" }, "Rationale, not scored: "), userText(tip.rationale)) : null,
      el("div", { class: "groups" }, ...groups.map((group) => group.box)),
      noteBox);
    return { card, flag, groups, note, noteBox, noteButton };
  }

  #group(scale, number, at) {
    const label = `tip-${at}-${number}`;
    const radios = scale.steps.map(({ score, text }) => el("button", {
      type: "button", role: "radio", class: "score", "aria-checked": "false", "data-score": score,
      "aria-label": visible(`${score}: ${text}`), title: visible(text),
      onclick: () => this.#editor.score(at, number, score),
    }, String(score)));
    for (const radio of radios) {
      radio.addEventListener("focus", () => {
        const { spot } = this.#editor;
        if (spot?.tip !== at || spot.scale !== number) this.#editor.select(at, number);
      });
    }
    const box = el("div", { class: "group", role: "radiogroup", tabindex: -1, "aria-labelledby": label },
      el("span", { class: "group-name", id: label }, el("span", { class: "unseen" }, `Tip ${at + 1}, `), userText(scale.name)),
      el("div", { class: "group-scores" }, ...radios));
    return { box, radios };
  }

  #flag(shortcut, name, contest) {
    const words = el("span", { class: "flag-words" });
    const mark = el("span", { "aria-hidden": "true", class: "flag-mark" });
    const button = el("button", {
      type: "button", class: "button small quiet flag-button", "aria-keyshortcuts": shortcut, "data-flag": name,
      onclick: contest,
    }, el("span"), " ", key(shortcut));
    return { box: el("div", { class: "flag" }, mark, words, button), words, mark, button };
  }
}

function paintFlag({ box, words, mark, button }, text, computed, good) {
  mark.textContent = good ? "✓" : "△";
  words.textContent = computed ? text : `${text}: you disagree`;
  button.firstChild.textContent = computed ? "Disagree" : "Undo";
  button.setAttribute("aria-pressed", String(!computed));
  box.classList.toggle("is-contested", !computed);
  box.classList.toggle("is-bad", !good);
}

function paintGroup({ box, radios }, chosen, current) {
  box.classList.toggle("is-current", current);
  box.classList.toggle("is-scored", chosen !== null);
  const stop = radios.find((radio) => Number(radio.dataset.score) === chosen) ?? radios[0];
  for (const radio of radios) {
    radio.setAttribute("aria-checked", String(Number(radio.dataset.score) === chosen));
    radio.tabIndex = radio === stop ? 0 : -1;
  }
}
