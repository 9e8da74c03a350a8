/** The parts that the console's pages are made of: tables, states, ages, links, and actions that ask first. */

import { byId, element } from "../chat/elements.js";

/**
 * A table. Each column is `[heading, cell]`, where `cell` makes a node or a text of a row; a heading that ends in "#" is
 * of numbers, and an empty one is of buttons. `key` names a row, so that the page finds it again after an update.
 * @param {string} label
 * @param {[string, (row: any) => Node | string | number | null][]} columns
 * @param {any[]} rows
 * @param {{ key?: (row: any) => string, none?: string }} options
 */
export function table(label, columns, rows, { key = null, none = "Nothing." } = {}) {
  if (!rows.length) return element("p", { className: "none" }, none);
  const numeric = ([heading]) => (heading.endsWith("#") ? "number" : "");
  const head = columns.map((column) => element("th", { scope: "col", className: numeric(column) }, column[0].replace("#", "") || element("span", { className: "hidden" }, "Actions")));
  const body = rows.map((row) => element("tr", key === null ? {} : { "data-key": key(row) },
    ...columns.map((column) => element("td", { className: numeric(column), "data-label": column[0].replace("#", "") }, shown(column[1](row))))));
  return element("div", { className: "scroll", tabIndex: 0, role: "group", "aria-label": label }, element("table", { "aria-label": label },
    element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...body)));
}

function shown(value) {
  if (value === null || value === undefined || value === "") return element("span", { className: "soft" }, "–");
  return value instanceof Node ? value : String(value);
}

const TONES = {
  done: "good", delivered: "good", alive: "good", ok: "good", closed: "good", active: "good",
  failed: "bad", down: "bad", open: "bad", gone: "bad", unknown: "bad", rejected: "bad", expired: "bad",
  running: "busy", thinking: "busy", tool_executing: "busy", applying: "busy", planning: "busy", summarizing: "busy", ending: "busy",
  waiting_approval: "warn", parked: "warn", pending: "warn", warning: "warn", half_open: "warn", accepted: "warn", asked: "warn",
};

/** A state as a badge: its text says it, its colour repeats it. */
export const state = (text, tone = TONES[text] ?? "plain") =>
  element("span", { className: `state ${tone}` }, text.replaceAll("_", " "));

const UNITS = [[90, 1, "s"], [7200, 60, "min"], [172800, 3600, "h"], [Infinity, 86400, "d"]];

/** A number of seconds for people, such as "3 min". */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (seconds < 10 && seconds % 1) return `${seconds.toFixed(seconds < 1 ? 2 : 1)} s`;
  const [, unit, name] = UNITS.find(([limit]) => seconds < limit);
  return `${Math.round(seconds / unit)} ${name}`;
}

/** How long ago a moment was, or how far ahead it is; the moment itself is in its tooltip. */
export function ago(instant) {
  if (instant === null || instant === undefined) return null;
  const seconds = (Date.now() - new Date(instant).getTime()) / 1000;
  const text = seconds >= 0 ? `${duration(Math.floor(seconds))} ago` : `in ${duration(Math.ceil(-seconds))}`;
  return element("time", { dateTime: instant, title: new Date(instant).toLocaleString() }, text);
}

/** An id: its end, which differs most, with the whole as a tooltip; a link where a page shows the object. */
export function id(text, page = null) {
  if (text === null || text === undefined) return null;
  const short = text.length > 12 ? `…${text.slice(-8)}` : text;
  return page === null
    ? element("code", { title: text }, short)
    : element("a", { href: `#/${page}/${encodeURIComponent(text)}`, title: text }, element("code", {}, short));
}

/** A user, with the tenant where there is one. */
export const user = ({ user_id: name, tenant }) =>
  (name === null || name === undefined ? null : tenant ? `${tenant} / ${name}` : name);

export const number = (value) => (value === null || value === undefined ? null : value.toLocaleString("en"));

/** Bytes for people. */
export function bytes(value) {
  if (value === null || value === undefined) return null;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (value < 1024) return `${value < 10 && unit !== "B" ? value.toFixed(1) : Math.round(value)} ${unit}`;
    value /= 1024;
  }
  return `${value.toFixed(1)} TiB`;
}

/** A part of a page with a heading. */
export const part = (heading, ...children) =>
  element("section", {}, element("h2", {}, heading), ...children);

/** A list of terms and what they are. Values of null are left out. */
export const facts = (pairs) => element("dl", { className: "facts" },
  ...pairs.filter(([, value]) => value !== null && value !== undefined && value !== "").map(([name, value]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, value instanceof Node ? value : String(value)))));

/** A button. What `act` fails with is shown next to it, and a second click while `act` runs does nothing. */
export const button = (text, act, { danger = false, label = null } = {}) => element("button", {
  type: "button", className: danger ? "small danger" : "small", onclick: (event) => press(event.currentTarget, act),
  ...(label === null ? {} : { "aria-label": label }),
}, text);

async function press(pressed, act) {
  if (pressed.hasAttribute("aria-busy")) return;
  pressed.setAttribute("aria-busy", "true"); // a disabled button would lose the focus
  if (pressed.nextElementSibling?.matches("[role=alert]")) pressed.nextElementSibling.remove();
  try {
    await act();
  } catch (error) {
    pressed.after(element("span", { className: "bad", role: "alert" }, error.message));
  } finally {
    pressed.removeAttribute("aria-busy");
  }
}

/**
 * A choice among values, which is kept in the page's address.
 * @param {string} name of the parameter
 */
export function choice(label, name, values, context) {
  const made = element("select", { name, "aria-label": label, onchange: () => context.set(entered()) },
    ...values.map(([value, text]) => element("option", { value, selected: (context.query[name] ?? "") === value }, text)));
  return element("label", {}, `${label} `, made);
}

/** A field whose text is kept in the page's address. */
export function field(label, name, context) {
  const input = element("input", { type: "search", name, value: context.query[name] ?? "", "aria-label": label, spellcheck: false });
  return element("form", { className: "field", onsubmit: (event) => { event.preventDefault(); context.set(entered()); } },
    element("label", {}, `${label} `, input));
}

/** What all fields and choices above the page have, for its address. Another list begins with its first rows. */
const entered = () => ({
  after: "", before: "",
  ...Object.fromEntries([...byId("tools").querySelectorAll("[name]")].map((each) => [each.name, each.value.trim()])),
});

/** The question that was asked last. */
let asked = null;

/**
 * Ask before an action, then do it. An error is shown where it was asked.
 * @param {{ title: string, text?: Node | string, yes: string, danger?: boolean }} question
 * @param {() => Promise<unknown>} act
 * @param {() => unknown} done called when the action has succeeded
 */
export function ask(question, act, done) {
  const { title, text = "", yes, danger = false } = question;
  const dialog = byId("sure"), confirm = byId("sure-yes"), form = dialog.querySelector("form"), mine = asked = {};
  byId("sure-title").textContent = title;
  byId("sure-text").replaceChildren(text);
  byId("sure-error").textContent = "";
  confirm.textContent = yes;
  confirm.disabled = false;
  confirm.className = danger ? "danger" : "";
  byId("sure-no").onclick = () => dialog.close();
  form.onsubmit = async (event) => {
    event.preventDefault();
    confirm.disabled = true;
    try {
      await act();
      if (mine === asked) dialog.close(); // else the user has gone back, and was asked something else
      await done();
    } catch (error) {
      const isAnother = mine !== asked && dialog.open;
      if (!dialog.open) ask(question, act, done); // again: the dialog may have another question and its action since
      byId("sure-error").textContent = isAnother ? `${title}: ${error.message}` : error.message;
    } finally {
      if (mine === asked) confirm.disabled = false;
    }
  };
  dialog.showModal();
}
