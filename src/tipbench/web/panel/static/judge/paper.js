// What can be said of an item: scores of tips, or the winner of a duel. Pure; contents are never changed in place.

const ended = (state) => state === "submitted" || state === "skipped";

/** Whether two contents say the same. They are always made by a paper, so their keys stand in one order. */
export function same(one, other) {
  return JSON.stringify(one) === JSON.stringify(other);
}

/** Scores on the rubric's scales, two flags that may be contested, a note for each tip. */
export class ScoringPaper {
  constructor(scales) {
    this.scales = scales;
    this.names = scales.map((scale) => scale.name);
  }

  blank(item) {
    const tips = item.tips.map((tip) => ({ scores: this.#scores({}), overlong: tip.overlong, note: "" }));
    return { state: "empty", format_ok: item.format_ok, tips, reason: "" };
  }

  /** A content out of what the server, or this browser's own keeping, has. */
  read(item, answer) {
    const tips = item.tips.map((tip, at) => {
      const given = answer.tips?.[at] ?? {};
      return { scores: this.#scores(given.scores ?? {}), overlong: given.overlong ?? tip.overlong, note: given.note ?? "" };
    });
    const { state = "empty", format_ok = item.format_ok, reason = "" } = answer;
    return { state, format_ok, tips, reason: state === "skipped" ? reason : "" };
  }

  /** The content with one thing changed: whatever was finished is a draft again, and nothing said is no draft. */
  changed(item, content, change) {
    const next = structuredClone(content);
    change(next);
    next.state = "draft";
    next.reason = "";
    return same({ ...next, state: "empty" }, this.blank(item)) ? this.blank(item) : next;
  }

  ended(content, state, reason = "") {
    return { ...structuredClone(content), state, reason };
  }

  /** Which scores are missing, in order. */
  missing(content) {
    return content.tips.flatMap((tip, at) =>
      this.names.flatMap((name, scale) => (tip.scores[name] === null ? [{ tip: at, scale }] : [])));
  }

  /** In words, for whoever compares two contents. */
  lines(content) {
    const scores = (tip) => this.names.map((name) => `${name} ${tip.scores[name] ?? "–"}`).join(", ");
    return [
      ["State", content.state === "skipped" ? `skipped: ${content.reason}` : content.state],
      ["Format as asked", content.format_ok ? "yes" : "no"],
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
export class DuelPaper {
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

  ended(content, state, reason = "") {
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

export { ended };
