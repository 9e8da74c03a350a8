/** Makes DOM nodes. Text is always text: nothing here takes HTML. */

/**
 * An element with properties and children; strings become text nodes, `null` is left out.
 * @param {string} tag
 * @param {Record<string, unknown>} properties DOM properties; `aria-…`, `role` and `data-…` are set as attributes
 * @param {...(Node | string | null)} children
 * @returns {HTMLElement}
 */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role") made.setAttribute(name, String(value));
    else made[name] = value;
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

/** Invisible characters that change the order in which others are shown. */
const REORDERING = /[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;

/** The value of a JSON text. An integer that a number of JavaScript would round is kept as it is written. */
export const readJson = (text) => JSON.parse(text, (_, value, { source } = {}) => (
  typeof value === "number" && !Number.isSafeInteger(value) && /^-?\d+$/.test(source) && JSON.rawJSON ? JSON.rawJSON(source) : value));

/** The arguments of a call as JSON. A person approves what is read: what would reorder it is escaped. */
export const shownJson = (value, indent = 2) => JSON.stringify(value, null, indent).replace(
  REORDERING, (character) => `\\u${character.charCodeAt(0).toString(16).padStart(4, "0")}`);

/** Move the keyboard's focus from `node`, which is about to go or to be disabled, to the text; whether it was there. */
export function leaveFocus(node) {
  const has = node.matches(":focus-visible") || node.querySelector(":focus-visible") !== null;
  if (has) byId("text").focus();
  return has;
}

/** The element with an id, which the page has. */
export const byId = (id) => document.getElementById(id);
