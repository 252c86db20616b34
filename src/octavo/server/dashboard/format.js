// Numbers and times as the page shows them. Nothing here touches the document.

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

/** 1234567 as 1,234,567. */
export function count(value) {
  return whole.format(Math.round(value));
}

/** Three digits that matter: 0.123, 1.23, 12.3, 123, 1,234. */
export function figure(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 100) return count(value);
  return String(Number(value.toPrecision(size >= 1 ? 3 : 2)));
}

/** A share, 0 to 1, in percent. */
export function percent(share) {
  const value = 100 * share;
  return `${value > 0 && value < 9.95 ? value.toFixed(1) : Math.round(value)}%`;
}

/** Seconds in the unit that fits. */
export function seconds(value) {
  const size = Math.abs(value);
  if (size === 0) return "0 ms";
  if (size < 0.9995) return `${figure(1000 * value)} ms`;
  if (size < 60) return `${value.toFixed(size < 9.95 ? 2 : 1)} s`;
  const minutes = Math.floor(size / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(size % 60)} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/** Seconds beside an axis. */
export function tick(value) {
  return value < 1 ? seconds(value) : `${figure(value)} s`;
}

/** How long ago, without haste: it is shown, not measured. */
export function ago(value) {
  if (value < 1) return "now";
  return value < 60 ? `${Math.floor(value)} s ago` : `${Math.floor(value / 60)} min ago`;
}

/** Block numbers as runs: 3, 7-9. */
export function runs(numbers, most = 60) {
  const parts = [];
  for (let i = 0; i < numbers.length && parts.length < most; ) {
    let last = i;
    while (numbers[last + 1] === numbers[last] + 1) last++;
    parts.push(last > i ? `${numbers[i]}\u2013${numbers[last]}` : `${numbers[i]}`);
    i = last + 1;
    if (parts.length === most && i < numbers.length) parts.push(`and ${numbers.length - i} more`);
  }
  return parts.join(", ");
}

/** `1 block`, `2 blocks`. */
export function plural(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}
