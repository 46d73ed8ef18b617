// Small pictures of numbers, as SVG and CSS. Everything that they show stands beside them as text as well.

import { h, s } from "./dom.js";
import { ms, percent, score } from "./format.js";

const clamp = (value) => Math.min(1, Math.max(0, value));
const at = (value) => `${(clamp(value) * 100).toFixed(2)}%`;

/** A track from 0 to 1 with the score on it; `zones` are [from, to) in which a rule hits, `ticks` are thresholds. */
export function track(value, { zones = [], ticks = [], label = "" } = {}) {
  const known = value !== null && value !== undefined;
  return h(
    "span",
    { class: "track", role: "img", "aria-label": label || (known ? `score ${score(value)} of 1` : "no score") },
    zones.map(([from, to]) => h("i", { class: "zone", style: { left: at(from), right: at(1 - clamp(to)) } })),
    known && h("i", { class: "fill", style: { width: at(value) } }),
    ticks.map((tick) => h("i", { class: "tick", style: { left: at(tick) } })),
    known && h("i", { class: "mark", style: { left: at(value) } }),
  );
}

/** Durations side by side, each from its start. rows: {name, start, length, note}, in milliseconds. */
export function waterfall(rows, total) {
  const whole = Math.max(total, 0.001);
  return h(
    "dl",
    { class: "waterfall" },
    rows.map(({ name, start, length, note }) => [
      h("dt", { title: note }, name),
      h(
        "dd",
        {},
        h("span", { class: "lane" }, h("i", { style: { left: at(start / whole), width: at(length / whole) } })),
        h("span", { class: "number" }, ms(length)),
      ),
    ]),
  );
}

/** Lines over tokens. series: {name, points: [[x, y or null]]}; y from 0 to 1; levels: {name, value}. */
export function lines(series, { levels = [], label, height = 120, band = null } = {}) {
  const width = 640;
  const xs = series.flatMap((one) => one.points.map(([x]) => x));
  const from = Math.min(...xs, 0);
  const to = Math.max(...xs, from + 1);
  const x = (value) => 4 + ((value - from) / (to - from)) * (width - 8);
  const y = (value) => 4 + (1 - clamp(value)) * (height - 8);
  return s(
    "svg",
    { class: "lines", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
    band && s("rect", { class: "band", x: x(band[0]), width: Math.max(1, x(band[1]) - x(band[0])), y: 0, height }),
    levels.map((one) => s("line", { class: "level", x1: 4, x2: width - 4, y1: y(one.value), y2: y(one.value) })),
    series.map((one, i) => s("path", { class: `line line-${i}`, d: path(one.points, x, y) })),
  );
}

function path(points, x, y) {
  let drawn = "";
  let pen = "M";
  for (const [place, value] of points) {
    if (value === null || value === undefined) {
      pen = "M";
      continue;
    }
    drawn += `${pen}${x(place).toFixed(1)} ${y(value).toFixed(1)}`;
    pen = "L";
  }
  return drawn || "M0 0";
}

/** Operating points: share of attacks caught over share of benign ones hit, square-rooted so that small rates show. */
export function operating(points, label) {
  const [width, height, edge] = [300, 220, 34];
  const x = (value) => edge + Math.sqrt(clamp(value)) * (width - edge - 8);
  const y = (value) => 8 + (1 - clamp(value)) * (height - edge - 8);
  const sorted = [...points].sort((a, b) => a.fpr - b.fpr);
  const names = [];
  for (const one of [...sorted].reverse()) {
    const place = { name: one.name, x: x(one.fpr) + 7, y: y(one.tpr) + 13 };
    const near = names.at(-1);
    if (near && near.x - place.x < 48 && place.y - near.y < 11) place.y = near.y + 11;
    names.push(place);
  }
  const ends = [[0, 0], ...sorted.map((one) => [one.fpr, one.tpr]), [1, 1]];
  return s(
    "svg",
    { class: "operating", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label },
    [0.01, 0.05, 0.2, 0.5, 1].map((value) => [
      s("line", { class: "grid", x1: x(value), x2: x(value), y1: 8, y2: height - edge }),
      s("text", { x: x(value), y: height - edge + 14, "text-anchor": value === 1 ? "end" : "middle" }, percent(value, 0)),
    ]),
    [0, 0.5, 1].map((value) => [
      s("line", { class: "grid", x1: edge, x2: width - 8, y1: y(value), y2: y(value) }),
      s("text", { x: edge - 5, y: y(value) + 4, "text-anchor": "end" }, `${value * 100}`),
    ]),
    s("text", { x: width - 8, y: height - 5, "text-anchor": "end" }, "benign rows hit"),
    s("text", { x: 4, y: height - 5 }, "% caught ↑"),
    s("path", { class: "line line-0", d: path(ends, x, y) }),
    sorted.map((one) => [
      one.low !== undefined && s("line", { class: "interval", x1: x(one.low), x2: x(one.high), y1: y(one.tpr), y2: y(one.tpr) }),
      s("circle", { class: "point", cx: x(one.fpr), cy: y(one.tpr), r: 3.5 }),
    ]),
    names.map((one) => s("text", { class: "name", x: one.x, y: Math.min(one.y, height - edge - 3) }, one.name)),
  );
}

/** How many scores fell where, from 0 to 1, with thresholds. */
export function histogram(counts, levels, label) {
  const [width, height] = [300, 64];
  const most = Math.max(...counts, 1);
  const step = width / counts.length;
  return s(
    "svg",
    { class: "histogram", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
    counts.map((count, i) => {
      const tall = count === 0 ? 0 : Math.max(2, (Math.log1p(count) / Math.log1p(most)) * (height - 4));
      return s("rect", { class: "bin", x: i * step + 0.5, width: step - 1, y: height - tall, height: tall });
    }),
    levels.map((one) => s("line", { class: "level", x1: one.value * width, x2: one.value * width, y1: 0, y2: height })),
  );
}
