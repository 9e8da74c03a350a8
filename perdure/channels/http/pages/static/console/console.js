/** The console: signs in, goes from page to page by the address, and reads the page's data again every few seconds. */

import { byId, element } from "../chat/elements.js";
import { actions } from "./actions.js";
import { Api, Refused } from "./api.js";
import { approvals } from "./approvals.js";
import { run, runs } from "./cases.js";
import { condition, pauses } from "./condition.js";
import { deliveries } from "./deliveries.js";
import { memories } from "./memories.js";
import { ago } from "./parts.js";
import { sessions } from "./sessions.js";
import { turn, turns } from "./turns.js";
import { breakers, cost, schedules } from "./upkeep.js";

/**
 * A page: `load` reads its data, `show` makes nodes of them, and `tools` those above them that updates leave alone.
 * `every`: milliseconds between updates.
 * @typedef {{ title: string, every: number, load: Function, show: Function, tools?: Function }} Page
 */

/** The pages in the order of the list. @type {Record<string, Page>} */
const PAGES = { status: condition, sessions, turns, approvals, deliveries, memories, runs, breakers, schedules, pauses, cost, actions };
/** The pages of one object, by the page of the list in whose place they are. @type {Record<string, Page>} */
const OF_ONE = { turns: turn, runs: run };
const FIRST = "status";

const api = new Api();
/** What is shown: the address, the text of the data, and what ends its reading. */
let shown = { address: null, data: null, reading: null, timer: 0 };

start();

async function start() {
  byId("leave").addEventListener("click", leave);
  window.addEventListener("hashchange", () => go());
  document.addEventListener("visibilitychange", () => { if (!document.hidden && !byId("app").hidden) update(); });
  let session = await api.session();
  if (session.operator === null) session = session.needs_key ? await signIn() : await api.signIn(null);
  byId("operator").textContent = session.operator;
  byId("app").hidden = false;
  byId("pages").append(...Object.entries(PAGES).map(([name, { title }]) => element("li", {}, element("a", { href: `#/${name}`, "data-page": name }, title))));
  go();
}

/** Sign out. Without a session, or after one that has ended, the page asks for a key. */
async function leave() {
  try {
    await api.signOut();
  } catch (error) {
    if (!(error instanceof Refused) || error.status !== 401) return void trouble(`Not signed out: ${error.message}`);
  }
  location.reload();
}

/** Ask for an admin key until the gateway accepts one; the session. */
function signIn(why = null) {
  const dialog = byId("sign-in"), key = byId("key");
  if (why !== null) byId("sign-in-why").textContent = why;
  dialog.addEventListener("cancel", (event) => event.preventDefault());
  dialog.showModal();
  return new Promise((signedIn) => {
    dialog.querySelector("form").onsubmit = async (event) => {
      event.preventDefault();
      try {
        const session = await api.signIn(key.value.trim());
        key.value = "";
        dialog.close();
        signedIn(session);
      } catch (error) {
        byId("sign-in-why").textContent = error.message;
        byId("sign-in-why").className = "bad";
        key.select();
      }
    };
  });
}

/** The page that the address names: `#/NAME/ARGUMENT?QUERY`. */
function place() {
  const [path, query = ""] = location.hash.slice(2).split("?");
  const [name, ...rest] = path.split("/");
  const known = name in PAGES ? name : FIRST;
  const argument = rest.length ? unescaped(rest.join("/")) : null;
  return { name: known, page: (argument === null ? null : OF_ONE[known]) ?? PAGES[known], argument, query: Object.fromEntries(new URLSearchParams(query)) };
}

/** The text of a part of the address. A malformed one, which no link has, is taken as it is. */
function unescaped(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

function go() {
  const { name, page, argument, ...rest } = place();
  const context = {
    ...rest, api, argument,
    reload: () => update(),
    set: (changes) => {
      const query = Object.entries({ ...rest.query, ...changes }).filter(([, value]) => value !== "");
      location.hash = `#/${name}${argument === null ? "" : `/${encodeURIComponent(argument)}`}${query.length ? `?${new URLSearchParams(query)}` : ""}`;
    },
    go: (address) => { location.hash = `#/${address}`; },
  };
  shown.reading?.abort();
  clearTimeout(shown.timer);
  shown = { address: location.hash, page, context, data: null, reading: null, timer: 0 };
  byId("title").textContent = page.title;
  document.title = `${page.title} · perdure console`;
  for (const link of byId("pages").querySelectorAll("a")) {
    if (link.dataset.page === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  byId("tools").replaceChildren(...(page.tools?.(context) ?? []));
  byId("page").replaceChildren(element("p", { className: "none" }, "Loading…"));
  trouble("");
  return update();
}

/** Read the page's data, and show them if they have changed. */
async function update() {
  const mine = shown;
  clearTimeout(mine.timer);
  mine.reading?.abort();
  const reading = mine.reading = new AbortController();
  try {
    const found = await mine.page.load(api, mine.context, reading.signal);
    if (mine !== shown || reading !== mine.reading) return;
    trouble("");
    byId("fresh").textContent = `as of ${new Date().toLocaleTimeString()}`;
    render(mine, found);
  } catch (error) {
    if (mine !== shown || error.name === "AbortError") return;
    if (error instanceof Refused && error.status === 401) {
      byId("operator").textContent = (await signIn(error.message)).operator;
      return void update();
    }
    if (mine.data === null) byId("page").replaceChildren();
    trouble(error.message);
  }
  if (mine === shown && reading === mine.reading) mine.timer = setTimeout(() => (document.hidden ? null : update()), mine.page.every);
}

function trouble(text) {
  byId("trouble").textContent = text;
  byId("trouble").hidden = !text;
}

/** Replace what is shown, except what the reader has opened, is in, or has scrolled. */
function render(mine, found) {
  const text = JSON.stringify(found), box = byId("page");
  if (text === mine.data) {
    for (const each of box.querySelectorAll("time")) each.textContent = ago(each.dateTime).textContent;
    return;
  }
  mine.data = text;
  const opened = [...box.querySelectorAll("details[open][data-key]")];
  const focused = box.contains(document.activeElement) ? placeOf(document.activeElement) : null;
  const scrolls = [...box.querySelectorAll(".scroll")].map((each) => each.scrollLeft);
  box.replaceChildren(...mine.page.show(found, mine.context).filter((each) => each !== null));
  for (const each of opened) box.querySelector(`details[data-key="${CSS.escape(each.dataset.key)}"]`)?.replaceWith(each);
  [...box.querySelectorAll(".scroll")].forEach((each, index) => { each.scrollLeft = scrolls[index] ?? 0; });
  if (focused !== null) box.querySelector(`[data-key="${CSS.escape(focused.key)}"]`)?.querySelectorAll("a, button, summary")[focused.at]?.focus();
}

/** Where the focus is: the nearest part with a key, and the number of the control in it. */
function placeOf(focused) {
  const within = focused.closest("[data-key]");
  if (within === null) return null;
  return { key: within.dataset.key, at: [...within.querySelectorAll("a, button, summary")].indexOf(focused) };
}
