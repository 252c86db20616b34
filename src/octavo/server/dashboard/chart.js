// A line chart over time: lines on a canvas, a legend with values, and the same as a table.
//
// Lines differ by dash as well as by colour. Pointing at the chart, or the arrow keys while it has
// the focus, show the values of a moment.

import { theme } from "./colours.js";

const HEIGHT = 112;
const LEFT = 44;
const TOP = 6;
const BOTTOM = 18;
const RIGHT = 4;
const ROWS = 12; // of the table
const DASHES = [[], [6, 3], [1.5, 2.5]];
const STYLES = ["accent", "second", "third"];
let made = 0;

/** The least of 1, 2, 2.5, 5 times a power of ten that is at least `value`. */
export function ceiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((m) => m * power).find((top) => top >= value * 0.999);
}

function element(name, parent, attributes = {}, text = "") {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.textContent = text;
  parent?.append(made);
  return made;
}

export class Chart {
  #cursor = null; // seconds before now, or null
  #data = null;

  /** lines: [{key, name}]; format: of a value; axis: the same where room is short; most: a fixed top. */
  constructor(parent, { title, lines, format, axis = format, most = null }) {
    Object.assign(this, { title, lines, format, axis, most });
    const id = `chart-${++made}`;
    const figure = element("figure", parent, { class: "card chart", "aria-labelledby": id });
    const caption = element("figcaption", figure);
    element("h2", caption, { id }, title);
    this.legend = element("ul", caption);
    this.values = lines.map((line, i) => {
      const item = element("li", this.legend, { class: `line line-${i}` });
      const sample = element("span", item, { class: "sample", "aria-hidden": "true" });
      sample.dataset.line = i;
      element("span", item, { class: "name" }, line.name);
      return element("span", item, { class: "value mono" }, "\u2013");
    });
    this.canvas = element("canvas", figure, { tabindex: "0", role: "img", "aria-label": title });
    this.details = element("details", figure);
    element("summary", this.details, { "aria-label": `${title} as a table` }, "Table");
    const table = element("table", this.details);
    const head = element("tr", element("thead", table));
    element("th", head, { scope: "col" }, "Before now");
    for (const line of lines) element("th", head, { scope: "col", class: "number" }, line.name);
    this.body = element("tbody", table);
    this.details.addEventListener("toggle", () => this.#fillTable());
    this.#listen();
  }

  #listen() {
    const point = (event) => {
      const box = this.canvas.getBoundingClientRect();
      const share = (event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT);
      this.#cursor = share >= 0 && share <= 1 && this.#data ? this.#data.span * (1 - share) : null;
      this.#show();
    };
    this.canvas.addEventListener("pointermove", point);
    this.canvas.addEventListener("pointerleave", () => this.#move(null));
    this.canvas.addEventListener("blur", () => this.#move(null));
    this.canvas.addEventListener("keydown", (event) => {
      if (!this.#data) return;
      const { span } = this.#data;
      const step = span / 60;
      const at = this.#cursor ?? 0;
      const to = { ArrowLeft: at + step, ArrowRight: at - step, Home: span, End: 0 }[event.key];
      if (event.key === "Escape") this.#move(null);
      else if (to === undefined) return;
      else this.#move(Math.min(span, Math.max(0, to)));
      event.preventDefault();
    });
  }

  #move(cursor) {
    this.#cursor = cursor;
    this.#show();
  }

  /** Draw what lies in the last `span` seconds before `now`. */
  draw(history, now, span) {
    const [times, values] = history.from(now - span);
    this.#data = { times, values, now, span };
    this.#show();
    if (this.details.open) this.#fillTable();
  }

  #show() {
    if (!this.#data) return;
    const { now } = this.#data;
    const shown = this.#at(now - (this.#cursor ?? 0));
    const words = this.lines.map((line, i) => {
      const value = shown?.[line.key];
      const text = value === null || value === undefined ? "\u2013" : this.format(value);
      if (this.values[i].textContent !== text) this.values[i].textContent = text;
      return `${line.name} ${text}`;
    });
    const when = this.#cursor ? `${Math.round(this.#cursor)} s ago` : "now";
    // A name that changes four times a second would be read out each time.
    if (this.#cursor !== null || document.activeElement !== this.canvas) {
      this.canvas.setAttribute("aria-label", `${this.title}, ${when}: ${words.join(", ")}`);
    }
    this.#paint();
  }

  /** The values of the last point that is not after `time`. */
  #at(time) {
    const { times, values } = this.#data;
    let i = times.length - 1;
    while (i > 0 && times[i] > time + 0.01) i--;
    return values[i];
  }

  #paint() {
    const { times, values, now, span } = this.#data;
    const width = this.canvas.clientWidth;
    if (!width) return;
    const ratio = devicePixelRatio;
    const [w, h] = [Math.round(width * ratio), Math.round(HEIGHT * ratio)];
    if (this.canvas.width !== w || this.canvas.height !== h) {
      this.canvas.width = w;
      this.canvas.height = h;
    }
    const context = this.canvas.getContext("2d");
    const colours = theme();
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, HEIGHT);
    let peak = 0;
    for (const point of values) {
      if (point) for (const { key } of this.lines) peak = Math.max(peak, point[key] ?? 0);
    }
    const top = this.most ?? ceiling(peak);
    const x = (time) => LEFT + (1 - (now - time) / span) * (width - LEFT - RIGHT);
    const y = (value) => TOP + (1 - value / top) * (HEIGHT - TOP - BOTTOM);
    this.#axes(context, colours, { width, top, span, x, y });
    context.save();
    context.beginPath();
    context.rect(LEFT, 0, width - LEFT - RIGHT, HEIGHT);
    context.clip();
    context.lineJoin = "round";
    this.lines.forEach(({ key }, i) => {
      context.strokeStyle = colours[STYLES[i]];
      context.lineWidth = i === 0 ? 1.8 : 1.4;
      context.setLineDash(DASHES[i]);
      context.beginPath();
      let pen = false;
      for (let j = 0; j < times.length; j++) {
        const value = values[j]?.[key];
        if (value === null || value === undefined) pen = false;
        else if (pen) context.lineTo(x(times[j]), y(value));
        else {
          context.moveTo(x(times[j]), y(value));
          pen = true;
        }
      }
      context.stroke();
    });
    context.setLineDash([]);
    if (this.#cursor !== null) {
      context.fillStyle = colours.ink;
      context.fillRect(Math.round(x(now - this.#cursor)), TOP, 1, HEIGHT - TOP - BOTTOM);
    }
    context.restore();
  }

  #axes(context, colours, { width, top, span, x, y }) {
    context.font = "10.5px Inter, system-ui, sans-serif";
    context.fillStyle = colours.muted;
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (const value of [0, top / 2, top]) {
      const at = Math.round(y(value));
      context.fillText(this.axis(value), LEFT - 6, at);
      context.globalAlpha = value === 0 ? 1 : 0.6;
      context.fillStyle = colours.line;
      context.fillRect(LEFT, at, width - LEFT - RIGHT, 1);
      context.globalAlpha = 1;
      context.fillStyle = colours.muted;
    }
    context.textBaseline = "alphabetic";
    const { now } = this.#data;
    for (const share of [1, 0.5, 0]) {
      context.textAlign = share === 1 ? "left" : share === 0 ? "right" : "center";
      const text = share === 0 ? "now" : span * share >= 120
        ? `\u2212${(span * share) / 60} min` : `\u2212${span * share} s`;
      context.fillText(text, x(now - span * share), HEIGHT - 4);
    }
  }

  #fillTable() {
    if (!this.details.open || !this.#data) return;
    const { now, span, times } = this.#data;
    const rows = [];
    for (let i = 0; i < ROWS; i++) {
      const before = (span / ROWS) * i;
      if (!times.length || now - before < times[0]) break;
      const point = this.#at(now - before);
      const row = element("tr", null);
      element("th", row, { scope: "row" }, `${Math.round(before)} s`);
      for (const { key } of this.lines) {
        const value = point?.[key];
        element("td", row, { class: "number" }, value === null || value === undefined ? "\u2013" : this.format(value));
      }
      rows.push(row);
    }
    this.body.replaceChildren(...rows);
  }
}
