/**
 * Markdown as DOM nodes. markdown-it parses it to tokens; nodes are made of these, so nothing of a text is ever HTML.
 *
 * Links go to http(s) only, and an image is a link to it: to load it could tell its host what the conversation says.
 * Text that only looks like Markdown stays as it is: `2*3*4`, `__init__`, entities, definitions such as `[1]: …`, and
 * text that is indented or underlined.
 */

import MarkdownIt from "./vendor/markdown-it.esm.min.mjs";
import { element } from "./elements.js";

/** A longer text, or one of more nodes, is shown as it is, and so is a paragraph of more: a browser would take seconds. */
const MOST_CHARACTERS = 300_000, MOST_NODES = 60_000, MOST_IN_PARAGRAPH = 4_000;
/** Levels of blocks, of which a list has two, and of what is in a line. */
const MOST_NESTED = 16;
const HAS_DIRECTION = /^(?:P|H\d|BLOCKQUOTE|UL|OL|TABLE|T[HD])$/;
const ITEM = /^ *(?:[-*+]|\d{1,9}[.)]) {1,4}(?=\S)/;
const ASCII_WORD = /^[A-Za-z0-9]{2}$/;
/** Chinese, Japanese and Korean have no spaces around emphasis, also where it ends with a mark: `**標題：**內容`. */
const WITHOUT_SPACES = /[\u1100-\u11ff\u2e80-\u9fff\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff\ufe30-\ufe4f\uff00-\uffef]/;

/** The function of markdown-it that is a rule's. */
const ruleOf = (kind, name) => new MarkdownIt("zero").enable(name)[kind].ruler.getRules("");
const libraryFence = ruleOf("block", "fence")[0], libraryEmphasis = ruleOf("inline", "emphasis").at(-1);

const markdown = new MarkdownIt({ html: false, linkify: true, maxNesting: 2 * MOST_NESTED });
markdown.disable(["code", "entity", "html_block", "html_inline", "lheading", "reference"]);
markdown.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });
for (const schema of ["ftp:", "mailto:", "//"]) markdown.linkify.add(schema, null);
markdown.validateLink = (url) => /^https?:\/\//i.test(url);
markdown.normalizeLinkText = (url) => url;
markdown.core.ruler.after("normalize", "nested", nested);
markdown.block.ruler.at("fence", fence, { alt: ["paragraph", "reference", "blockquote", "list"] });
markdown.block.ruler.before("table", "deepest", deepest);
markdown.inline.ruler.at("emphasis", emphasis);

/** The nodes of a text. An open code fence is code to the end. */
export function rendered(text) {
  const tokens = parsed(text);
  return tokens === null ? [plain(text)] : built(tokens);
}

/** A text that grows at its end, shown in `node`: only its last blocks are made again, and not more often than they can be. */
export class Growing {
  #node;
  #text = "";
  #open = ""; // the end of the text whose blocks may change
  #last = []; // the nodes of it
  #next = 0;
  #timer = null;

  constructor(node) {
    this.#node = node;
  }

  add(text) {
    this.#text += text;
    this.#open += text;
    const wait = this.#next - performance.now();
    if (wait <= 0) this.#show();
    else this.#timer ??= setTimeout(() => this.#show(), wait);
  }

  /** Show no more. */
  end() {
    clearTimeout(this.#timer);
  }

  #show() {
    const began = performance.now();
    clearTimeout(this.#timer);
    this.#timer = null;
    const tokens = this.#text.length > MOST_CHARACTERS ? null : parsed(this.#open);
    if (tokens === null) this.#node.replaceChildren(plain(this.#text));
    else this.#put(tokens);
    const ended = performance.now();
    this.#next = ended + 4 * (ended - began);
  }

  /** The block that begins before the two last lines, which may be incomplete, and those after it may change. */
  #put(tokens) {
    this.#open = this.#open.replace(/\r\n|\r(?!$)/g, "\n");
    const lines = this.#open.split("\n");
    const from = Math.max(0, tokens.findLastIndex((each) => each.level === 0 && each.map?.[0] < lines.length - 2));
    for (const each of this.#last) each.remove();
    this.#last = built(tokens.slice(from));
    this.#node.append(...built(tokens.slice(0, from)), ...this.#last);
    if (from > 0) this.#open = lines.slice(tokens[from].map[0]).join("\n");
  }
}

/** The tokens of a text, or `null` if it is too long. */
function parsed(text) {
  if (text.length > MOST_CHARACTERS) return null;
  const tokens = markdown.parse(text, {});
  const count = tokens.reduce((sum, each) => sum + (each.type === "fence" ? 6 : 1 + (each.children?.length ?? 0)), 0);
  return count > MOST_NODES ? null : tokens;
}

const plain = (text) => element("p", { dir: "auto", className: "plain" }, text);

function built(tokens) {
  const top = document.createDocumentFragment();
  fill(top, tokens);
  return [...top.childNodes];
}

/** Add the nodes of tokens to `node`. */
function fill(node, tokens) {
  const around = [];
  let at = node;
  for (const token of tokens) {
    if (token.nesting < 0) {
      const outer = around.pop();
      if (at !== outer && HAS_DIRECTION.test(at.tagName)) at.dir = "auto"; // else it is computed for each node that is added
      at = outer;
      continue;
    }
    if (token.nesting > 0) around.push(at);
    if (token.type === "inline") fillParagraph(at, token);
    else if (!token.hidden && around.length <= 2 * MOST_NESTED) {
      const made = (MAKES[token.type] ?? shown)(token, at);
      at.append(made);
      if (token.nesting > 0) at = made.className === "table" ? made.firstChild : made;
    }
  }
}

/** Add what is in a paragraph or a cell; the first one of an item may begin with the box of a task. */
function fillParagraph(at, { children: tokens, content }) {
  if (tokens.length > MOST_IN_PARAGRAPH) return at.append(element("span", { className: "plain" }, content));
  const item = at.closest?.("li"), box = /^\[([ xX])\]\s/.exec(tokens[0]?.type === "text" ? tokens[0].content : "");
  if (box !== null && item !== null && !item.textContent) {
    tokens[0].content = tokens[0].content.slice(box[0].length);
    const checked = box[1] !== " ";
    item.className = "task";
    at.append(element("input", { type: "checkbox", checked, disabled: true, "aria-label": checked ? "Done" : "To do" }), " ");
  }
  fill(at, tokens);
}

const made = (tag) => () => element(tag);
const cell = (tag) => (token) => element(tag, { className: /\w+$/.exec(token.attrGet("style") ?? "")?.[0] ?? "" });

/** The node of each type of token, which may depend on the node that it is added to. */
const MAKES = {
  paragraph_open: made("p"),
  blockquote_open: made("blockquote"),
  bullet_list_open: made("ul"),
  ordered_list_open: (token) => element("ol", { start: Number(token.attrGet("start") ?? 1) }),
  list_item_open: ({ info }, list) => {
    const number = Number(info);
    return element("li", info && number !== list.start ? { value: number } : {}); // equal numbers are counted
  },
  heading_open: ({ tag }) => element(`h${Math.min(Number(tag[1]) + 2, 6)}`), // below the page's own
  hr: made("hr"),
  fence: ({ content }) => code(content.replace(/\n$/, "")),
  table_open: () => element("div", { className: "table", tabIndex: 0, role: "group", "aria-label": "Table" }, element("table")),
  thead_open: made("thead"),
  tbody_open: made("tbody"),
  tr_open: made("tr"),
  th_open: cell("th"),
  td_open: cell("td"),
  strong_open: made("strong"),
  em_open: made("em"),
  s_open: made("s"),
  code_inline: ({ content }) => element("code", {}, content),
  softbreak: made("br"),
  hardbreak: made("br"),
  link_open: (token) => link(token.attrGet("href")),
  image: (token, at) => {
    const url = token.attrGet("src"), label = token.content || url;
    return at.closest("a") === null ? link(url, label) : document.createTextNode(label);
  },
};

const link = (href, ...label) => element("a", { href, rel: "noopener noreferrer", target: "_blank" }, ...label);

/** The text of a token. A line of a table breaks at `<br>`: Markdown has nothing else for it. */
function shown({ content }, at) {
  const all = document.createDocumentFragment();
  const lines = at.closest("td, th") === null ? [content] : content.split(/<br ?\/?>/i);
  all.append(lines[0], ...lines.slice(1).flatMap((each) => [element("br"), each]));
  return all;
}

/** Code with a button that copies it. */
function code(text) {
  const pre = element("pre", { dir: "ltr" }, element("code", {}, text));
  const button = element("button", { type: "button", className: "copy", "aria-live": "polite", onclick: () => copy(pre, button) }, "Copy");
  return element("div", { className: "code" }, pre, button);
}

async function copy(pre, button) {
  try {
    await navigator.clipboard.writeText(pre.textContent);
    button.textContent = "Copied";
  } catch { // without https there is no clipboard: the keys for copying still work
    getSelection().selectAllChildren(pre);
    button.textContent = document.execCommand("copy") ? "Copied" : "Selected";
  }
  setTimeout(() => { button.textContent = "Copy"; }, 2_000);
}

/**
 * Items that are indented by two characters or more are in the item above them. Models write so below `1. `, where
 * Markdown needs three. Their lines, and those in them, are indented as Markdown needs it.
 */
function nested(state) {
  let items = [], marks = "", wasEmpty = false;
  state.src = state.src.split("\n").map((line) => {
    const [indent, text] = [/^ */.exec(line)[0].length, line.trim()];
    if (!text) {
      wasEmpty = true;
      return line;
    }
    const item = marks ? null : ITEM.exec(line);
    if (item === null) {
      if (wasEmpty && indent === 0 && !marks) items = [];
    } else {
      const last = items.findLastIndex((each) => indent - each.indent >= 2);
      items = items.slice(0, last + 1);
      const outer = items.at(-1);
      const more = outer === undefined ? 0 : outer.more + Math.max(0, outer.text - indent);
      items.push({ indent, text: item[0].length, more });
    }
    wasEmpty = false;
    const fenced = /^(?:`{3,}|~{3,})/.exec(text)?.[0];
    if (!marks) marks = fenced ?? "";
    else if (text.length >= marks.length && text === marks[0].repeat(text.length)) marks = "";
    return " ".repeat(items.findLast((each) => each.indent <= indent)?.more ?? 0) + line;
  }).join("\n");
}

/**
 * Fenced code at any indentation. Models often lose that of a list item in the code, or where it ends: then each line
 * keeps what it has more than the others.
 */
function fence(state, line, end, silent) {
  const lineOf = (at) => state.src.slice(state.bMarks[at] + state.tShift[at], state.eMarks[at]);
  const marks = /^(?:`{3,}|~{3,})/.exec(lineOf(line))?.[0];
  if (silent || marks === undefined) return libraryFence(state, line, end, silent);
  const indent = state.blkIndent, own = state.sCount[line];
  let least = own, last = line + 1;
  for (; last < end && state.sCount[last] >= 0; last += 1) { // less than 0: it is not in the quotation
    const text = lineOf(last).trimEnd();
    if (text.length >= marks.length && text === marks[0].repeat(text.length)) break;
    if (text) least = Math.min(least, state.sCount[last]);
  }
  if (last < end && state.sCount[last] > 0) state.sCount[last] = least;
  state.blkIndent = state.sCount[line] = least;
  const found = libraryFence(state, line, end, silent);
  state.blkIndent = indent;
  state.sCount[line] = own;
  return found;
}

/** The lines of a block that is nested too deep, as a paragraph: markdown-it would leave them out. */
function deepest(state, line, end, silent) {
  if (silent || state.level < MOST_NESTED) return false;
  state.line = line + 1;
  while (state.line < end && !state.isEmpty(state.line) && state.sCount[state.line] >= state.blkIndent) state.line += 1;
  state.push("paragraph_open", "p", 1).map = [line, state.line];
  const inside = state.push("inline", "", 0);
  inside.content = state.getLines(line, state.line, state.blkIndent, false).trim();
  inside.children = [];
  state.push("paragraph_close", "p", -1);
  return true;
}

/**
 * Emphasis, but for `2*3*4`, `x**2 + y**2` and `__init__`, as in the chats: a single `*` between letters or digits and two
 * underscores are text. More asterisks between letters or digits end emphasis, as in `**API**s`, and begin none.
 */
function emphasis(state, silent) {
  const { src, pos } = state, before = src[pos - 1] ?? " ", marker = src[pos];
  if (silent || !"*_".includes(marker) || (marker === "_" && [before, src[pos + 1]].includes("_"))) return false;
  const { length } = state.scanDelims(pos, true), after = src[pos + length] ?? " ";
  const inWord = marker === "*" && ASCII_WORD.test(before + after);
  if (inWord && length === 1) return false;
  const known = state.delimiters.length, found = libraryEmphasis(state, silent);
  for (const each of state.delimiters.slice(known)) {
    if (inWord) each.open = false;
    else if (marker === "*" && WITHOUT_SPACES.test(before + after)) {
      each.open ||= after.trim() !== "";
      each.close ||= before.trim() !== "";
    }
  }
  return found;
}
