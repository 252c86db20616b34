// The page: joins the feed, the views and the controls. Nothing is drawn but what has changed.

import { BlockMap } from "./blockmap.js";
import { Chart } from "./chart.js";
import { Hues } from "./colours.js";
import { Feed, storeKey, storedKey } from "./feed.js";
import { ago, count, figure, percent, plural, seconds, tick } from "./format.js";
import { History } from "./history.js";
import { Playground } from "./playground.js";
import { fact, RequestPanel, RequestTable } from "./request.js";
import { decode, valuesOf } from "./snapshot.js";

const RATE_SECONDS = 10; // over which counters become rates
const MOST_CHANGES = 6;
const get = (id) => document.getElementById(id);
const wallSeconds = () => performance.now() / 1000;

const TILES = [
  ["Output", "tokens/s", (v) => v.rates && figure(v.rates.output_tokens_per_second)],
  ["Prompt", "tokens/s", (v) => v.rates && figure(v.rates.prompt_tokens_per_second)],
  ["Running", "", (v) => v.queue && count(v.queue.running)],
  ["Waiting", "", (v) => v.queue && count(v.queue.waiting + v.queue.preempted)],
  ["Swapped", "", (v) => v.queue && count(v.queue.swapped)],
  ["KV blocks held", "", (v) => v.rates && percent(v.rates.kv_blocks_usage)],
  ["Fragmentation", "", (v) => v.rates && percent(v.rates.fragmentation)],
  ["Cache hits", "", (v) => v.rates && percent(v.rates.hit_rate)],
  ["Preemptions", "", (v) => v.rates && count(v.rates.preemptions)],
  ["Device busy", "", (v) => v.rates && percent(v.rates.device_utilization)],
];
const P = (kind) => ["p50", "p90", "p99"].map((at) => ({ key: `${kind}_${at}`, name: at.toUpperCase() }));
const CHARTS = [
  { title: "Tokens per second", format: figure,
    lines: [{ key: "output", name: "output" }, { key: "prompt", name: "prompt" }] },
  { title: "Requests", format: figure,
    lines: [{ key: "running", name: "running" }, { key: "waiting", name: "waiting" }, { key: "swapped", name: "swapped" }] },
  { title: "KV cache", format: percent, most: 1,
    lines: [{ key: "held", name: "held" }, { key: "written", name: "written" }, { key: "fragmentation", name: "fragmentation" }] },
  { title: "Cache hits and device", format: percent, most: 1,
    lines: [{ key: "hits", name: "hit rate" }, { key: "busy", name: "device busy" }] },
  { title: "Time to first token", format: seconds, axis: tick, lines: P("ttft") },
  { title: "Between tokens", format: seconds, axis: tick, lines: P("itl") },
  { title: "Whole request", format: seconds, axis: tick, lines: P("e2e") },
  { title: "Preempted per second", format: figure,
    lines: [{ key: "preemption_rate", name: "all" }, { key: "displaced_rate", name: "displaced" }, { key: "swap_rate", name: "blocks swapped" }] },
];
const STATES = {
  connecting: "Connecting", live: "Live", waiting: "Reconnecting", key: "Key needed", off: "Not available",
  paused: "Paused",
};

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** The page's whole state; exported for tests, which read what it has drawn. */
class Page {
  view = null;
  state = "connecting";
  why = "";
  followed = null; // {asked, id, request, tables}: what is last known; id is null before it is seen
  hues = new Hues();
  histories = new Map(); // engine -> History
  #frame = 0;

  constructor() {
    this.feed = new Feed((state, why) => this.#connection(state, why), (update) => this.#arrived(update));
    this.maps = {
      pool: this.#map("map", 400, "block", () => this.view?.pool),
      host: this.#map("host", 130, "host block", () => this.view?.host),
    };
    this.panel = new RequestPanel({ root: document, hues: this.hues, maps: this.maps });
    this.table = new RequestTable({
      body: document.querySelector("#requests tbody"), sum: get("requests-sum"), hues: this.hues,
      onFollow: (id) => this.follow(this.followed && id === this.followed.id ? null : id),
    });
    this.charts = CHARTS.map((options) => new Chart(get("charts"), options));
    this.playground = new Playground({
      form: get("play-form"), answer: get("play-answer"), state: get("play-state"),
      onStart: (name) => this.follow(name),
      onFailure: () => {
        if (this.followed?.id === null) this.follow(null);
      },
      onKey: (why) => this.#askKey(why),
    });
    this.tiles = TILES.map(([name, unit]) => {
      const tile = fact(name, "\u2013");
      if (unit) tile.firstChild.append(Object.assign(document.createElement("small"), { textContent: ` ${unit}` }));
      get("tiles").append(tile);
      return tile.lastChild;
    });
    this.#legend();
    this.#controls();
    this.feed.open({ engine: 0 });
  }

  get engine() {
    return Number(get("engine").value || 0);
  }

  get history() {
    if (!this.histories.has(this.engine)) this.histories.set(this.engine, new History());
    return this.histories.get(this.engine);
  }

  // ----- the feed

  #subscribe() {
    this.feed.open({ engine: this.engine, request: this.followed?.asked ?? null });
  }

  #arrived(update) {
    const view = decode(update);
    if (view.engine !== this.engine) return;
    this.view = view;
    this.#keep(valuesOf(view));
    this.#noteFollowed();
    this.#draw();
  }

  /** Counters become rates over the last seconds; a server that began anew counts from 0. */
  #keep(values) {
    const now = wallSeconds();
    const [times, earlier] = this.history.from(now - RATE_SECONDS);
    const at = earlier.findLastIndex((point) => point === null) + 1;
    const then = earlier[at];
    for (const [rate, counter] of [["preemption_rate", "preemptions"], ["displaced_rate", "displaced"], ["swap_rate", "swapped_out"]]) {
      const grown = then && values[counter] >= then[counter] ? values[counter] - then[counter] : 0;
      values[rate] = then ? grown / Math.max(now - times[at], 1) : 0;
    }
    this.history.add(now, values);
  }

  #noteFollowed() {
    const { view, followed } = this;
    if (!followed) return;
    const known = followed.id !== null;
    if (view.follow === followed.asked) {
      if (!known && view.followEngine !== null && view.followEngine !== this.engine) {
        get("engine").value = String(view.followEngine);
        this.#subscribe();
        return;
      }
      followed.id ??= view.followed?.id ?? view.requests.find(({ name }) => name.endsWith(followed.asked))?.id ?? null;
      if (view.pool) followed.tables = view.followed?.tables ?? [];
    }
    followed.request = view.requests.find(({ id }) => id === followed.id) ?? followed.request;
    if (!known && followed.request) this.announce(`Following ${followed.request.name}`);
  }

  #connection(state, why) {
    if (state === this.state && why === this.why) return;
    const changed = state !== this.state;
    this.state = state;
    this.why = why;
    if (state === "waiting" || state === "paused") this.history.gap(wallSeconds());
    const badge = get("connection");
    badge.dataset.state = state;
    setText(badge.lastChild, STATES[state]);
    this.#showProblem();
    get("key").hidden = !(state === "key" || storedKey());
    if (state === "key") this.#askKey(why);
    if (changed) this.#draw();
  }

  /** Why there is nothing to see: of the connection, else of the engine. */
  #showProblem() {
    const row = this.view?.engines.find(({ engine }) => engine === this.engine);
    const text = this.state !== "live" ? this.why : row?.problem ? `Engine ${row.engine}: ${row.problem}.` : "";
    const problem = get("problem");
    setText(problem, text);
    problem.hidden = !text;
  }

  // ----- following

  /** asked: the id of a request, by the engine or by the client, which may be still to come. */
  follow(asked) {
    if (asked === (this.followed?.asked ?? null)) return;
    const request = this.view?.requests.find(({ id }) => id === asked) ?? null;
    this.followed = asked === null ? null : { asked, id: request?.id ?? null, request, tables: [] };
    if (request) this.announce(`Following ${request.name}`);
    else if (asked === null) this.announce("Following ended");
    this.#subscribe();
    this.#draw();
  }

  announce(text) {
    setText(get("announcer"), text);
  }

  // ----- drawing

  #draw() {
    if (!this.#frame) {
      this.#frame = requestAnimationFrame(() => {
        this.#frame = 0;
        this.#drawNow();
      });
    }
  }

  #drawNow() {
    const { view, followed } = this;
    const now = wallSeconds();
    const span = Number(get("span").value);
    for (const chart of this.charts) chart.draw(this.history, now, span);
    if (!view) return;
    this.#drawEngines(view);
    TILES.forEach(([, , value], i) => setText(this.tiles[i], value(view) ?? "\u2013"));
    this.#drawMaps(view);
    const live = view.requests.filter((row) => row.state !== "finished");
    const ended = view.requests.filter((row) => row.state === "finished").reverse();
    this.table.show([...live, ...ended], view.requests.length + view.unlisted, followed?.id);
    this.panel.show(followed?.request ?? null, followed?.tables ?? []);
    this.#drawScheduler(view);
  }

  #drawEngines(view) {
    const { settings } = view;
    setText(get("model"), settings ? `${settings.model} \u00b7 ${settings.device} \u00b7 KV ${settings.kv_cache_dtype}` : "loading the model");
    const select = get("engine");
    if (select.options.length !== view.engines.length) {
      const chosen = select.value;
      select.replaceChildren(...view.engines.map(({ engine }) => new Option(String(engine), engine)));
      if (chosen) select.value = chosen;
    }
    get("engine-choice").hidden = view.engines.length < 2;
    view.engines.forEach((row, i) => {
      const load = row.problem ? "does not answer" : `${row.running} running, ${row.waiting} waiting`;
      setText(select.options[i], `${row.engine}: ${load}`);
    });
    this.#showProblem();
  }

  #drawMaps(view) {
    if (!view.pool) return;
    const keys = new Set(view.requests.filter((row) => this.followed && row.id === this.followed.id).map((row) => row.key));
    const order = (onHost) => (this.followed?.tables ?? []).filter((t) => t.onHost === onHost).flatMap((t) => t.blocks);
    this.maps.pool.show(view.pool, keys, order(false));
    const used = view.host && view.queue.swapped > 0;
    if (get("host").hidden === Boolean(used)) get("host").hidden = !used;
    if (used) this.maps.host.show(view.host, keys, order(true));
    const usable = view.pool.total - 1;
    setText(get("map-sum"), `${count(usable - view.freeBlocks)} of ${count(usable)} held, ${plural(view.cachedBlocks, "block")} cached, ${view.settings?.block_size ?? "?"} tokens a block`);
    if (get("map-table").open) this.#drawMapTable(view.pool);
    if (this.pointed) this.#readout(...this.pointed);
  }

  #drawMapTable(pool) {
    const sums = pool.sums();
    const names = {
      full: "held by one request, full", partial: "held by one request, partly written",
      shared: "shared by several requests", cached: "held by none, cached", free: "free",
    };
    const rows = Object.entries(names).map(([key, name]) => {
      const row = document.createElement("tr");
      const head = Object.assign(document.createElement("th"), { scope: "row", textContent: name });
      const cells = [count(sums[key]), percent(sums[key] / (pool.length - 1))].map((text) =>
        Object.assign(document.createElement("td"), { className: "number", textContent: text }));
      row.append(head, ...cells);
      return row;
    });
    document.querySelector("#map-table tbody").replaceChildren(...rows);
  }

  #drawScheduler(view) {
    const { queue, settings } = view;
    if (!queue) return;
    const targets = Object.entries(settings?.targets ?? {}).map(([name, value]) => `${name}=${figure(value)}`);
    setText(get("policy-name"), [settings?.scheduler ?? "", ...targets].join(" "));
    setText(get("policy-hold"), this.#named(queue.hold_text) || (queue.waiting + queue.preempted ? "Waiting requests start with the next step." : "No request waits."));
    setText(get("policy-reason"), queue.reason);
    const facts = [
      ["Step", count(queue.step)], ["Tokens a step", count(queue.step_tokens)],
      ["Requests a step", count(queue.step_sequences)],
      ...Object.entries(queue.gauges).map(([name, value]) => [name.replaceAll("_", " "), figure(value)]),
    ];
    get("policy-facts").replaceChildren(...facts.map(([name, value]) => fact(name, value)));
    const items = view.changes.slice(-MOST_CHANGES).reverse().map((change) => {
      const item = document.createElement("li");
      const when = Object.assign(document.createElement("span"), {
        className: "when mono", textContent: ago(view.now - change.at),
      });
      item.append(when, this.#named(change.text));
      return item;
    });
    if (!items.length) items.push(Object.assign(document.createElement("li"), { className: "muted", textContent: "nothing yet" }));
    get("changes").replaceChildren(...items);
  }

  /** A sentence with the names that clients know, for the engine's ids. */
  #named(text) {
    const names = new Map(this.view.requests.map(({ id, name }) => [id, name]));
    return text.replace(/[\w-]+/g, (word) => names.get(word) ?? word);
  }

  // ----- the block map

  #map(name, mostHeight, noun, blocks) {
    const scroll = get(`${name}-scroll`);
    return new BlockMap({
      canvas: get(`${name}-canvas`), scroll, space: scroll.firstElementChild, mostHeight, hues: this.hues,
      onPoint: (block, aloud) => {
        this.pointed = block >= 0 ? [block, noun, blocks] : null;
        const text = this.#readout(block, noun, blocks);
        if (aloud) this.announce(text);
      },
      onChoose: (block) => {
        const key = blocks()?.request(block);
        const request = this.view?.requests.find((row) => row.key === key);
        if (request) this.follow(request.id);
        else this.announce(`${noun} ${block} is held by no single request`);
      },
      onCancel: () => this.follow(null),
    });
  }

  #readout(block, noun, source) {
    const blocks = source();
    const none = block < 0 || !blocks;
    const text = none ? "Point at a block, or focus the map and use the arrow keys." : this.#blockText(blocks, block, noun);
    setText(get("map-readout"), text);
    get("map-readout").classList.toggle("muted", none);
    return text;
  }

  #blockText(blocks, block, noun) {
    if (block === 0) return `${noun} 0: the null block, never held`;
    const size = this.view.settings?.block_size ?? 0;
    const written = Math.round((blocks.fill[block] * size) / 255);
    const parts = [];
    const request = this.view.requests.find((row) => row.key === blocks.request(block));
    if (request) parts.push(request.name, request.state);
    else if (blocks.shared(block)) parts.push("shared by several requests");
    else if (blocks.held(block)) parts.push("held by a request that is not listed");
    else parts.push(blocks.cached(block) ? "held by none, cached" : "free");
    if (blocks.held(block)) parts.push(`${written} of ${size} slots written`);
    if (blocks.held(block) && blocks.cached(block)) parts.push("cached");
    const windows = this.view.settings?.groups ?? [];
    const group = blocks.group?.[block];
    if (windows[group]?.window) parts.push(`window of ${windows[group].window}`);
    return `${noun} ${block}: ${parts.join(", ")}`;
  }

  #legend() {
    const kinds = [
      ["one", "a request's colour"], ["part", "partly written"], ["shared", "shared"],
      ["cached", "cached, held by none"], ["swapped", "swapped out"], ["free", "free"], ["outlined", "followed"],
    ];
    get("map-legend").append(...kinds.map(([kind, text]) => {
      const item = document.createElement("li");
      const cell = document.createElement("span");
      cell.className = `cell ${kind}`;
      cell.setAttribute("aria-hidden", "true");
      item.append(cell, text);
      return item;
    }));
  }

  // ----- controls

  #controls() {
    get("zoom-in").addEventListener("click", () => this.#zoom(1));
    get("zoom-out").addEventListener("click", () => this.#zoom(-1));
    get("zoom-fit").addEventListener("click", () => {
      this.maps.pool.fit();
      this.maps.host.fit();
    });
    get("unfollow").addEventListener("click", () => {
      this.follow(null);
      get("map-canvas").focus({ preventScroll: true });
    });
    get("span").addEventListener("change", () => this.#draw());
    get("map-table").addEventListener("toggle", () => this.#draw());
    get("engine").addEventListener("change", () => {
      this.view = null;
      this.followed = null;
      this.#subscribe();
    });
    get("pause").addEventListener("click", () => this.#pause(!this.feed.paused));
    this.#theme();
    get("key").addEventListener("click", () => this.#askKey(""));
    get("key-cancel").addEventListener("click", () => get("key-dialog").close());
    get("key-form").addEventListener("submit", () => {
      storeKey(get("key-input").value.trim());
      get("key-input").value = "";
      if (!this.feed.paused) this.feed.resume();
    });
    addEventListener("resize", () => this.#draw());
  }

  #zoom(steps) {
    this.maps.pool.zoom(steps);
    if (!get("host").hidden) this.maps.host.zoom(steps);
  }

  #pause(paused) {
    const button = get("pause");
    button.setAttribute("aria-pressed", String(paused));
    if (paused) this.feed.pause();
    else this.feed.resume();
  }

  #theme() {
    const select = get("theme");
    const apply = () => {
      document.documentElement.dataset.theme = select.value;
      this.maps.pool.recolour();
      this.maps.host.recolour();
      this.#draw();
    };
    select.value = localStorage.getItem("octavo-theme") ?? "auto";
    select.addEventListener("change", () => {
      localStorage.setItem("octavo-theme", select.value);
      apply();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", apply);
    apply();
  }

  #askKey(why) {
    const dialog = get("key-dialog");
    setText(get("key-text"), why || "The key with which this page asks the server.");
    if (!dialog.open) dialog.showModal();
  }
}

export const page = new Page();
