// Series over time: one point per snapshot, the oldest dropped. A point without values is a gap.

const LONGEST = 900; // seconds; the widest choice of the page
const MOST_POINTS = 4000;

export class History {
  #times = [];
  #values = [];

  get length() {
    return this.#times.length;
  }

  add(time, values) {
    this.#times.push(time);
    this.#values.push(values);
    let old = 0;
    while (this.#times[old] < time - LONGEST) old++;
    old = Math.max(old, this.#times.length - MOST_POINTS);
    // In bulk, since removing from the front moves everything.
    if (old > 256 || this.#times.length - old > MOST_POINTS) this.#drop(old);
  }

  /** The connection ended: lines are interrupted here. */
  gap(time) {
    if (this.length && this.#values[this.length - 1] !== null) this.add(time, null);
  }

  /** [times, values] from `since` on, and one point before it. */
  from(since) {
    let low = 0;
    let high = this.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.#times[middle] < since) low = middle + 1;
      else high = middle;
    }
    const start = Math.max(0, low - 1);
    return [this.#times.slice(start), this.#values.slice(start)];
  }

  #drop(number) {
    this.#times.splice(0, number);
    this.#values.splice(0, number);
  }
}
