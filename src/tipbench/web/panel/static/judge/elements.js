// DOM elements and texts. Text of any origin goes through `visible` and into the page as text, never as markup.

const NOT_TEXT = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\ud800-\udfff\ufffe\uffff]/gu;
// Invisible and direction characters; the same set as in tipbench.markup.
const UNSEEN = /[\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2064\u2066-\u206f\ufeff\u{e0000}-\u{e007f}]/gu;

/** Replaces invisible and direction characters by their code points. */
export function visible(text) {
  const named = (found) => `⟨U+${found.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`;
  return String(text).replace(UNSEEN, named).replace(/\r\n?/g, "\n").replace(NOT_TEXT, "\ufffd");
}

/** An element: `el("p", {class: "muted", onclick: f}, "text", other)`. Attributes that are null or false are omitted. */
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** Text of a model or a person, isolated from the direction of the surrounding text. */
export function userText(text, tag = "bdi", attributes = {}) {
  return el(tag, attributes, visible(text));
}

/** A key as it is printed on the keyboard; hidden from screen readers, which read `aria-keyshortcuts`. */
export function key(name) {
  return el("kbd", { "aria-hidden": "true" }, name);
}

/** "1 item", "2 items". */
export function counted(n, noun, many = `${noun}s`) {
  return `${n} ${n === 1 ? noun : many}`;
}

/** Formats a time in the browser's zone; with the date if it is not today. */
export function clockTime(moment) {
  const time = new Date(moment);
  if (Number.isNaN(time.getTime())) return "";
  const today = time.toDateString() === new Date().toDateString();
  const day = today ? {} : { day: "numeric", month: "short", year: "numeric" };
  const parts = { ...day, hour: "2-digit", minute: "2-digit", timeZoneName: "short" };
  return new Intl.DateTimeFormat(undefined, parts).format(time);
}

/** A rough duration in minutes or hours. */
export function roughly(seconds) {
  const minutes = Math.round(seconds / 60);
  if (minutes < 1) return "under a minute";
  if (minutes < 90) return `about ${minutes} min`;
  const halves = Math.round(minutes / 30);
  return `about ${Math.floor(halves / 2)}${halves % 2 ? "½" : ""} h`;
}

/** Whether only the panes scroll and the page itself does not, as in judge.css. */
export const PANES_SCROLL = matchMedia("(min-width: 1000px) and (min-height: 560px)");

/** Shows the beginning of a new item; where the page itself scrolls, below the site's header. */
export function toTop(inside) {
  inside.scrollTop = 0;
  if (!PANES_SCROLL.matches) scrollTo(0, inside.closest(".desk").offsetTop);
}
