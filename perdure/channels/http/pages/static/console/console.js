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
const AGAIN_MS = 3000;
const ANSWER_MS = 60_000;

const api = new Api();
/** What is shown: the address, the text of the data, and what ends its reading. */
let shown = { address: null, data: null, reading: null, timer: 0 };
/** The session that the sign-in dialog, which is open, will lead to. @type {Promise<object> | null} */
let signingIn = null;

start();

async function start() {
  byId("leave").addEventListener("click", leave);
  byId("sign-in").addEventListener("cancel", (event) => event.preventDefault());
  byId("pages").append(...Object.entries(PAGES).map(([name, { title }]) => element("li", {}, element("a", { href: `#/${name}`, "data-page": name }, title))));
  byId("operator").textContent = (await begin()).operator;
  byId("app").hidden = false;
  window.addEventListener("hashchange", () => go());
  document.addEventListener("visibilitychange", () => { if (!document.hidden) update(); });
  go();
}

/** The browser's session, or a new one. While the gateway does not answer, the page shows why, and asks again. */
async function begin() {
  for (;;) {
    try {
      const session = await api.session();
      if (session.operator !== null) return session;
      return await (session.needs_key ? signIn() : api.signIn(null));
    } catch (error) {
      byId("app").hidden = false;
      trouble(error.message);
      await new Promise((done) => setTimeout(done, AGAIN_MS));
    }
  }
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
  signingIn ??= askKey(why).finally(() => { signingIn = null; });
  return signingIn;
}

function askKey(why) {
  const dialog = byId("sign-in"), key = byId("key");
  if (why !== null) byId("sign-in-why").textContent = why;
  dialog.onclose = () => dialog.showModal(); // browsers let the second Escape close any dialog
  dialog.showModal();
  return new Promise((signedIn) => {
    dialog.querySelector("form").onsubmit = async (event) => {
      event.preventDefault();
      try {
        const session = await api.signIn(key.value.trim());
        key.value = "";
        dialog.onclose = null;
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
    reload: () => {
      getSelection().removeAllRanges(); // else `render` waits for the reader
      return update();
    },
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
  byId("pages").querySelector("[aria-current]").scrollIntoView({ block: "nearest", inline: "nearest" });
  const focused = document.activeElement, label = focused.getAttribute("aria-label");
  const loses = byId("tools").contains(focused) || byId("page").contains(focused);
  byId("tools").replaceChildren(...(page.tools?.(context) ?? []));
  byId("page").replaceChildren(element("p", { className: "none" }, "Loading…"));
  if (loses) ([...byId("tools").querySelectorAll("[name]")].find((each) => each.getAttribute("aria-label") === label) ?? byId("main")).focus();
  trouble("");
  return update();
}

/** Read the page's data, and show them if they have changed. */
async function update() {
  const mine = shown;
  clearTimeout(mine.timer);
  mine.reading?.abort();
  const reading = mine.reading = new AbortController();
  const late = setTimeout(() => reading.abort(new Error(`The gateway has not answered for ${ANSWER_MS / 1000} s.`)), ANSWER_MS);
  try {
    const found = await mine.page.load(api, mine.context, reading.signal);
    if (mine !== shown || reading !== mine.reading) return;
    trouble("");
    render(mine, found);
  } catch (error) {
    if (mine !== shown || error.name === "AbortError") return;
    if (error instanceof Refused && error.status === 401) {
      byId("operator").textContent = (await signIn(error.message)).operator;
      return void update();
    }
    if (mine.data === null) byId("page").replaceChildren();
    trouble(error.message);
  } finally {
    clearTimeout(late);
  }
  if (mine === shown && reading === mine.reading) mine.timer = setTimeout(() => (document.hidden ? null : update()), mine.page.every);
}

function trouble(text) {
  byId("trouble").textContent = text;
  byId("trouble").hidden = !text;
}

/** Replace what is shown, except what the reader has opened, is in, or has scrolled. */
function render(mine, found) {
  const text = JSON.stringify(found), box = byId("page"), changed = text !== mine.data;
  if (changed && mine.data !== null && isHeld(box)) return;
  byId("fresh").textContent = `as of ${new Date().toLocaleTimeString()}`;
  if (!changed) {
    for (const each of box.querySelectorAll("time")) each.textContent = ago(each.dateTime).textContent;
    return;
  }
  mine.data = text;
  const opened = [...box.querySelectorAll("details[open][data-key]")];
  const focused = box.contains(document.activeElement) ? placeOf(document.activeElement, CONTROLS) : null;
  const scrolled = [...box.querySelectorAll(SCROLLED)].filter((each) => each.scrollLeft || each.scrollTop)
    .map((each) => ({ place: placeOf(each, SCROLLED), left: each.scrollLeft, top: each.scrollTop }));
  box.replaceChildren(...mine.page.show(found, mine.context).filter((each) => each !== null));
  for (const each of opened) box.querySelector(`details[data-key="${CSS.escape(each.dataset.key)}"]`)?.replaceWith(each);
  for (const { place: where, left, top } of scrolled) nodeAt(where)?.scrollTo({ left, top, behavior: "instant" });
  if (focused !== null) (nodeAt(focused) ?? byId("main")).focus({ preventScroll: true });
}

/** Whether the reader selects text, or is in a dialog, which returns the focus to the button that opened it. */
function isHeld(box) {
  const selection = getSelection(), selects = !selection.isCollapsed && box.contains(selection.anchorNode);
  if (selects) byId("fresh").textContent = "not updated while text is selected";
  return selects || byId("sure").open;
}

const CONTROLS = "a, button, summary, .scroll", SCROLLED = ".scroll, pre";

/** Where a node is: in the nearest part with a key, or in the page, and its number among the nodes of its kind there. */
function placeOf(node, kind) {
  const within = node.closest("[data-key], #page");
  return { key: within.dataset.key, kind, at: [...within.querySelectorAll(kind)].indexOf(node) };
}

function nodeAt({ key, kind, at }) {
  const within = key === undefined ? byId("page") : byId("page").querySelector(`[data-key="${CSS.escape(key)}"]`);
  return within?.querySelectorAll(kind)[at];
}
