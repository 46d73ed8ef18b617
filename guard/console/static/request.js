// One request: what was decided and why, what it took, and, where its text may be shown, what the model saw in it.

import { get, post } from "./api.js";
import { lines, track, waterfall } from "./charts.js";
import { h, show } from "./dom.js";
import { moment, ms, score } from "./format.js";
import { heatMap } from "./heat.js";
import { actionBadge, listedIds, lookAt } from "./requests.js";
import { ruleList } from "./rules.js";

export function requestView(root, { go, fail }, id) {
  const left = new AbortController(); // who leaves the page ends the engine's work for it
  let look = () => {};
  lookAt(id);
  show(root, h("p", { class: "state" }, "…"));
  get(`/requests/${id}`)
    .then((found) => !left.signal.aborted && (look = draw(root, found, left.signal)))
    .catch((error) => !left.signal.aborted && fail(error, root));

  const beside = (by) => {
    const ids = listedIds();
    const next = ids[ids.indexOf(id) + by];
    if (next !== undefined) go(`/requests/${next}`);
  };
  return {
    title: `Request ${id.slice(0, 8)}`,
    keys: { Escape: () => go("/requests"), j: () => beside(1), k: () => beside(-1), i: () => look() },
    leave() {
      left.abort();
    },
  };
}

/** The scores that a page has, by detector. */
export function detectorList(detectors) {
  return h(
    "ul",
    { class: "detectors" },
    detectors.map((one) => {
      const thresholds = Object.entries(one.thresholds).sort((a, b) => a[1] - b[1]);
      const told = score(one.value, ...Object.values(one.thresholds));
      return h(
        "li",
        {},
        h("div", { class: "head" }, h("strong", {}, one.name), h("span", { class: "soft" }, `${one.kind}, ${one.of}`), h("b", { class: "number" }, one.value === null ? one.status.replaceAll("_", " ") : told)),
        track(one.value, { ticks: thresholds.map(([, value]) => value), label: `${one.name} ${told}` }),
        thresholds.length > 0 && h("p", { class: "soft number ticks" }, thresholds.map(([name, value]) => h("span", {}, `${name} ${score(value, one.value)}`))),
        one.reason && h("p", { class: "soft" }, one.reason),
        Object.keys(one.details).length > 0 && h("p", { class: "soft number" }, Object.entries(one.details).map(([name, value]) => `${name} ${score(value)}`).join(" · ")),
      );
    }),
  );
}

function draw(root, request, left) {
  const { entry } = request;
  const told = entry.rule ? [h("strong", {}, entry.rule), ": ", entry.reason] : [entry.reason ?? entry.outcome.replaceAll("_", " ")];
  const sight = h("section", { class: "wide", "aria-label": "Text" });
  show(
    root,
    h(
      "div",
      { class: "title" },
      h("a", { href: "#/requests", class: "back", "aria-label": "Back to the requests" }, "←"),
      h("h1", {}, actionBadge(entry.action)),
      h("p", { class: "why" }, told),
    ),
    h("dl", { class: "facts" }, facts(entry).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
    h(
      "div",
      { class: "columns" },
      h("section", {}, h("h2", {}, "Rules"), request.rules.length ? ruleList(request.rules) : h("p", { class: "soft" }, "It did not come to a policy.")),
      h(
        "div",
        {},
        request.detectors.length > 0 && h("section", {}, h("h2", {}, "Scores"), detectorList(request.detectors)),
        request.course.length > 1 && h("section", {}, h("h2", {}, "Scores while it answered"), course(request)),
        h("section", {}, h("h2", {}, "Time"), waterfall(times(entry.timings_ms), entry.timings_ms.total ?? 0)),
      ),
    ),
    sight,
    request.shadow && h("section", { class: "wide" }, h("h2", {}, "Shadow: ", request.shadow.policy, " would ", request.shadow.action), ruleList(request.shadow.rules)),
    h("details", { class: "wide" }, h("summary", {}, "The ledger's line"), h("pre", {}, JSON.stringify(entry, null, 2))),
  );
  return drawText(sight, request, left);
}

function facts(entry) {
  return [
    ["Ended", `${entry.outcome.replaceAll("_", " ")}${entry.status ? ` (${entry.status})` : ""}`],
    ["When", moment(entry.time)],
    ["Policy", `${entry.policy}@${entry.policy_hash.slice(0, 12)}`],
    ["Chosen by", entry.assignment ?? "default"],
    ["Model", entry.model ?? "–"],
    ["Tokens", `${entry.tokens.prompt ?? "–"} → ${entry.tokens.completion ?? "–"}`],
    ["Key", [entry.key, entry.tenant].filter(Boolean).join(", ") || "–"],
    ["Route", `${entry.passed ?? entry.route}${entry.streamed ? ", streamed" : ""}`],
    ["Id", entry.request_id],
  ];
}

/** The ledger's durations on one axis. What happened before the request was sent is the guard's own part. */
function times(took) {
  const total = took.total ?? 0;
  const upstream = took.upstream ?? 0;
  const sent = Math.max(0, total - upstream);
  return [
    ["guard's own", 0, took.own, "the guard's own work before the first byte"],
    ["verdict", sent, took.verdict, "from sending upstream to the decision"],
    ["first readout", sent, took.upstream_first_byte, "from sending upstream to the readouts of the prompt"],
    ["model server", sent, took.upstream, "until its answer ended"],
    ["all", 0, took.total, "from the first byte in to the last byte out"],
  ]
    .filter(([, , length]) => length !== null && length !== undefined)
    .map(([name, start, length, note]) => ({ name, start, length, note }));
}

function course(request) {
  const names = [...new Set(request.course.flatMap((one) => Object.keys(one.scores)))];
  const series = names.map((name) => ({ name, points: request.course.map((one) => [one.tokens, one.scores[name] ?? null]) }));
  const levels = request.detectors.filter((one) => names.includes(one.name)).flatMap((one) => Object.entries(one.thresholds).map(([name, value]) => ({ name, value })));
  const last = request.course.at(-1).tokens;
  return [
    lines(series, { levels, label: `scores of ${names.join(", ")} over ${last} tokens` }),
    h("p", { class: "soft number ticks" }, names.map((name, i) => h("span", { class: `key key-${i}` }, `${name} ${score(series[i].points.at(-1)[1], ...levels.map((one) => one.value))}`)), h("span", {}, `over ${last} tokens`)),
  ];
}

/** What an action changes that a second reading does not do again. */
const CHANGED = {
  steer: ", without the steering that the answer was made with",
  retry: ", without the steering that the answer was made with",
  redact: ", as it came, before anything was taken out",
  route: ", by the model that was asked first",
};

/** Returns what the key for a closer look does. left: a signal, when the page is. */
function drawText(section, request, left) {
  if (request.content === null) {
    show(section, h("h2", {}, "Text"), h("p", { class: "soft" }, request.no_content));
    return () => {};
  }
  const { messages, answer, changes } = request.content;
  const notes = [...changes, ...request.content.notes];
  const status = h("span", { class: "soft", role: "status" });
  const button = h("button", { type: "button", on: { click: look } }, "Look inside");
  const place = h("div", {}, conversation(messages, answer));
  show(section, h("div", { class: "line" }, h("h2", {}, "Text"), messages.length > 0 && button, status), notes.length > 0 && h("p", { class: "soft notes" }, notes.join("; ")), place);
  let asked = false;

  async function look() {
    if (asked || messages.length === 0) return;
    asked = true;
    button.disabled = true;
    show(status, "the model reads it once more …");
    const began = performance.now();
    try {
      const found = await post(`/requests/${request.entry.request_id}/inspection`, {}, left);
      const thresholds = Object.fromEntries(request.detectors.map((one) => [one.name, one.thresholds]));
      show(place, heatMap(found, thresholds));
      place.querySelector(".tokens").focus({ preventScroll: true }); // arrow keys move along them
      place.scrollIntoView({ block: "nearest" });
      show(status, `read again in ${ms(performance.now() - began)}${CHANGED[request.entry.action] ?? ""}`);
      button.hidden = true;
    } catch (error) {
      asked = false;
      button.disabled = false;
      show(status, error.message);
    }
  }
  return look;
}

const conversation = (messages, answer) => [
  messages.map((one) => h("div", { class: "message" }, h("h3", {}, one.role), h("p", {}, textOf(one.content)))),
  answer && h("div", { class: "message" }, h("h3", {}, "answer"), h("p", {}, answer)),
];

const textOf = (content) => (typeof content === "string" ? content : JSON.stringify(content, null, 2));
