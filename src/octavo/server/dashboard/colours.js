// Colours on canvases: those of the style sheet, and one hue per request.
//
// A request gets the next hue when it is first seen and keeps it. Neighbours in time are far apart
// in hue, because consecutive numbers are a golden angle apart.

const GOLDEN_ANGLE = 137.508;
export const FILL_LEVELS = 16;
const REMEMBERED = 4096;

/** The colours that the style sheet defines, resolved for the theme in use. */
export function theme() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  return {
    dark: luminance(parse(colour("--panel"))) < 0.2,
    ink: colour("--ink"), muted: colour("--muted"), line: colour("--line"),
    panel: colour("--panel"), accent: colour("--accent"), free: colour("--free"),
    cached: colour("--cached"), shared: colour("--shared"), second: colour("--second"),
    third: colour("--third"),
  };
}

/** [r, g, b] of `rgb(...)` or `#rrggbb`. */
export function parse(text) {
  if (text.startsWith("#")) return [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
  return text.match(/[\d.]+/g).slice(0, 3).map(Number);
}

function luminance(rgb) {
  const [r, g, b] = rgb.map((v) => (v <= 10.31 ? v / 3294.6 : ((v / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

export function mix(from, to, share) {
  return from.map((v, i) => Math.round(v + (to[i] - v) * share));
}

export function css(rgb) {
  return `rgb(${rgb.join(" ")})`;
}

/** sRGB of a colour in OKLCH, whose lightness is even over the hues. */
function fromOklch(lightness, chroma, degrees) {
  const angle = (degrees * Math.PI) / 180;
  const a = chroma * Math.cos(angle);
  const b = chroma * Math.sin(angle);
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  return [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ].map((v) => {
    const linear = Math.min(1, Math.max(0, v));
    return Math.round(255 * (linear <= 0.0031308 ? 12.92 * linear : 1.055 * linear ** (1 / 2.4) - 0.055));
  });
}

/** Which hue each request has. */
export class Hues {
  #numbers = new Map();
  #next = 0;

  /** [r, g, b] of a request at full shade. */
  of(id, dark) {
    let number = this.#numbers.get(id);
    if (number === undefined) {
      number = this.#next++;
      this.#numbers.set(id, number);
      if (this.#numbers.size > REMEMBERED) this.#numbers.delete(this.#numbers.keys().next().value);
    }
    const hue = 250 + number * GOLDEN_ANGLE;
    // Three tiers of lightness, so that two near hues of a full batch still differ.
    const tier = [0, -0.06, 0.06][Math.floor(number / 8) % 3];
    return dark ? fromOklch(0.74 + tier, 0.13, hue) : fromOklch(0.6 + tier, 0.14, hue);
  }
}

/** A request's colour by how full its block is: index 0 to 15. */
export function shades(full, ground) {
  return Array.from({ length: FILL_LEVELS }, (_, level) =>
    mix(ground, full, 0.3 + (0.7 * level) / (FILL_LEVELS - 1)));
}

export function shadeOf(fill) {
  return (fill * (FILL_LEVELS - 1) + 127) >> 8;
}
