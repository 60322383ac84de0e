// Tabs of one browser on one batch: each has a name of its own, and tells the others what the server has confirmed.

const ROLL_CALL_MS = 150;

export class Tabs {
  #channel = null;
  #alive = new Set();
  name;

  /** `heard(item, answer)` is called for what another tab has saved. */
  constructor(sheet, heard) {
    const kept = recall(`tipbench.tab.${sheet}`);
    this.name = kept ?? crypto.getRandomValues(new Uint32Array(2)).join("-");
    if (!("BroadcastChannel" in window)) return;
    this.#channel = new BroadcastChannel(`tipbench.${sheet}`);
    this.#channel.addEventListener("message", ({ data }) => {
      if (data.asked) this.#channel.postMessage({ here: this.name });
      else if (data.here) this.#alive.add(data.here);
      else if (data.item) heard(data.item, data.answer);
    });
  }

  /** The names of the other tabs. A doubled tab, which has our name, makes us take another. */
  async others(sheet) {
    this.#channel?.postMessage({ asked: true });
    await new Promise((resolve) => setTimeout(resolve, this.#channel ? ROLL_CALL_MS : 0));
    if (this.#alive.has(this.name)) this.name = crypto.getRandomValues(new Uint32Array(2)).join("-");
    remember(`tipbench.tab.${sheet}`, this.name);
    return this.#alive;
  }

  tell(item, answer) {
    this.#channel?.postMessage({ item, answer });
  }
}

/** What this tab keeps through a reload. */
export function recall(name) {
  try {
    return sessionStorage.getItem(name);
  } catch {
    return null;
  }
}

export function remember(name, text) {
  try {
    sessionStorage.setItem(name, text);
  } catch {
    // the tab forgets, nothing else
  }
}
