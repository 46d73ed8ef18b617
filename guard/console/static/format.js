// Numbers and times as the console writes them.

export const score = (value) => (value === null || value === undefined ? "–" : value.toFixed(3));

export const percent = (value, digits = 1) => `${(value * 100).toFixed(digits)} %`;

export function ms(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 1000) return `${(value / 1000).toFixed(value >= 100_000 ? 0 : 2)} s`;
  return `${value >= 100 ? value.toFixed(0) : value.toFixed(1)} ms`;
}

const CLOCK = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
const DAY = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });

export const clock = (iso) => CLOCK.format(new Date(iso));
export const moment = (iso) => DAY.format(new Date(iso));

export const plural = (count, one, many = `${one}s`) => `${count} ${count === 1 ? one : many}`;
