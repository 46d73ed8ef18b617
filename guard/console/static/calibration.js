// What is known of the active policies' detectors: how they were measured, and what they score now.

import { get } from "./api.js";
import { histogram, operating } from "./charts.js";
import { h, show } from "./dom.js";
import { percent, score } from "./format.js";

export function calibrationView(root, { fail }) {
  let gone = false;
  show(root, h("p", { class: "state" }, "…"));
  get("/calibration")
    .then((found) => !gone && draw(root, found))
    .catch((error) => !gone && fail(error, root));
  return {
    title: "Calibration",
    keys: {},
    leave() {
      gone = true;
    },
  };
}

function draw(root, { detectors, recent }) {
  show(root, h("h1", { class: "hidden" }, "Calibration"), detectors.map((one) => detector(one, recent[one.kind])));
}

function detector({ kind, config, thresholds, used }, counts) {
  const calibration = config?.calibration;
  const levels = Object.entries(thresholds).map(([name, value]) => ({ name, value }));
  return h(
    "section",
    { class: "calibration" },
    h("div", { class: "head" }, h("h2", {}, kind), h("span", { class: "soft" }, [config?.model_info.name, config?.verified === false ? "figures of others, not verified here" : calibration?.date].filter(Boolean).join(", "))),
    h("p", { class: "soft" }, "Used as ", used.map((one) => `${one.detector} in ${one.policy}`).join(", "), "."),
    calibration
      ? h("div", { class: "columns" }, h("div", {}, quality(calibration), table(calibration)), h("div", { class: "pictures" }, curve(calibration), now(counts, levels)))
      : h("div", { class: "columns" }, h("p", { class: "soft" }, config?.published ? `Published by ${config.published.by}. To measure it: ${config.published.remeasure}` : "It has no calibration file."), h("div", { class: "pictures" }, now(counts, levels))),
    calibration && h("details", {}, h("summary", {}, "How it was measured"), how(calibration)),
  );
}

function quality({ quality: own, text_baseline: text }) {
  const rows = [
    ["AUROC", (one) => `${score(one.auroc)}`, (one) => `${score(one.auroc_interval.low)} to ${score(one.auroc_interval.high)}`],
    ["AUPRC", (one) => score(one.auprc), () => ""],
    ["caught at 1 % false positives", (one) => percent(one.tpr_at_fpr_1pct, 0), (one) => `${percent(one.tpr_at_fpr_1pct_interval.low, 0)} to ${percent(one.tpr_at_fpr_1pct_interval.high, 0)}`],
  ];
  return h(
    "table",
    { class: "figures" },
    h("caption", {}, `On held-out rows, ${own.benign} benign and ${own.attack} attacks; 95 % intervals`),
    h("thead", {}, h("tr", {}, h("td"), h("th", { scope: "col" }, "this detector"), h("td"), h("th", { scope: "col" }, "the text alone"))),
    h("tbody", {}, rows.map(([name, value, interval]) => h("tr", {}, h("th", { scope: "row" }, name), h("td", { class: "number" }, value(own)), h("td", { class: "number soft" }, interval(own)), h("td", { class: "number" }, value(text))))),
  );
}

function table({ thresholds }) {
  const rows = Object.entries(thresholds).sort((a, b) => b[1].value - a[1].value);
  return h(
    "table",
    { class: "figures" },
    h("caption", {}, "Thresholds; rows that are nearly the same count as one in shares"),
    h("thead", {}, h("tr", {}, ["name", "score", "false positives", "held out", "attacks caught"].map((name) => h("th", { scope: "col" }, name)))),
    h(
      "tbody",
      {},
      rows.map(([name, one]) =>
        h(
          "tr",
          {},
          h("th", { scope: "row" }, name),
          h("td", { class: "number" }, score(one.value)),
          h("td", { class: "number" }, `${one.validation_false_positives} of ${one.validation_benign}`),
          h("td", { class: "number" }, `${one.held_out_false_positives} of ${one.held_out_benign}`, h("span", { class: "soft" }, `${one.held_out_fpr === null ? "" : `, ${percent(one.held_out_fpr)}:`} ${percent(one.held_out_fpr_interval.low)} to ${percent(one.held_out_fpr_interval.high)}`)),
          h("td", { class: "number" }, `${one.held_out_true_positives} of ${one.held_out_attack}`),
        ),
      ),
    ),
  );
}

function curve({ thresholds }) {
  const points = Object.entries(thresholds).map(([name, one]) => ({
    name,
    // What the interval is of, where the file says it.
    fpr: one.held_out_fpr ?? one.held_out_false_positives / one.held_out_benign,
    tpr: one.held_out_tpr ?? one.held_out_true_positives / one.held_out_attack,
    low: one.held_out_fpr_interval.low,
    high: one.held_out_fpr_interval.high,
  }));
  return h("figure", {}, operating(points, "attacks caught over benign rows hit"), h("figcaption", { class: "soft" }, "Measured at the named thresholds, on held-out rows"));
}

function now(scored, levels) {
  if (!scored) return h("p", { class: "soft" }, "No recent request was scored.");
  const { bins, requests } = scored;
  const scores = bins.reduce((sum, one) => sum + one, 0);
  const label = scores === requests ? `scores of the last ${requests} requests` : `${scores} scores of the last ${requests} requests`;
  return h("figure", {}, histogram(bins, levels, label), h("figcaption", { class: "soft" }, h("span", {}, "0"), h("span", {}, `${label}, logarithmic`), h("span", {}, "1")));
}

function how({ method, command, seed, versions, data, choices }) {
  return [
    h("dl", { class: "how" }, [["Method", method], ["Command", h("code", {}, command)], ["Seed", seed], ["Versions", Object.entries(versions).map(([name, version]) => `${name} ${version}`).join(", ")], ...Object.entries(choices)].map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
    h(
      "table",
      { class: "figures" },
      h("thead", {}, h("tr", {}, ["data set", "version", "licence", "rows"].map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, data.map((one) => h("tr", {}, h("th", { scope: "row" }, one.name), h("td", {}, one.version), h("td", {}, one.licence), h("td", { class: "number" }, Object.values(one.rows).flatMap(Object.values).reduce((sum, count) => sum + count, 0))))),
    ),
  ];
}
