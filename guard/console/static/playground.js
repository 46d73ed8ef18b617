// One prompt through two policies, side by side.

import { get, post } from "./api.js";
import { h, show } from "./dom.js";
import { ms } from "./format.js";
import { detectorList } from "./request.js";
import { actionBadge } from "./requests.js";
import { ruleList } from "./rules.js";

// What was written stays while the page is open.
const written = { system: "You are a helpful assistant.", prompt: "", model: "", first: "", second: "", max_tokens: 128, temperature: 0, runs: null };

export function playgroundView(root, { fail }) {
  let gone = false;
  show(root, h("p", { class: "state" }, "…"));
  let run = () => {};
  get("/playground")
    .then((choices) => !gone && (run = draw(root, choices)))
    .catch((error) => !gone && fail(error, root));
  return {
    title: "Playground",
    keys: { r: () => run() },
    leave() {
      gone = true;
    },
  };
}

function draw(root, { policies, models }) {
  const names = policies.map((one) => one.name);
  written.model = models.includes(written.model) ? written.model : (models[0] ?? "");
  written.first = names.includes(written.first) ? written.first : names[0];
  written.second = names.includes(written.second) ? written.second : (names[1] ?? names[0]);
  const results = h("div", { class: "columns even" });
  const status = h("span", { class: "soft", role: "status" });
  const button = h("button", { type: "submit", class: "main" }, "Run");
  const form = h(
    "form",
    { class: "playground", on: { submit: (event) => { event.preventDefault(); run(); }, keydown: (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); run(); } } } },
    h("label", {}, "System message", area("system", 2)),
    h("label", {}, "Prompt", area("prompt", 4, "Ask something, or attack")),
    h(
      "div",
      { class: "options" },
      h("label", {}, "Model", choice("model", models)),
      h("label", {}, "Policy", choice("first", names)),
      h("label", {}, "against", choice("second", names)),
      h("label", {}, "Tokens", number("max_tokens", { min: 1, max: 2048, step: 1 })),
      h("label", {}, "Temperature", number("temperature", { min: 0, max: 2, step: 0.1 })),
      button,
      status,
    ),
  );
  show(root, h("h1", { class: "hidden" }, "Playground"), form, results);
  if (written.runs) show(results, written.runs.map(outcome));

  async function run() {
    if (button.disabled) return;
    if (written.prompt === "") return form.querySelector("[name=prompt]").focus();
    button.disabled = true;
    show(status, "running …");
    const began = performance.now();
    try {
      const { runs } = await post("/playground", {
        policies: written.first === written.second ? [written.first] : [written.first, written.second],
        model: written.model,
        system: written.system,
        prompt: written.prompt,
        max_tokens: Number(written.max_tokens),
        temperature: Number(written.temperature),
      });
      written.runs = runs;
      show(results, runs.map(outcome));
      show(status, ms(performance.now() - began));
    } catch (error) {
      show(status, error.message);
    } finally {
      button.disabled = false;
    }
  }
  return run;
}

function outcome({ status, answer, error, request }) {
  const { entry } = request;
  return h(
    "section",
    { class: "outcome" },
    h("div", { class: "head" }, h("h2", {}, entry.policy), actionBadge(entry.action), h("span", { class: "soft number" }, `${status}, ${ms(entry.timings_ms.total)}`), h("a", { href: `#/requests/${entry.request_id}` }, "look inside")),
    h("p", { class: "why" }, entry.rule ? [h("strong", {}, entry.rule), ": ", entry.reason] : (entry.reason ?? "")),
    h("blockquote", { class: error ? "error" : "" }, error ?? (answer || "(an empty answer)")),
    h("h3", {}, "Scores"),
    detectorList(request.detectors),
    h("h3", {}, "Rules"),
    ruleList(request.rules),
  );
}

const keep = (event) => { written[event.target.name] = event.target.value; };

function area(name, rows, placeholder = "") {
  const box = h("textarea", { name, rows, placeholder, spellcheck: "false", on: { input: keep } });
  box.value = written[name];
  return box;
}

function number(name, limits) {
  return h("input", { type: "number", name, value: written[name], ...limits, on: { input: keep } });
}

function choice(name, values) {
  return h("select", { name, on: { change: keep } }, values.map((value) => h("option", { value, selected: value === written[name] }, value)));
}
