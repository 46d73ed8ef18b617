// The list: what ended last, as it comes, through filters.

import { track } from "./charts.js";
import { h, show } from "./dom.js";
import { clock, ms, plural, score } from "./format.js";
import { store } from "./store.js";

const ACTIONS = ["block", "route", "retry", "steer", "redact", "flag", "allow", "none"];
const ROWS = 250; // shown at first, and more at each wish: a thousand rows drawn anew every moment are slow

// What somebody chose stays while the page is open, whatever else is looked at in between.
const chosen = { actions: new Set(), policy: "", detector: "", paused: null, at: null, rows: ROWS };

store.addEventListener("cleared", () => Object.assign(chosen, { paused: null, at: null }));

/** How it ended, and why where that says more. */
const ended = ({ outcome, error_code: code }) => [outcome, code !== outcome && code].filter(Boolean).join(": ").replaceAll("_", " ");

export const actionBadge = (action) => h("span", { class: `action action-${action}` }, action);

const fits = (one) =>
  (chosen.actions.size === 0 || chosen.actions.has(one.action)) &&
  (chosen.policy === "" || one.policy === chosen.policy) &&
  (chosen.detector === "" || chosen.detector in one.scores);

const all = () => chosen.paused?.requests ?? store.requests;

/** Ids of the requests in the list as it is filtered, the newest first. */
export const listedIds = () => all().filter(fits).map((one) => one.request_id);

/** The line that the list goes back to. */
export const lookAt = (id) => { chosen.at = id; };

const workers = (numbers) => (numbers.length === 1 ? `Worker ${numbers[0]} does` : `Workers ${numbers.join(", ")} do`);

export function requestsView(root, { go }) {
  const chips = h("div", { class: "chips", role: "group", "aria-label": "Actions" });
  const policies = select("Policy", "policy", "every policy");
  const detectors = select("Detector", "detector", "every detector");
  const pause = h("button", { type: "button", class: "quiet", on: { click: toggle } });
  const state = h("p", { class: "state", role: "status" });
  const body = h("tbody");
  const more = h("button", { type: "button", class: "quiet more", on: { click: () => { chosen.rows += ROWS; draw(); } } });
  const table = h(
    "table",
    { class: "requests" },
    h("thead", {}, h("tr", {}, ["Time", "Action", "Rule", "Scores", "Policy", "Model", "Tokens", "Took"].map((name) => h("th", { scope: "col" }, name)))),
    body,
  );
  show(
    root,
    h("h1", { class: "hidden" }, "Requests"),
    h("div", { class: "filters" }, chips, policies.box, detectors.box, h("span", { class: "space" }), pause),
    state,
    table,
    more,
  );

  function select(label, field, every) {
    const input = h("select", { "aria-label": label, on: { change: () => { chosen[field] = input.value; draw(); } } });
    return {
      box: input,
      fill(names) {
        const wanted = [...new Set([...names, ...(chosen[field] ? [chosen[field]] : [])])].sort();
        if (input.dataset.names === JSON.stringify(wanted)) return;
        input.dataset.names = JSON.stringify(wanted);
        show(input, h("option", { value: "" }, every), wanted.map((name) => h("option", { value: name, selected: name === chosen[field] }, name)));
      },
    };
  }

  function toggle() {
    chosen.paused = chosen.paused === null ? { requests: [...store.requests], count: store.count } : null;
    draw();
  }

  function choose(action) {
    if (!chosen.actions.delete(action)) chosen.actions.add(action);
    draw();
  }

  function draw() {
    const told = all();
    const found = told.filter(fits);
    const count = (action) => told.filter((one) => one.action === action).length;
    const chip = document.activeElement?.dataset.action;
    show(
      chips,
      ACTIONS.filter((name) => count(name) > 0 || chosen.actions.has(name)).map((name) =>
        h(
          "button",
          { type: "button", class: `chip action-${name}`, "data-action": name, "aria-pressed": String(chosen.actions.has(name)), on: { click: () => choose(name) } },
          name,
          h("span", { class: "number" }, count(name)),
        ),
      ),
    );
    if (chip) chips.querySelector(`[data-action="${CSS.escape(chip)}"]`)?.focus({ preventScroll: true });
    policies.fill(told.map((one) => one.policy));
    detectors.fill(told.flatMap((one) => Object.keys(one.scores)));
    show(pause, chosen.paused === null ? "Pause" : "Go on");
    pause.setAttribute("aria-pressed", String(chosen.paused !== null));
    const missed = chosen.paused === null ? 0 : store.count - chosen.paused.count;
    show(
      state,
      h("i", { class: chosen.paused === null && store.reached ? "dot live" : "dot" }),
      !store.reached
        ? "The guard does not answer; trying again."
        : told.length === 0
          ? "Nothing yet. Requests show up here when they end."
          : `${plural(found.length, "request")}${found.length < told.length ? ` of ${told.length}` : ""}${chosen.paused ? `, paused; ${missed} newer` : ""}`,
      store.missing.length > 0 && h("b", {}, `. ${workers(store.missing)} not answer; requests that ended there may be missing. The ledger has them.`),
    );
    const focused = document.activeElement?.closest("tr")?.dataset.id;
    show(body, found.slice(0, chosen.rows).map(row));
    more.hidden = found.length <= chosen.rows;
    show(more, `${plural(found.length - chosen.rows, "older request")}: show more`);
    if (focused) body.querySelector(`tr[data-id="${CSS.escape(focused)}"] a`)?.focus({ preventScroll: true });
  }

  function row(one) {
    const scores = Object.entries(one.scores).filter(([name]) => chosen.detector === "" || name === chosen.detector);
    return h(
      "tr",
      { "data-id": one.request_id, class: chosen.at === one.request_id && "at", on: { click: () => go(`/requests/${one.request_id}`) } },
      h("td", { class: "time" }, h("a", { href: `#/requests/${one.request_id}`, on: { focus: () => mark(one.request_id) } }, clock(one.time))),
      h("td", {}, actionBadge(one.action), one.would !== one.action && one.would !== "none" && h("span", { class: "would", title: "with the shadow rules enforced" }, ` would ${one.would}`)),
      h("td", { class: "named" }, one.rules.join(", ") || h("span", { class: "soft" }, one.outcome !== "completed" ? ended(one) : one.action === "none" ? `no policy: ${one.passed ?? one.route}` : "")),
      h(
        "td",
        { class: "scores" },
        scores.map(([name, value]) =>
          h("span", { class: "score", title: `${name} ${score(value)}` }, h("span", { class: "name" }, name), track(value, { label: `${name} ${score(value)}` }), h("span", { class: "number" }, score(value))),
        ),
      ),
      h("td", { class: "policy" }, one.policy, one.assignment && h("span", { class: "soft" }, ` ${one.assignment}`)),
      h("td", { class: "model" }, one.model ?? ""),
      h("td", { class: "number counted" }, `${one.tokens[0] ?? "–"} → ${one.tokens[1] ?? "–"}`),
      h("td", { class: "number took" }, ms(one.total_ms)),
    );
  }

  function mark(id) {
    chosen.at = id;
    for (const one of body.rows) one.classList.toggle("at", one.dataset.id === id);
  }

  function move(by) {
    const links = [...body.querySelectorAll("td.time a")];
    if (links.length === 0) return;
    const now = links.findIndex((one) => one.closest("tr").dataset.id === chosen.at);
    links[Math.min(links.length - 1, Math.max(0, now < 0 ? 0 : now + by))].focus();
  }

  store.addEventListener("requests", draw);
  store.addEventListener("reached", draw);
  draw();
  body.querySelector("tr.at a")?.focus();
  return {
    title: "Requests",
    keys: { j: () => move(1), k: () => move(-1), ArrowDown: () => move(1), ArrowUp: () => move(-1), p: toggle, f: () => chips.querySelector("button")?.focus() },
    leave() {
      store.removeEventListener("requests", draw);
      store.removeEventListener("reached", draw);
    },
  };
}
