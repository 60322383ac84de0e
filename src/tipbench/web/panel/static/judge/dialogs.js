// Dialogs: skip with a reason, finish the batch, list of keys, rubric.
import { counted, el, key, visible } from "./elements.js";
import { TABLES } from "./keys.js";

const byId = (id) => document.getElementById(id);
const SHOWN = { ArrowLeft: "←", ArrowRight: "→", ArrowUp: "↑", ArrowDown: "↓", PageDown: "Page ↓", PageUp: "Page ↑" };

/** Whether a dialog is open. */
export function anyOpen() {
  return document.querySelector("dialog[open]") !== null;
}

/** Fills the dialogs; each is closed by its button, by Escape, or by a click outside it. */
export function install(kind, editor) {
  for (const dialog of document.querySelectorAll("dialog")) {
    dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
    for (const button of dialog.querySelectorAll("[data-close]")) button.addEventListener("click", () => dialog.close());
  }
  byId("key-list").replaceChildren(...TABLES[kind].map(([keys, words]) => el("div", {},
    el("dt", {}, ...keys.flatMap((name, at) => (at ? [" ", key(SHOWN[name] ?? name)] : [key(SHOWN[name] ?? name)])),
      el("span", { class: "unseen" }, keys.join(", "))),
    el("dd", {}, words))));
  byId("rubric-text").textContent = visible(editor.rubric.text);
  installSkip(editor);
}

function installSkip(editor) {
  const [dialog, form, reason] = [byId("skip-dialog"), byId("skip-form"), byId("skip-reason")];
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!reason.value.trim()) return;
    dialog.close();
    editor.skip(reason.value);
  });
  for (const button of dialog.querySelectorAll("[data-reason]")) {
    button.addEventListener("click", () => {
      reason.value = button.textContent.trim();
      reason.focus();
    });
  }
}

export function askSkip(item) {
  byId("skip-reason").value = item.content.reason;
  byId("skip-dialog").showModal();
  byId("skip-reason").focus();
}

export function showKeys() {
  byId("keys-dialog").showModal();
}

export function showRubric() {
  byId("rubric-dialog").showModal();
}

/** Shows what finishing would do; `drafts` are complete but not submitted. */
export function askFinish(editor, drafts) {
  const [done, skipped] = [editor.count("submitted"), editor.count("skipped")];
  const open = editor.items.length - done - skipped;
  byId("finish-title").textContent = open ? "Finish with open items?" : "All items done";
  const lines = [`${counted(done, "item")} submitted${skipped ? `, ${skipped} skipped` : ""}.`];
  if (drafts.length) lines.push(`${counted(drafts.length, "draft is", "drafts are")} complete and not submitted: ${numbers(editor, drafts)}.`);
  if (open) lines.push(`${counted(open, "item is", "items are")} open and return to the queue.`);
  byId("finish-words").replaceChildren(...lines.map((line) => el("p", {}, line)));
  byId("finish-problem").hidden = true;
  byId("finish-drafts").hidden = drafts.length === 0;
  byId("finish-now").disabled = false;
  if (!byId("finish-dialog").open) byId("finish-dialog").showModal();
  byId(drafts.length ? "finish-drafts" : "finish-now").focus();
}

function numbers(editor, items) {
  const all = items.map((item) => editor.items.indexOf(item) + 1);
  return all.length > 8 ? `${all.slice(0, 8).join(", ")}, …` : all.join(", ");
}

export function showFinishProblem(words) {
  byId("finish-problem").textContent = words;
  byId("finish-problem").hidden = false;
  byId("finish-now").disabled = false;
}

export function showFinishing(words) {
  byId("finish-problem").hidden = true;
  byId("finish-now").disabled = true;
  byId("finish-words").replaceChildren(el("p", {}, words));
}
