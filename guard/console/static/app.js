// The console: who is signed in, which view is shown, and keys that work everywhere.

import { get, signIn, signOut, signedInHere } from "./api.js";
import { calibrationView } from "./calibration.js";
import { h, show } from "./dom.js";
import { playgroundView } from "./playground.js";
import { requestView } from "./request.js";
import { requestsView } from "./requests.js";
import { store } from "./store.js";

const bar = document.getElementById("bar");
const main = document.getElementById("main");
const help = document.getElementById("help");
const alert_ = document.getElementById("alert");
const policy = h("span", { class: "policy soft" });

const TOLD_EVERY_MS = 10_000;

const VIEWS = [
  ["/requests", "Requests", "1"],
  ["/playground", "Playground", "2"],
  ["/calibration", "Calibration", "3"],
];

const SHORTCUTS = [
  ["1 2 3", "requests, playground, calibration"],
  ["j k or ↓ ↑", "next and previous request"],
  ["Enter", "open it"],
  ["Esc", "back to the list"],
  ["p", "pause the list, and go on"],
  ["f", "to the filters"],
  ["i", "look inside a request: its tokens"],
  ["← →", "along the tokens"],
  ["r, Ctrl+Enter", "run the playground"],
  ["?", "this list"],
];

let view = null;
let signedIn = false;

const go = (path) => { location.hash = path; };

function route() {
  if (!signedIn) return;
  const path = location.hash.slice(1) || "/requests";
  const id = /^\/requests\/([0-9a-f]+)$/.exec(path)?.[1];
  view?.leave();
  const context = { go, fail };
  if (id !== undefined) view = requestView(main, context, id);
  else if (path === "/playground") view = playgroundView(main, context);
  else if (path === "/calibration") view = calibrationView(main, context);
  else view = requestsView(main, context);
  document.title = `${view.title} · mia-guard`;
  for (const link of bar.querySelectorAll("nav a")) {
    const here = path.startsWith(link.hash.slice(1));
    if (here) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (view.title !== "Requests") window.scrollTo(0, 0); // the list goes to the line that was looked at
}

/** What a view shows when it cannot show itself. */
function fail(error, root) {
  if (error.status === 401) return showSignIn();
  show(root, h("p", { class: "state", role: "alert" }, error.message));
}

/** What counts now. A page stays open for days, so it is asked again and again. */
function tell(overview) {
  show(policy, overview.workers > 1 && `${overview.workers} workers, `, overview.default);
  const told = overview.policies_error ? `A change of the policies is not in force, those before it are: ${overview.policies_error}` : "";
  if (alert_.textContent !== told) show(alert_, told);
}

function drawBar() {
  show(
    bar,
    h("a", { class: "mark", href: "#/requests" }, "mia-guard"),
    h("nav", { "aria-label": "Views" }, VIEWS.map(([path, name, key]) => h("a", { href: `#${path}`, "aria-keyshortcuts": key }, name))),
    h("span", { class: "space" }),
    policy,
    h("button", { type: "button", class: "quiet", "aria-label": "Keyboard shortcuts", on: { click: () => help.showModal() } }, "?"),
    h("button", { type: "button", class: "quiet", on: { click: leave } }, "Sign out"),
  );
}

async function leave() {
  try {
    await signOut();
    location.reload(); // with all that was written or looked at: somebody else may sign in
  } catch {
    showSignIn("The guard does not answer: the session goes on there until it ends by itself.");
  }
}

function showSignIn(message = "") {
  signedIn = false;
  store.stop();
  store.clear();
  view?.leave();
  view = null;
  document.title = "Sign in · mia-guard";
  show(bar);
  show(alert_);
  const field = h("input", { type: "password", name: "key", autocomplete: "current-password", required: true, "aria-describedby": "about" });
  const status = h("p", { class: "state", role: "alert" }, message);
  const form = h(
    "form",
    { class: "sign-in", on: { submit } },
    h("h1", {}, "mia-guard"),
    h("input", { hidden: true, name: "user", autocomplete: "username", value: "admin" }), // for stores of passwords
    h("label", {}, "Admin key", field),
    h("button", { type: "submit", class: "main" }, "Sign in"),
    status,
    h("p", { id: "about", class: "soft" }, "A key that ", h("code", {}, "guard keys create --admin"), " printed. The browser gets a session of twelve hours in its place."),
  );
  show(main, form);
  field.focus();

  async function submit(event) {
    event.preventDefault();
    try {
      await signIn(field.value.trim());
      await begin();
    } catch (error) {
      show(status, error.status === 401 ? "This is no admin key." : error.message);
      field.select();
    }
  }
}

async function begin() {
  const overview = await get("/overview");
  signedIn = true;
  drawBar();
  tell(overview);
  store.start();
  route();
}

function drawHelp() {
  show(
    help,
    h("h2", {}, "Keys"),
    h("dl", {}, SHORTCUTS.map(([keys, what]) => [h("dt", {}, h("kbd", {}, keys)), h("dd", {}, what)])),
    h("form", { method: "dialog" }, h("button", { class: "quiet", on: { click: (event) => { event.preventDefault(); help.close(); } } }, "Close")),
  );
}

document.addEventListener("keydown", (event) => {
  if (!signedIn || event.ctrlKey || event.metaKey || event.altKey || help.open) return;
  if (event.target.closest("textarea, select, input:not([type=radio])")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const view_ = VIEWS.find(([, , key]) => key === event.key);
  const action = event.key === "?" ? () => help.showModal() : view_ ? () => go(view_[0]) : view?.keys[event.key];
  if (!action) return;
  event.preventDefault();
  action();
});

window.addEventListener("hashchange", route);
setInterval(() => signedIn && get("/overview").then((overview) => signedIn && tell(overview), () => null), TOLD_EVERY_MS);
// Not as a link, which would be another view's.
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
store.addEventListener("signed-out", () => showSignIn("The session is over."));
drawHelp();
signedInHere()
  .then((known) => (known ? begin() : showSignIn()))
  .catch((error) => showSignIn(error.message));
