// The start form: models that Ollama lists late, dependent fields, and a note when the plan no longer matches the
// form.

const form = document.getElementById("run-form");

/** Ollama was too slow for the page: ask again, and add what it has. What is typed already moves to its box. */
async function addLateModels() {
  const server = form.elements.ollama_url?.value ?? "";
  const response = await fetch(`${form.dataset.modelsUrl}?ollama_url=${encodeURIComponent(server)}`);
  if (!response.ok || response.redirected) return;
  const ticks = document.getElementById("models-ticks");
  const known = new Set([...ticks.querySelectorAll("input")].map((input) => input.value));
  const others = document.getElementById("models-others");
  let typed = others.value.split(",").map((name) => name.trim()).filter(Boolean);
  for (const { name, note } of (await response.json()).items) {
    if (known.has(name)) continue;
    ticks.append(tick(name, note, typed.includes(name)));
    typed = typed.filter((each) => each !== name);
  }
  others.value = typed.join(", ");
}

function tick(name, note, chosen) {
  const label = document.createElement("label");
  label.className = "tick";
  const input = Object.assign(document.createElement("input"), { type: "checkbox", name: "models", value: name });
  input.defaultChecked = chosen;
  const words = document.createElement("span");
  const title = Object.assign(document.createElement("bdi"), { className: "choice-name", textContent: name });
  words.append(title, " ", Object.assign(document.createElement("span"), { className: "muted", textContent: note }));
  label.append(input, " ", words);
  return label;
}

/** A plan is of the form as it was sent. */
function notePlanIsOld() {
  const note = document.getElementById("changed-note");
  if (!document.getElementById("plan-result") || !note) return;
  form.addEventListener("change", () => { note.hidden = false; }, { once: true });
}

/** Only a run in Airflow can wait for the judge: elsewhere the box is gone, and so is its tick. */
function offerWaiting() {
  const runner = form.elements.runner;
  const box = form.elements.wait_for_judge;
  if (!runner || !box) return;
  const show = () => {
    const there = runner.value === "airflow";
    box.closest(".field").hidden = !there;
    box.disabled = !there;
  };
  runner.addEventListener("change", show);
  show();
}

/** A mistake in a folded group is shown when the browser or a link points at it. */
function unfoldMistakes() {
  form.addEventListener("invalid", (event) => event.target.closest("details")?.setAttribute("open", ""), true);
}

if (form) {
  unfoldMistakes();
  notePlanIsOld();
  offerWaiting();
  if (form.dataset.modelsUrl) addLateModels().catch(() => {}); // suggestions are optional; names can be typed
}
