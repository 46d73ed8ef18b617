// Prompt and answer token by token, coloured by what a detector found there or by what the model looked at.

import { lines } from "./charts.js";
import { h, show } from "./dom.js";
import { percent, score } from "./format.js";

const NAMES = { probe: "probability at each token", h_node: "probability at each token" };

/** inspection: tokens, answer_from, changes, layers; thresholds: detector -> name -> value. */
export function heatMap({ tokens, answer_from: answerFrom, changes, layers }, thresholds) {
  const readout = h("p", { class: "readout number", role: "status" });
  const chart = h("div", { class: "chart" });
  const spans = tokens.map((text, i) => h("span", { class: i >= answerFrom ? "token of-answer" : "token", "data-at": i }, visible(text)));
  const text = h(
    "div",
    { class: "tokens", tabindex: 0, role: "group", "aria-label": "Tokens; arrow keys move along them", on: { keydown: step, mousemove: hover, click: hover } },
    h("div", { class: "side" }, h("h3", {}, "Prompt"), h("p", {}, spans.slice(0, answerFrom))),
    spans.length > answerFrom && h("div", { class: "side" }, h("h3", {}, "Answer"), h("p", {}, spans.slice(answerFrom))),
  );
  const good = layers.filter((one) => one.values.length > 0);
  const choice = h(
    "div",
    { class: "layers", role: "radiogroup", "aria-label": "What the colours show" },
    good.map((layer, i) =>
      h("label", {}, h("input", { type: "radio", name: "layer", checked: i === 0, on: { change: () => paint(layer) } }), h("span", {}, h("b", {}, layer.detector), " ", says(layer))),
    ),
  );
  let shown = good[0] ?? null;
  let at = -1;

  function paint(layer) {
    shown = layer;
    const scale = scaleOf(layer);
    spans.forEach((span, i) => span.style.setProperty("--heat", scale(layer.values[i], i).toFixed(3)));
    const levels = layer.looks_back ? [] : Object.entries(thresholds[layer.detector] ?? {}).map(([name, value]) => ({ name, value }));
    const points = layer.values.map((value, i) => [i, layer.looks_back ? (value === null ? null : scale(value, i)) : value]);
    show(
      chart,
      lines([{ name: layer.detector, points }], { levels, height: 72, label: `${layer.detector} over the tokens`, band: spans.length > answerFrom ? [answerFrom, tokens.length - 1] : null }),
    );
    point(at < 0 ? strongest(layer) : at);
  }

  function strongest(layer) {
    const scale = scaleOf(layer);
    return layer.values.reduce((best, value, i) => (scale(value, i) > scale(layer.values[best], best) ? i : best), 0);
  }

  function point(to) {
    at = Math.min(tokens.length - 1, Math.max(0, to));
    spans.forEach((span, i) => span.classList.toggle("at", i === at));
    const value = shown?.values[at];
    const amount = value === null || value === undefined ? "not read" : shown.looks_back ? `${percent(value, 2)} of the attention` : score(value, ...Object.values(thresholds[shown.detector] ?? {}));
    show(readout, h("b", {}, `token ${at}`), " ", h("code", {}, visible(tokens[at]).replaceAll("⏎\n", "⏎")), " ", amount, shown?.looks_back && at === 0 ? ", where attention rests that is not needed; left out of the colours" : "");
  }

  function step(event) {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    point(at + by);
    spans[at].scrollIntoView({ block: "nearest" });
  }

  function hover(event) {
    const found = event.target.closest?.(".token");
    if (found) point(Number(found.dataset.at));
  }

  if (shown) paint(shown);
  const missing = layers.filter((one) => one.values.length === 0);
  return h(
    "div",
    { class: "heat" },
    changes.length > 0 && h("p", { class: "changed", role: "note" }, h("b", {}, "Not the text that was judged"), ` (${changes.join("; ")}). The values below are of the text as it was kept, so they differ from the scores that decided.`),
    choice,
    missing.map((one) => h("p", { class: "soft" }, h("b", {}, one.detector), ` ${one.reason}`)),
    shown && readout,
    shown && chart,
    text,
  );
}

const says = (layer) => (layer.looks_back ? (layer.from === "answer" ? "what the answer looked at" : "what the prompt's last token looked at") : (NAMES[layer.kind] ?? "value at each token"));

/** How strongly a token is coloured, 0 to 1. Attention is compared with the strongest token but the first. */
function scaleOf(layer) {
  if (!layer.looks_back) return (value) => value ?? 0;
  const most = Math.max(...layer.values.slice(1).map((value) => value ?? 0), 1e-9);
  return (value, i) => (i === 0 ? 0 : Math.sqrt((value ?? 0) / most));
}

const visible = (text) => (text === "" ? "·" : text.replaceAll("\n", "⏎\n").replaceAll("\t", "⇥"));
