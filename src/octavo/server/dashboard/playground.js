// The playground: one prompt to the server's own API, its answer as it is streamed.

import { authorized, base, readEvents, reasonOf, sentence } from "./feed.js";
import { figure, plural, seconds } from "./format.js";

export class Playground {
  #abort = null;

  /** onStart(its id) is called before a request is sent, onKey(sentence) when the key is refused,
   * onFailure() when there will be no answer. */
  constructor({ form, answer, state, onStart, onKey, onFailure }) {
    Object.assign(this, { form, answer, state, onStart, onKey, onFailure });
    const find = (id) => form.querySelector(`#play-${id}`);
    this.fields = {
      prompt: find("prompt"), tokens: find("tokens"), temperature: find("temperature"),
      topP: find("top-p"), seed: find("seed"),
    };
    this.send = find("send");
    this.stop = find("stop");
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#start();
    });
    form.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
    });
    this.stop.addEventListener("click", () => this.#abort?.abort());
  }

  #body() {
    const { prompt, tokens, temperature, topP, seed } = this.fields;
    const body = {
      max_tokens: tokens.valueAsNumber, temperature: temperature.valueAsNumber,
      top_p: topP.valueAsNumber, stream: true, stream_options: { include_usage: true },
    };
    if (seed.value !== "") body.seed = seed.valueAsNumber;
    return this.form.elements.kind.value === "chat"
      ? ["v1/chat/completions", { ...body, messages: [{ role: "user", content: prompt.value }] }]
      : ["v1/completions", { ...body, prompt: prompt.value }];
  }

  async #start() {
    if (this.#abort) return;
    const abort = new AbortController();
    this.#abort = abort;
    this.#busy(true);
    const [path, body] = this.#body();
    const name = `playground-${crypto.getRandomValues(new Uint32Array(1))[0].toString(36)}`;
    const times = { start: performance.now(), first: 0, last: 0 };
    this.answer.replaceChildren();
    this.answer.classList.remove("failed");
    this.#say("Waiting for the first token");
    this.onStart(name);
    try {
      const usage = await this.#stream(path, body, name, abort.signal, times);
      this.#say(this.#summary(usage, times));
    } catch (error) {
      this.#failed(error, abort.signal.aborted);
      this.onFailure();
    } finally {
      this.#abort = null;
      this.#busy(false);
    }
  }

  async #stream(path, body, name, signal, times) {
    const reply = await fetch(new URL(path, base), {
      method: "POST", signal, body: JSON.stringify(body),
      headers: authorized({ "Content-Type": "application/json", "X-Request-Id": name }),
    });
    if (reply.status === 401) this.onKey("The server refused this key.");
    if (!reply.ok) throw new Error(await reasonOf(reply));
    let usage = null;
    let reasoning = null;
    await readEvents(reply.body, (_, data) => {
      if (!data || data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage ?? usage;
      const choice = chunk.choices?.[0];
      const thought = choice?.delta?.reasoning ?? choice?.delta?.reasoning_content;
      const text = choice?.delta?.content ?? choice?.text;
      if (!text && !thought) return;
      times.last = performance.now();
      if (!times.first) {
        times.first = times.last;
        this.#say("Answering");
      }
      if (thought) {
        reasoning ??= this.answer.appendChild(Object.assign(document.createElement("p"), { className: "reasoning" }));
        reasoning.append(thought);
      }
      if (text) this.answer.append(text);
      this.answer.scrollTop = this.answer.scrollHeight;
    });
    return usage;
  }

  #summary(usage, { start, first, last }) {
    if (!usage) return "Done.";
    const tokens = usage.completion_tokens;
    const each = tokens > 1 ? (last - first) / 1000 / (tokens - 1) : 0;
    const parts = [`Done: ${plural(tokens, "token")} in ${seconds((performance.now() - start) / 1000)}`];
    if (first) parts.push(`first after ${seconds((first - start) / 1000)}`);
    if (each) parts.push(`${figure(1 / each)} a second`);
    return `${parts.join(", ")}.`;
  }

  #failed(error, stopped) {
    if (stopped) {
      this.#say("Stopped.");
      return;
    }
    const text = error instanceof TypeError ? `No answer from ${base.host}` : error.message;
    this.#say("Failed.");
    this.answer.classList.add("failed");
    this.answer.append(`${this.answer.textContent ? "\n" : ""}${sentence(text)}`);
  }

  #busy(busy) {
    this.send.disabled = busy;
    this.stop.disabled = !busy;
    // A button that is disabled loses the focus: it goes to the other one.
    if (document.activeElement === document.body) (busy ? this.stop : this.send).focus();
  }

  #say(text) {
    this.state.textContent = text;
  }
}
