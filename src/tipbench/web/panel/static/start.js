// The start form: models that Ollama lists late, dependent fields, and a note when the plan no longer matches the
// form.

const form = document.getElementById("start-form");

/** Requests the models again, since Ollama was too slow for the page, and adds a box for each; a name already typed is
 *  ticked there instead. */
async function addLateModels() {
  const server = form.elements.ollama_url?.value ?? "";
  const response = await fetch(`${form.dataset.modelsUrl}?ollama_url=${encodeURIComponent(server)}`);
  if (!response.ok || response.redirected) return;
  const { items, away } = await response.json();
  const ticks = document.getElementById("models-ticks");
  const boxes = new Map([...ticks.querySelectorAll("input")].map((input) => [input.value, input]));
  const others = document.getElementById("models-others");
  let typed = others.value.split(",").map((name) => name.trim()).filter(Boolean);
  const first = ticks.firstElementChild;
  for (const model of items) {
    const chosen = typed.includes(model.name) || ("preselect" in form.dataset && model.preselected);
    if (boxes.has(model.name)) {
      if ("preselect" in form.dataset) boxes.get(model.name).checked = chosen;
      continue;
    }
    ticks.insertBefore(modelBox(model, chosen), first);
    typed = typed.filter((each) => each !== model.name);
  }
  others.value = typed.join(", ");
  const notice = document.getElementById("models-away");
  notice.hidden = !away;
  notice.lastElementChild.textContent = away ?? "";
}

function modelBox({ name, note, refusal }, chosen) {
  const label = document.createElement("label");
  label.className = refusal ? "tick refused" : "tick";
  const input = Object.assign(document.createElement("input"), { type: "checkbox", name: "models", value: name });
  input.defaultChecked = chosen;
  const words = document.createElement("span");
  const title = Object.assign(document.createElement("bdi"), { className: "choice-name", textContent: name });
  words.append(title, " ", Object.assign(document.createElement("span"), { className: "muted", textContent: note }));
  if (refusal) {
    const reason = Object.assign(document.createElement("span"), { className: "refusal", textContent: "✕ Refused: " });
    refusal.split("`").forEach((part, at) => reason.append(Object.assign(document.createElement(at % 2 ? "code" : "span"), { textContent: part })));
    words.append(" ", reason);
  }
  label.append(input, " ", words);
  return label;
}

/** Shows a note on the first change: the plan shown is of the form as it was sent. */
function noteOutdatedPlan() {
  const note = document.getElementById("changed-note");
  if (!document.getElementById("plan-result") || !note) return;
  form.addEventListener("change", () => { note.hidden = false; }, { once: true });
}

/** Shows the field for waiting for the judge only with Airflow; elsewhere it is hidden and not sent. */
function showWaitField() {
  const runner = form.elements.runner;
  const box = form.elements.wait_for_judge;
  if (!runner || !box) return;
  const show = () => {
    const inAirflow = runner.value === "airflow";
    box.closest(".field").hidden = !inAirflow;
    box.disabled = !inAirflow;
  };
  runner.addEventListener("change", show);
  show();
}

/** Opens the folded group of a field that the browser rejects. */
function openInvalidGroups() {
  form.addEventListener("invalid", (event) => event.target.closest("details")?.setAttribute("open", ""), true);
}

if (form) {
  openInvalidGroups();
  noteOutdatedPlan();
  showWaitField();
  if (form.dataset.modelsUrl) addLateModels().catch(() => {}); // suggestions are optional; names can be typed
}
