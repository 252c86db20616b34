// The subscription: reads the events of a GET with the key, and connects again by itself.
//
// Not an EventSource, which can send no Authorization header. It knows nothing of what the events say.

const SILENT_MS = 15000; // a server that lives sends a line more often than this
const DELAYS_MS = [500, 1000, 2000, 4000, 5000];
const KEY = "octavo-key"; // in sessionStorage

export const base = new URL("../", import.meta.url); // of the server, behind whatever prefix

export function storedKey() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function storeKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

/** Headers with the key, if there is one. */
export function authorized(headers = {}) {
  const key = storedKey();
  return key ? { ...headers, Authorization: `Bearer ${key}` } : headers;
}

/** What the server said of a request that it refused. */
export async function reasonOf(reply) {
  try {
    const body = await reply.json();
    return body.error?.message ?? body.message ?? `status ${reply.status}`;
  } catch {
    return `status ${reply.status}`;
  }
}

/** A sentence begins with a capital and ends with a stop. */
export function sentence(text) {
  const trimmed = text.trim();
  const whole = /[.!?]$/.test(trimmed) ? trimmed : `${trimmed}.`;
  return whole[0].toUpperCase() + whole.slice(1);
}

/** Calls `onEvent(name, data)` for each event of a stream of server-sent events. */
export async function readEvents(body, onEvent) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split(/\r?\n\r?\n/);
    rest = events.pop();
    for (const event of events) {
      let name = "message";
      const data = [];
      for (const line of event.split(/\r?\n/)) {
        if (line.startsWith("event:")) name = line.slice(6).trim();
        else if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
      }
      onEvent(name, data.join("\n")); // without data: a comment that keeps the connection alive
    }
  }
}

/** States: connecting, live, waiting (for the next try), key, off, paused. */
export class Feed {
  #query = {};
  #attempt = 0;
  #abort = null;
  #old = null; // a subscription that ends when its successor has begun
  #timer = 0;
  #silence = 0;
  #paused = false;

  /** onState(state, sentence or "") and onSnapshot(data) are called as things happen. */
  constructor(onState, onSnapshot) {
    this.onState = onState;
    this.onSnapshot = onSnapshot;
  }

  get paused() {
    return this.#paused;
  }

  /** Subscribe with these parameters; what there was ends when the first event has come, so that
   * the server has somebody watching all the time, and keeps what it has gathered for us. */
  open(query = this.#query) {
    this.#query = query;
    if (this.#paused) return;
    clearTimeout(this.#timer);
    this.#old?.abort();
    this.#old = this.#abort;
    const abort = new AbortController();
    this.#abort = abort;
    this.#run(abort).catch((error) => {
      if (abort === this.#abort) this.#failed(error);
    });
  }

  pause() {
    this.#paused = true;
    this.#stop();
    this.onState("paused", "");
  }

  resume() {
    this.#paused = false;
    this.#attempt = 0;
    this.onState("connecting", "");
    this.open();
  }

  #stop() {
    clearTimeout(this.#timer);
    clearTimeout(this.#silence);
    for (const running of [this.#abort, this.#old]) running?.abort();
    this.#abort = this.#old = null;
  }

  async #run(abort) {
    const url = new URL("dashboard/events", base);
    for (const [name, value] of Object.entries(this.#query)) {
      if (value !== null && value !== undefined) url.searchParams.set(name, value);
    }
    this.#listen(abort);
    const reply = await fetch(url, {
      headers: authorized({ Accept: "text/event-stream" }), signal: abort.signal, cache: "no-store",
    });
    if (!reply.ok) {
      const reason = await reasonOf(reply);
      if (abort === this.#abort) this.#refused(reply.status, reason);
      return;
    }
    await readEvents(reply.body, (name, data) => {
      if (abort !== this.#abort) return;
      this.#listen(abort);
      if (name === "snapshot") this.#arrived(data);
      else if (name === "end") this.#ended(JSON.parse(data));
      else if (name === "error") throw new Error(JSON.parse(data).error.message);
    });
    throw new Error("The server ended the connection");
  }

  #arrived(data) {
    this.#attempt = 0;
    this.#old?.abort();
    this.#old = null;
    const snapshot = JSON.parse(data);
    this.onState("live", "");
    this.onSnapshot(snapshot);
  }

  #ended({ reason, retry }) {
    this.#stop();
    if (retry) this.#again(reason);
    else this.onState("off", sentence(reason));
  }

  /** Gives up a connection that says nothing any more. */
  #listen(abort) {
    clearTimeout(this.#silence);
    this.#silence = setTimeout(() => {
      if (abort !== this.#abort) return;
      this.#stop();
      this.#again(`The server has said nothing for ${SILENT_MS / 1000} seconds`);
    }, SILENT_MS);
  }

  #refused(status, reason) {
    this.#stop();
    if (status === 401 || status === 403) {
      this.onState("key", storedKey() ? "The server refused this key." : "This server asks for an API key.");
    } else if (status === 404 || status === 400) {
      this.onState("off", sentence(reason));
    } else {
      this.#again(reason);
    }
  }

  #failed(error) {
    const unreachable = error instanceof TypeError; // what fetch makes of a refused connection
    this.#stop();
    this.#again(unreachable ? `No answer from ${base.host}` : error.message);
  }

  #again(reason) {
    const delay = DELAYS_MS[Math.min(this.#attempt++, DELAYS_MS.length - 1)];
    this.onState("waiting", `${sentence(reason)} Trying again in ${delay / 1000} s.`);
    this.#timer = setTimeout(() => this.open(), delay);
  }
}
