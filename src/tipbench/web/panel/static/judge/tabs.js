// Tabs of one browser on one batch: each has its own name, and publishes what the server has confirmed.

const REPLY_WAIT_MS = 150;

export class Tabs {
  #storageKey;
  #channel = null;
  #alive = new Set();
  name;

  /** `onSaved(item, answer)` is called when another tab has saved an item. */
  constructor(sheet, onSaved) {
    this.#storageKey = `tipbench.tab.${sheet}`;
    this.name = recall(this.#storageKey) ?? newName();
    if (!("BroadcastChannel" in window)) return;
    this.#channel = new BroadcastChannel(`tipbench.${sheet}`);
    this.#channel.addEventListener("message", ({ data }) => {
      if (data.query) this.#channel.postMessage({ here: this.name });
      else if (data.here) this.#alive.add(data.here);
      else if (data.item) onSaved(data.item, data.answer);
    });
  }

  /** Returns the names of the other tabs. If one of them has this tab's name,
   *  as after duplicating a tab, this tab takes a new name. */
  async others() {
    this.#channel?.postMessage({ query: true });
    await new Promise((resolve) => setTimeout(resolve, this.#channel ? REPLY_WAIT_MS : 0));
    if (this.#alive.has(this.name)) this.name = newName();
    remember(this.#storageKey, this.name);
    return this.#alive;
  }

  publish(item, answer) {
    this.#channel?.postMessage({ item, answer });
  }
}

function newName() {
  return crypto.getRandomValues(new Uint32Array(2)).join("-");
}

/** Reads what this tab has stored for a reload. */
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
    // no storage: nothing survives a reload
  }
}
