// A decision, rule by rule: what each condition asked, what it met, and which rule decided.

import { track } from "./charts.js";
import { h } from "./dom.js";
import { score } from "./format.js";
import { actionBadge } from "./requests.js";

const STAGES = { prompt: "On the prompt", stream: "While it answered", output: "On the answer" };
const MARKS = { true: "yes", false: "no", null: "unknown" };

/** rules: as the request's page has them, each with the scores that it was judged on: detector -> value; `answer_scores`:
    the highest that each of its detectors gave the whole answer. */
export function ruleList(rules) {
  const stages = Object.keys(STAGES).filter((stage) => rules.some((one) => one.stage === stage));
  return stages.map((stage) => [
    stages.length > 1 || stage !== "prompt" ? h("h3", {}, STAGES[stage]) : null,
    h("ol", { class: "rules" }, rules.filter((one) => one.stage === stage).map(rule)),
  ]);
}

function rule(one) {
  const came = !one.judged ? "not judged" : one.hit ? "hit" : one.on_error ? "unknown" : one.armed ? "armed" : "no hit";
  return h(
    "li",
    { class: `rule came-${came.replace(" ", "-")}${one.decided ? " decided" : ""}` },
    h(
      "div",
      { class: "head" },
      h("span", { class: "came" }, came),
      h("strong", {}, one.name),
      actionBadge(one.action),
      one.on_error && one.does !== one.action && h("span", { class: "soft" }, `on_error: ${one.does}`),
      one.mode === "shadow" && h("span", { class: "soft" }, "shadow"),
      h("span", { class: "soft number" }, `severity ${one.severity}`),
      one.decided && h("span", { class: "decides" }, "decides"),
    ),
    one.condition && h("ul", { class: "conditions" }, condition(one.condition, one)),
    one.condition === null && h("p", { class: "soft" }, one.reason),
    one.on_error && h("p", { class: "soft" }, one.reason),
  );
}

function condition(node, one) {
  const holds = one.judged ? MARKS[node.holds] : "–";
  if (node.parts.length > 0) {
    return h(
      "li",
      { class: `holds-${holds}` },
      h("span", { class: "holds" }, holds),
      h("span", { class: "form" }, { all: "all of", any: "any of", not: "not" }[node.form]),
      h("ul", { class: "conditions" }, node.parts.map((part) => condition(part, one))),
    );
  }
  if (node.form === "status") {
    return h("li", { class: `holds-${holds}` }, h("span", { class: "holds" }, holds), `${node.detector} is ${node.status}`);
  }
  const value = one.scores[node.detector];
  const [low, high] = [node.at_least?.value ?? 0, node.below?.value ?? 1];
  const bounds = [node.at_least, node.below].map((one) => one?.value);
  const told = score(value, ...bounds);
  const asked = [bound("≥", node.at_least, value), bound("<", node.below, value)].filter(Boolean).join(" and ");
  const answer = one.answer_scores[node.detector];
  const more = answer !== undefined && answer !== value ? `answer's highest ${score(answer, value, ...bounds)}` : null;
  return h(
    "li",
    { class: `holds-${holds}` },
    h("span", { class: "holds" }, holds),
    h("span", { class: "asked" }, node.detector, " ", h("b", { class: "number" }, told), " ", h("span", { class: "soft" }, asked, more && `, ${more}`)),
    track(value, { zones: [[low, high]], label: `${node.detector} ${told}, ${asked}` }),
    value === null || value === undefined ? h("span", { class: "soft why" }, node.reason) : null,
  );
}

const bound = (sign, given, value) => given && `${sign} ${given.value === null ? "" : score(given.value, value)}${given.name ? ` (${given.name})` : ""}`;
