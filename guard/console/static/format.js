// Numbers and times as the console writes them.

const FEWEST = 3;
const ENOUGH = 17;

/** A score or threshold: never so few decimals that it looks like another number that it stands beside, or like 1.
    As many decimals keep the order of two numbers, so what does not look equal is on its own side. */
export function score(value, ...beside) {
  if (value === null || value === undefined) return "–";
  const others = [...beside, 1].filter((other) => other !== null && other !== undefined && other !== value);
  for (let decimals = FEWEST; decimals < ENOUGH; decimals += 1) {
    if (others.every((other) => other.toFixed(decimals) !== value.toFixed(decimals))) return value.toFixed(decimals);
  }
  return String(value);
}

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
