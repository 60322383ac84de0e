// The content of an answer: scores of tips, or the winner of a duel. Pure; contents are never changed in place.

/** Whether the judge is done with an item in this state. */
export function isDone(state) {
  return state === "submitted" || state === "skipped";
}

/** Whether two contents are equal; contents of one format have their keys in the same order. */
export function same(one, other) {
  return JSON.stringify(one) === JSON.stringify(other);
}

/** Scores on the rubric's scales, two flags that may be contested, a note for each tip. */
export class ScoringFormat {
  constructor(scales) {
    this.scales = scales;
    this.names = scales.map((scale) => scale.name);
  }

  blank(item) {
    const tips = item.tips.map((tip) => ({ scores: this.#scores({}), overlong: tip.overlong, note: "" }));
    return { state: "empty", format_ok: item.format_ok, tips, reason: "" };
  }

  /** Builds a content from the answer of the server or of this browser's storage. */
  read(item, answer) {
    const tips = item.tips.map((tip, at) => {
      const given = answer.tips?.[at] ?? {};
      return { scores: this.#scores(given.scores ?? {}), overlong: given.overlong ?? tip.overlong, note: given.note ?? "" };
    });
    const { state = "empty", format_ok = item.format_ok, reason = "" } = answer;
    return { state, format_ok, tips, reason: state === "skipped" ? reason : "" };
  }

  /** Returns a changed content: it is a draft, or blank if nothing is scored. */
  changed(item, content, change) {
    const next = structuredClone(content);
    change(next);
    next.state = "draft";
    next.reason = "";
    return same({ ...next, state: "empty" }, this.blank(item)) ? this.blank(item) : next;
  }

  withState(content, state, reason = "") {
    return { ...structuredClone(content), state, reason };
  }

  /** Returns the missing scores, in order. */
  missing(content) {
    return content.tips.flatMap((tip, at) =>
      this.names.flatMap((name, scale) => (tip.scores[name] === null ? [{ tip: at, scale }] : [])));
  }

  /** Lines of text for comparing two contents. */
  lines(content) {
    const scores = (tip) => this.names.map((name) => `${name} ${tip.scores[name] ?? "–"}`).join(", ");
    return [
      ["State", content.state === "skipped" ? `skipped: ${content.reason}` : content.state],
      ["Requested format", content.format_ok ? "yes" : "no"],
      ...content.tips.map((tip, at) => [
        `Tip ${at + 1}`,
        `${scores(tip)}${tip.overlong ? ", too long" : ""}${tip.note ? `\nNote: ${tip.note}` : ""}`,
      ]),
    ];
  }

  #scores(given) {
    return Object.fromEntries(this.names.map((name) => [name, given[name] ?? null]));
  }
}

/** Which of two answers is better. */
export class DuelFormat {
  blank() {
    return { state: "empty", winner: null, reason: "" };
  }

  read(_item, { state = "empty", winner = null, reason = "" }) {
    return { state, winner, reason: state === "skipped" ? reason : "" };
  }

  changed(item, content, change) {
    const next = { ...content };
    change(next);
    return next.winner === null ? this.blank() : { ...next, state: "draft", reason: "" };
  }

  withState(content, state, reason = "") {
    return { ...content, state, reason };
  }

  missing(content) {
    return content.winner === null ? [{ tip: 0, scale: 0 }] : [];
  }

  lines(content) {
    const better = { a: "A is better", b: "B is better", tie: "a tie" }[content.winner] ?? "–";
    return [["State", content.state === "skipped" ? `skipped: ${content.reason}` : content.state], ["Winner", better]];
  }
}
