// What the page shows of one event of the feed: decodes it, and adds no opinion.
//
// The form is documented in server/dashboard_feed.py and engine/watch.py.

const FREE = 0;
export const UNLISTED = 65534;
const SEVERAL = 65535;
const SHARED = 1;
export const CACHED = 2;
const HOST = 4;

function bytes(text) {
  const binary = atob(text);
  const found = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) found[i] = binary.charCodeAt(i);
  return found;
}

/** Little-endian words, however aligned and on whatever machine. */
function words(text, width) {
  const raw = bytes(text);
  const view = new DataView(raw.buffer);
  const found = new (width === 2 ? Uint16Array : Uint32Array)(raw.length / width);
  for (let i = 0; i < found.length; i++) {
    found[i] = width === 2 ? view.getUint16(2 * i, true) : view.getUint32(4 * i, true);
  }
  return found;
}

/** The blocks of one pool. */
export class Blocks {
  constructor(map, rows) {
    this.total = map.blocks;
    this.rows = rows; // row number -> key of its request
    this.owner = words(map.owner, 2);
    this.fill = bytes(map.fill);
    this.flags = bytes(map.flags);
    this.group = map.group ? bytes(map.group) : null;
  }

  get length() {
    return this.owner.length;
  }

  /** The request that alone holds a block: its key, or null. */
  request(block) {
    const owner = this.owner[block];
    return owner === FREE || owner >= UNLISTED ? null : this.rows[owner - 1] ?? null;
  }

  shared(block) {
    return (this.flags[block] & SHARED) !== 0;
  }

  cached(block) {
    return (this.flags[block] & CACHED) !== 0;
  }

  swapped(block) {
    return (this.flags[block] & HOST) !== 0;
  }

  /** Whether a request holds it. Of several or none, one that is not shared is only cached. */
  held(block) {
    const owner = this.owner[block];
    return owner !== FREE && (owner !== SEVERAL || this.shared(block));
  }

  /** Blocks by what they hold; the null block is none of them. */
  sums() {
    const sums = { full: 0, partial: 0, shared: 0, cached: 0, free: 0 };
    for (let block = 1; block < this.length; block++) {
      if (!this.held(block)) sums[this.cached(block) ? "cached" : "free"]++;
      else if (this.shared(block)) sums.shared++;
      else sums[this.fill[block] === 255 ? "full" : "partial"]++;
    }
    return sums;
  }
}

/** One choice of one request is one row; its key is unique, its name is what clients know. */
function requestOf(row, name, now, several) {
  const marks = marksOf(row);
  const end = row.state === "finished" ? marks.at(-1)?.time ?? now : now;
  return {
    key: `${row.id}/${row.choice}`, id: row.id, name: several ? `${name} [${row.choice}]` : name,
    state: row.state, prompt: row.prompt_tokens, output: row.output_tokens, cached: row.cached,
    computed: row.computed, most: row.max_tokens, blocks: row.blocks, preempted: row.preemptions,
    priority: row.priority, reason: row.reason, marks,
    age: marks.length ? end - marks[0].time : 0,
  };
}

/** Marks with the phase that begins with each. */
function marksOf(row) {
  let decoding = false;
  return row.marks.map(([name, time, tokens]) => {
    if (name === "first_token") decoding = true;
    const phase = {
      arrived: "waiting", planned: "prefill", prefill: decoding ? "decode" : "prefill", first_token: "decode",
      preempted: "waiting", swapped: "swapped", resumed: decoding ? "decode" : "prefill", finished: null,
    }[name];
    const computed = tokens >= 0 ? `, ${tokens} tokens computed` : "";
    const text = {
      arrived: "arrived", planned: "first planned", prefill: `prefill${computed}`, first_token: "first token",
      preempted: "preempted, its blocks released", swapped: "swapped out to the host", resumed: "resumed",
      finished: row.reason ? `finished (${row.reason})` : "finished",
    }[name];
    return { name, time, tokens, phase, text: text ?? name };
  });
}

/** The tables of the followed request: [{label, onHost, blocks}], blocks in the order of tokens. */
function tablesOf(followed, groups) {
  if (!followed) return [];
  return followed.tables.flatMap((table) => table.groups.map((packed, i) => {
    const parts = [];
    if (followed.tables.length > 1) parts.push(`choice ${table.choice}`);
    if (table.groups.length > 1) {
      const { kind, window } = groups?.[i] ?? { kind: `group ${i}` };
      parts.push(window ? `window of ${window}` : `${kind} attention`);
    }
    return { label: parts.join(", "), onHost: table.on_host, blocks: Array.from(words(packed, 4)).filter(Boolean) };
  }));
}

/** The page's view of an update, whose `snapshot` is null while its engine does not answer. */
export function decode(update) {
  const { snapshot, settings, names } = update;
  const view = {
    time: update.time, engine: update.engine, engines: update.engines, settings, rates: update.rates,
    latencies: update.latencies, follow: update.follow, followEngine: update.follow_engine ?? null, followed: null, queue: null, requests: [],
    unlisted: 0, changes: [], pool: null, host: null, now: 0,
  };
  if (!snapshot) return view;
  const rows = snapshot.requests;
  const choices = new Map();
  for (const row of rows) choices.set(row.id, Math.max(choices.get(row.id) ?? 0, row.choice));
  view.now = snapshot.now;
  view.queue = snapshot.queue;
  view.requests = rows.map((row) =>
    requestOf(row, names[row.id] ?? row.id, snapshot.now, choices.get(row.id) > 0));
  const keys = view.requests.map((request) => request.key);
  view.unlisted = snapshot.unlisted;
  view.changes = snapshot.changes;
  view.pool = new Blocks(snapshot.pool, keys);
  view.host = snapshot.host && new Blocks(snapshot.host, keys);
  view.freeBlocks = snapshot.free_blocks;
  view.cachedBlocks = snapshot.cached_blocks;
  if (update.followed) {
    view.followed = { id: update.followed.id, tables: tablesOf(update.followed, settings?.groups) };
  }
  return view;
}

/** The values of a view that are kept over time; null where there is none. */
export function valuesOf(view) {
  const { rates, queue, latencies } = view;
  const values = {};
  if (rates) {
    Object.assign(values, {
      output: rates.output_tokens_per_second, prompt: rates.prompt_tokens_per_second,
      busy: rates.device_utilization, written: rates.kv_usage, held: rates.kv_blocks_usage,
      fragmentation: rates.fragmentation, hits: rates.hit_rate, preemptions: rates.preemptions,
      displaced: rates.displaced, swapped_out: rates.swapped_out_blocks,
    });
  }
  if (queue) {
    Object.assign(values, {
      running: queue.running, waiting: queue.waiting + queue.preempted, swapped: queue.swapped,
    });
  }
  for (const kind of ["ttft", "itl", "e2e"]) {
    for (const at of ["p50", "p90", "p99"]) values[`${kind}_${at}`] = latencies?.[kind][at] ?? null;
  }
  return values;
}
