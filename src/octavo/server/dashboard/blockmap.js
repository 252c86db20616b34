// The map of physical blocks: one cell a block, in the order of their numbers.
//
// The canvas is as large as what is visible of it, and is drawn again as the page scrolls it: 100,000
// blocks cost as much as fit on the screen. Small cells are written as pixels, larger ones drawn
// with marks. Which request is followed, and what is said aloud, is the page's business.

import { css, FILL_LEVELS, mix, parse, shadeOf, shades, theme } from "./colours.js";
import { CACHED, UNLISTED } from "./snapshot.js";

const SIZES = [2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 28, 32]; // of a cell with its gap, in CSS pixels
const MARKS_FROM = 6; // smaller cells have shades only
const FADED = 0.72; // how far the others go to the background while a request is followed

/** A pixel of an ImageData as one number, on little-endian machines. */
const packed = ([r, g, b]) => ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;

export class BlockMap {
  #blocks = null;
  #size = SIZES[0];
  #fit = true;
  #cursor = -1;
  #followed = new Set();
  #order = new Map(); // block -> its place in the followed request
  #palette = null;

  /** onPoint(block or -1, aloud) and onChoose(block) tell what the user does. */
  constructor({ canvas, scroll, space, mostHeight, hues, onPoint, onChoose, onCancel }) {
    Object.assign(this, { canvas, scroll, space, mostHeight, hues, onPoint, onChoose, onCancel });
    scroll.addEventListener("scroll", () => this.paint(), { passive: true });
    new ResizeObserver(() => this.layout()).observe(scroll);
    canvas.addEventListener("pointermove", (event) => this.#point(event));
    canvas.addEventListener("pointerleave", () => this.onPoint(this.#cursor, false));
    canvas.addEventListener("click", (event) => {
      const block = this.#blockAt(event);
      if (block >= 0) {
        this.#cursor = block;
        this.onChoose(block);
        this.paint();
      }
    });
    canvas.addEventListener("keydown", (event) => this.#key(event));
    canvas.addEventListener("focus", () => this.paint());
    canvas.addEventListener("blur", () => this.paint());
    scroll.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      this.zoom(event.deltaY < 0 ? 1 : -1);
    }, { passive: false });
  }

  get cell() {
    return this.#size;
  }

  get cursor() {
    return this.#cursor;
  }

  /** What blocks hold by now. followed: the keys of the followed request; order: its blocks. */
  show(blocks, followed, order) {
    const resized = this.#blocks?.length !== blocks.length;
    this.#blocks = blocks;
    this.#followed = followed;
    this.#order = new Map(order.map((block, place) => [block, place]));
    if (this.#cursor >= blocks.length) this.#cursor = -1;
    this.recolour(resized);
  }

  /** The theme or the requests have changed. */
  recolour(resized = false) {
    if (!this.#blocks) return;
    this.#palette = this.#colours();
    if (resized) this.layout();
    else this.paint();
  }

  #colours() {
    const base = theme();
    const panel = parse(base.panel);
    const fade = (rgb) => (this.#order.size ? mix(rgb, panel, FADED) : rgb);
    const owners = this.#blocks.rows.map((key) => {
      const own = shades(this.hues.of(key, base.dark), panel);
      return this.#followed.has(key) ? own : own.map(fade);
    });
    const shared = shades(parse(base.shared), panel);
    const free = parse(base.free);
    const cached = fade(parse(base.cached));
    const sharedFaded = shared.map(fade);
    const pixels = {
      owners: Uint32Array.from(owners.flat(), packed), free: packed(free), cached: packed(cached),
      shared: shared.map(packed), sharedFaded: sharedFaded.map(packed),
    };
    return { ...base, owners, panelRgb: panel, free, cachedRgb: cached, shared, sharedFaded, pixels };
  }

  zoom(steps) {
    const at = SIZES.indexOf(this.#size);
    this.#fit = false;
    this.#resize(SIZES[Math.min(SIZES.length - 1, Math.max(0, at + steps))]);
  }

  fit() {
    this.#fit = true;
    this.layout();
  }

  /** Choose the size of a cell for the room there is. */
  layout() {
    if (!this.#blocks || !this.scroll.clientWidth) return;
    if (!this.#fit) return this.#resize(this.#size);
    const number = this.#blocks.length;
    const fits = (size) =>
      Math.ceil(number / Math.floor(this.scroll.clientWidth / size)) * size <= this.mostHeight;
    this.#resize(SIZES.filter(fits).pop() ?? SIZES[0]);
  }

  #resize(size) {
    this.#size = size;
    const rows = Math.ceil(this.#blocks.length / this.columns);
    this.scroll.style.height = `${Math.min(rows * size, this.mostHeight) + 2}px`;
    this.space.style.height = `${rows * size}px`;
    if (this.#cursor >= 0) this.#reveal(this.#cursor);
    this.paint();
  }

  get columns() {
    return Math.max(1, Math.floor(this.scroll.clientWidth / this.#size));
  }

  paint() {
    const { scroll, canvas } = this;
    const blocks = this.#blocks;
    const width = scroll.clientWidth;
    const height = scroll.clientHeight;
    if (!blocks || !width || !height) return;
    const ratio = devicePixelRatio;
    const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
    if (canvas.width !== w || canvas.height !== h) {
      canvas.width = w;
      canvas.height = h;
      canvas.style.width = `${width}px`;
      canvas.style.height = `${height}px`;
    }
    const context = canvas.getContext("2d");
    const size = this.#size;
    const first = Math.floor(scroll.scrollTop / size) * this.columns;
    const rows = Math.ceil(height / size) + 1;
    const last = Math.min(blocks.length, first + rows * this.columns);
    const shift = scroll.scrollTop % size;
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, w, h);
    if (size < MARKS_FROM) this.#pixels(context, first, last, shift * ratio, ratio, w, h);
    context.setTransform(ratio, 0, 0, ratio, 0, -shift * ratio);
    if (size >= MARKS_FROM) {
      for (let block = first; block < last; block++) {
        const [x, y] = this.#place(block - first);
        this.drawCell(context, block, x, y, size);
      }
    }
    this.#outlines(context, first, last);
  }

  #place(offset) {
    return [(offset % this.columns) * this.#size, Math.floor(offset / this.columns) * this.#size];
  }

  /** The colour of a block as [r, g, b]. */
  #colour(block) {
    const blocks = this.#blocks;
    const p = this.#palette;
    if (!blocks.held(block)) return blocks.cached(block) ? p.cachedRgb : p.free;
    return this.#shades(block)[shadeOf(blocks.fill[block])];
  }

  /** Of a block that is held. */
  #shades(block) {
    const p = this.#palette;
    const owner = this.#blocks.owner[block];
    if (owner < UNLISTED) return p.owners[owner - 1] ?? p.shared;
    return this.#order.has(block) ? p.shared : p.sharedFaded;
  }

  /** A line of pixels is made once for each row of cells, and copied. */
  #pixels(context, first, last, shift, ratio, w, h) {
    const image = context.createImageData(w, h);
    const pixels = new Uint32Array(image.data.buffer);
    const line = new Uint32Array(w);
    const step = this.#size * ratio;
    const gap = this.#size > 3 ? Math.max(1, Math.round(ratio)) : 0;
    const { columns } = this;
    const edges = Array.from({ length: columns + 1 }, (_, i) => Math.min(w, Math.round(i * step)));
    for (let start = first, row = 0; start < last; start += columns, row++) {
      const end = Math.min(last, start + columns);
      line.fill(0);
      for (let block = start; block < end; block++) {
        const colour = this.#packed(block);
        const right = edges[block - start + 1] - gap;
        for (let x = edges[block - start]; x < right; x++) line[x] = colour;
      }
      const top = Math.max(0, Math.round(row * step - shift));
      const bottom = Math.min(h, Math.round((row + 1) * step - shift) - gap);
      for (let y = top; y < bottom; y++) pixels.set(line, y * w);
    }
    context.putImageData(image, 0, 0);
  }

  /** As `#colour`, as a pixel; written for 100,000 blocks a frame. */
  #packed(block) {
    const { owner, fill, flags } = this.#blocks;
    const { pixels } = this.#palette;
    const who = owner[block];
    if (who > 0 && who < UNLISTED) return pixels.owners[(who - 1) * FILL_LEVELS + shadeOf(fill[block])];
    if (!this.#blocks.held(block)) return flags[block] & CACHED ? pixels.cached : pixels.free;
    return (this.#order.has(block) ? pixels.shared : pixels.sharedFaded)[shadeOf(fill[block])];
  }

  /** One block with its marks; the written slots from the left, where there is room to see them. */
  drawCell(context, block, x, y, size) {
    const blocks = this.#blocks;
    const side = size - (size > 4 ? 1 : 0);
    const full = this.#colour(block);
    const idle = !blocks.held(block);
    context.fillStyle = css(full);
    if (idle || size < 10 || blocks.fill[block] === 255) {
      context.fillRect(x, y, side, side);
    } else {
      const own = this.#shades(block).at(-1);
      context.fillStyle = css(mix(own, this.#palette.panelRgb, 0.7));
      context.fillRect(x, y, side, side);
      context.fillStyle = css(own);
      context.fillRect(x, y, Math.max(1, Math.round((side * blocks.fill[block]) / 255)), side);
    }
    if (idle && size >= 8 && blocks.cached(block)) this.#hatch(context, x, y, side);
    if (blocks.shared(block)) this.#dot(context, x, y, side);
    if (!idle && blocks.swapped(block)) this.#corner(context, x, y, side);
  }

  /** Cached and held by nobody: one stroke from corner to corner. */
  #hatch(context, x, y, side) {
    context.strokeStyle = this.#palette.panel;
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(x, y + side);
    context.lineTo(x + side, y);
    context.stroke();
  }

  /** Held by more than one request: a hole in the upper corner, beside the number of its place. */
  #dot(context, x, y, side) {
    const radius = Math.max(1, side * 0.13);
    context.fillStyle = this.#palette.panel;
    context.beginPath();
    context.arc(x + side - radius - side * 0.08, y + radius + side * 0.08, radius, 0, 2 * Math.PI);
    context.fill();
  }

  /** In host memory: a corner is cut off. */
  #corner(context, x, y, side) {
    const cut = Math.max(2, side * 0.45);
    context.fillStyle = this.#palette.ink;
    context.beginPath();
    context.moveTo(x + side, y + side);
    context.lineTo(x + side - cut, y + side);
    context.lineTo(x + side, y + side - cut);
    context.fill();
  }

  /** Around the followed request's blocks, joined in their order; and around the cursor. */
  #outlines(context, first, last) {
    const p = this.#palette;
    const size = this.#size;
    const side = size - (size > 4 ? 1 : 0);
    context.lineWidth = size >= 8 ? 2 : 1;
    const half = size >= 8 ? 0 : 0.5; // on whole pixels
    context.strokeStyle = p.ink;
    for (const [block, place] of this.#order) {
      if (block < first || block >= last) continue;
      const [x, y] = this.#place(block - first);
      context.strokeRect(x + half, y + half, side - 2 * half, side - 2 * half);
      if (size >= 20) {
        context.fillStyle = this.#blocks.shared(block) ? p.panel : p.ink;
        context.font = `600 ${Math.min(11, size * 0.42)}px Inter, system-ui, sans-serif`;
        context.textAlign = "center";
        context.textBaseline = "middle";
        const aside = this.#blocks.shared(block) ? side * 0.09 : 0; // from its mark
        context.fillText(String(place), x + side / 2 - aside, y + side / 2 + 0.5 + aside);
      }
    }
    if (this.#cursor >= first && this.#cursor < last) {
      const [x, y] = this.#place(this.#cursor - first);
      const focused = document.activeElement === this.canvas;
      context.strokeStyle = p.panel;
      context.lineWidth = 4;
      context.strokeRect(x - 2, y - 2, side + 4, side + 4);
      context.strokeStyle = focused ? p.accent : p.muted;
      context.lineWidth = 2;
      context.strokeRect(x - 2, y - 2, side + 4, side + 4);
    }
  }

  #blockAt(event) {
    if (!this.#blocks) return -1;
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / this.#size);
    const row = Math.floor((event.clientY - box.top + this.scroll.scrollTop) / this.#size);
    const block = row * this.columns + column;
    return column < this.columns && block < this.#blocks.length ? block : -1;
  }

  #point(event) {
    this.onPoint(this.#blockAt(event), false);
  }

  moveTo(block, aloud = true) {
    const last = this.#blocks.length - 1;
    this.#cursor = Math.min(last, Math.max(0, block));
    this.#reveal(this.#cursor);
    this.onPoint(this.#cursor, aloud);
    this.paint();
  }

  #reveal(block) {
    const top = Math.floor(block / this.columns) * this.#size;
    const { scroll } = this;
    if (top < scroll.scrollTop) scroll.scrollTop = top;
    else if (top + this.#size > scroll.scrollTop + scroll.clientHeight) {
      scroll.scrollTop = top + this.#size - scroll.clientHeight;
    }
  }

  #key(event) {
    if (!this.#blocks || event.ctrlKey || event.metaKey || event.altKey) return;
    const at = Math.max(0, this.#cursor);
    const page = Math.max(1, Math.floor(this.scroll.clientHeight / this.#size)) * this.columns;
    const moves = {
      ArrowRight: at + (this.#cursor >= 0), ArrowLeft: at - 1, ArrowDown: at + this.columns, ArrowUp: at - this.columns,
      PageDown: at + page, PageUp: at - page, Home: 0, End: this.#blocks.length - 1,
      n: this.#neighbour(at, 1), p: this.#neighbour(at, -1),
    };
    if (event.key in moves) this.moveTo(moves[event.key]);
    else if (event.key === "Enter" || event.key === " ") this.onChoose(at);
    else if (event.key === "Escape") this.onCancel();
    else if (event.key === "+" || event.key === "=") this.zoom(1);
    else if (event.key === "-") this.zoom(-1);
    else return;
    event.preventDefault();
  }

  /** The followed request's block before or after `block` in its order. */
  #neighbour(block, step) {
    const order = [...this.#order.keys()];
    if (!order.length) return block;
    const place = this.#order.get(block);
    if (place === undefined) return order[0];
    return order[(order.indexOf(block) + step + order.length) % order.length];
  }
}
