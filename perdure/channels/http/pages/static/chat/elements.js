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

/** Move the keyboard's focus from `node`, which is about to go or to be disabled, to the text; whether it was there. */
export function leaveFocus(node) {
  const has = node.matches(":focus-visible") || node.querySelector(":focus-visible") !== null;
  if (has) byId("text").focus();
  return has;
}

/** The element with an id, which the page has. */
export const byId = (id) => document.getElementById(id);
