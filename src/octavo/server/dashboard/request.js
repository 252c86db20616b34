// The table of requests, and the panel of the one that is followed: facts, timeline, blocks in order.

import { css, theme } from "./colours.js";
import { count, plural, runs, seconds } from "./format.js";

const MOST_ROWS = 60;
const SHAPES = { running: "\u25b8", waiting: "\u25cb", swapped: "\u21c4", preempted: "\u21ba", finished: "\u2713" };
const STRIP = 14; // pixels of a block in the strip

const svg = (name, parent, attributes, text = "") => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.textContent = text;
  parent.append(made);
  return made;
};

/** A word with a shape, so that colour is not needed to tell states apart. */
export function stateText(state) {
  return `${SHAPES[state] ?? "\u00b7"} ${state}`;
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export class RequestTable {
  #rows = new Map();

  constructor({ body, sum, hues, onFollow }) {
    Object.assign(this, { body, sum, hues, onFollow });
  }

  /** followed: the engine's id. Rows are kept while shown, so that the focus stays where it is. */
  show(requests, total, followed) {
    const shown = requests.slice(0, MOST_ROWS);
    const dark = theme().dark;
    const kept = new Map();
    shown.forEach((request, i) => {
      const row = this.#rows.get(request.key) ?? this.#make(request.id);
      kept.set(request.key, row);
      this.#fill(row, request, request.id === followed, dark);
      if (this.body.children[i] !== row.line) this.body.insertBefore(row.line, this.body.children[i] ?? null);
    });
    for (const [key, row] of this.#rows) if (!kept.has(key)) row.line.remove();
    this.#rows = kept;
    setText(this.sum, total > shown.length
      ? `${shown.length} of ${plural(total, "request")}` : shown.length ? plural(total, "request") : "none yet");
  }

  #make(id) {
    const line = document.createElement("tr");
    const head = document.createElement("th");
    head.scope = "row";
    const button = document.createElement("button");
    button.type = "button";
    button.className = "link mono";
    const swatch = document.createElement("span");
    swatch.className = "swatch";
    swatch.setAttribute("aria-hidden", "true");
    const text = document.createElement("span");
    button.append(swatch, text);
    button.title = `the engine's id: ${id}`;
    button.addEventListener("click", (event) => {
      event.stopPropagation();
      this.onFollow(id);
    });
    line.addEventListener("click", () => this.onFollow(id));
    head.append(button);
    const cells = Array.from({ length: 7 }, (_, i) => {
      const cell = document.createElement("td");
      if (i > 0) cell.className = "number";
      return cell;
    });
    line.append(head, ...cells);
    return { line, button, swatch, text, cells };
  }

  #fill(row, request, followed, dark) {
    const values = [
      stateText(request.state), count(request.prompt), count(request.cached), count(request.output),
      count(request.blocks), count(request.preempted), seconds(request.age),
    ];
    setText(row.text, request.name); // the server may learn it after the engine has begun
    values.forEach((value, i) => setText(row.cells[i], value));
    row.line.dataset.state = request.state;
    row.line.classList.toggle("followed", followed);
    row.button.setAttribute("aria-pressed", String(followed));
    row.swatch.style.background = css(this.hues.of(request.key, dark));
  }
}

export class RequestPanel {
  #order = []; // [map, block]

  /** maps: {pool, host}, which draw the cells of the strip. */
  constructor({ root, hues, maps }) {
    Object.assign(this, { hues, maps });
    const find = (id) => root.querySelector(`#${id}`);
    this.none = find("follow-none");
    this.some = find("follow-some");
    this.stop = find("unfollow");
    this.name = find("follow-name");
    this.facts = find("follow-facts");
    this.line = find("follow-line");
    this.marks = find("follow-marks");
    this.strip = find("follow-strip");
    this.blocks = find("follow-blocks");
    this.strip.addEventListener("click", (event) => {
      const box = this.strip.getBoundingClientRect();
      const columns = Math.floor(this.strip.clientWidth / STRIP);
      const at = Math.floor((event.clientY - box.top) / STRIP) * columns
        + Math.floor((event.clientX - box.left) / STRIP);
      const found = this.#order[at];
      if (found) found[0].moveTo(found[1]);
    });
  }

  /** request: null while none is followed. tables: its blocks. */
  show(request, tables) {
    this.none.hidden = request !== null;
    this.some.hidden = request === null;
    this.stop.hidden = request === null;
    if (request === null) return;
    setText(this.name.querySelector("code"), request.name);
    setText(this.name.querySelector(".state"), stateText(request.state));
    this.name.querySelector(".swatch").style.background = css(this.hues.of(request.key, theme().dark));
    this.#facts(request);
    this.#timeline(request);
    this.#strip(tables);
  }

  #facts(request) {
    const facts = [
      ["Prompt tokens", count(request.prompt)], ["Cached", count(request.cached)],
      ["Output", `${count(request.output)} of ${count(request.most)}`], ["Blocks", count(request.blocks)],
      ["Preempted", ["never", "once"][request.preempted] ?? `${count(request.preempted)} times`],
      ["Age", seconds(request.age)],
    ];
    this.facts.replaceChildren(...facts.map(([name, value]) => fact(name, value)));
  }

  #timeline({ marks, age, state }) {
    const start = marks[0]?.time ?? 0;
    const end = Math.max(start + age, ...marks.map((mark) => mark.time));
    const width = this.line.clientWidth || 300;
    const x = (time) => 6 + ((time - start) / Math.max(end - start, 1e-6)) * (width - 12);
    const drawing = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    drawing.setAttribute("viewBox", `0 0 ${width} 26`);
    drawing.setAttribute("width", width);
    drawing.setAttribute("height", 26);
    marks.forEach((mark, i) => {
      if (mark.phase === null) return;
      const to = marks[i + 1]?.time ?? (state === "finished" ? mark.time : end);
      svg("rect", drawing, {
        class: `phase ${mark.phase}`, x: x(mark.time), y: 8, height: 10,
        width: Math.max(0.5, x(to) - x(mark.time)),
      });
    });
    for (const mark of marks) svg("path", drawing, { class: "mark", d: `M${x(mark.time)} 4v18` });
    this.line.replaceChildren(drawing);
    const items = marks.map((mark) => {
      const item = document.createElement("li");
      const when = document.createElement("span");
      when.className = "when mono";
      when.textContent = mark === marks[0] ? "0 ms" : `+${seconds(mark.time - start)}`;
      const sample = document.createElement("span");
      sample.className = `phase ${mark.phase ?? "end"}`;
      sample.setAttribute("aria-hidden", "true");
      item.append(when, sample, mark.text);
      return item;
    });
    this.marks.replaceChildren(...items);
  }

  #strip(tables) {
    this.#order = tables.flatMap(({ onHost, blocks }) =>
      blocks.map((block) => [onHost ? this.maps.host : this.maps.pool, block]));
    const width = this.strip.clientWidth || 300;
    const columns = Math.max(1, Math.floor(width / STRIP));
    const height = Math.ceil(this.#order.length / columns) * STRIP;
    const ratio = devicePixelRatio;
    this.strip.width = Math.round(width * ratio);
    this.strip.height = Math.round(height * ratio);
    this.strip.style.height = `${height}px`;
    const context = this.strip.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.#order.forEach(([map, block], i) => {
      map.drawCell(context, block, (i % columns) * STRIP, Math.floor(i / columns) * STRIP, STRIP);
    });
    const lines = tables.map(({ label, onHost, blocks }) => {
      const where = [label, onHost ? "on the host" : ""].filter(Boolean).join(", ");
      return `${where ? `${where}: ` : ""}${runs(blocks) || "none"}`;
    });
    const shown = lines.length ? lines : ["none: it holds no blocks"];
    if (this.blocks.textContent === shown.join("")) return;
    this.blocks.replaceChildren(...shown.map((line) =>
      Object.assign(document.createElement("li"), { textContent: line })));
  }
}

/** A name and a value of a <dl>, kept together. */
export function fact(name, value) {
  const group = document.createElement("div");
  const term = document.createElement("dt");
  term.textContent = name;
  const description = document.createElement("dd");
  description.textContent = value;
  group.append(term, description);
  return group;
}
