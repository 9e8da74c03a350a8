/** A subset of Markdown as DOM nodes: paragraphs, lists, fenced code, inline code, bold, and links to http(s). */

import { element } from "./elements.js";

// A URL may have balanced parentheses, as in https://a.example/one_(two). A bare one ends before punctuation.
const INLINE = new RegExp([
  /(?<!`)(`{1,3})(?!`)([^\n]+?)(?<!`)\1(?!`)/,
  /\*\*([^*\n]+)\*\*/,
  /\[([^\]\n]{1,300})\]\((https?:\/\/(?:[^\s()]|\([^\s()]*\)){1,2000})\)/,
  /(https?:\/\/(?:[^\s<>"'()\]]|\([^\s<>"'()\]]*\)){1,2000})(?<![.,;:!?])/,
].map((each) => each.source).join("|"), "g");
const FENCE = /^(\s*)(`{3,}|~{3,}(?!~))[^`]*$/; // with all the tildes: else each of them is tried
const ITEM = /^(\s*)(?:[-*•+]|(\d{1,3})[.)])\s+/;
const MOST_NESTED = 8;

/** The nodes of a text. An open code fence is code to the end. */
export const rendered = (text) => blocks(text.split("\n"), 0);

function blocks(lines, depth) {
  const nodes = [];
  for (let at = 0; at < lines.length;) {
    const begin = at;
    if (!lines[at].trim()) at += 1;
    else if (FENCE.test(lines[at])) {
      at = fenceEnd(lines, at);
      nodes.push(code(lines.slice(begin, at)));
    } else if (depth < MOST_NESTED && ITEM.test(lines[at])) {
      const made = list(lines, at, depth);
      at = made.end;
      nodes.push(made.node);
    } else {
      do at += 1; while (at < lines.length && !interrupts(lines[at]));
      nodes.push(paragraph(lines.slice(begin, at)));
    }
  }
  return nodes;
}

/** Whether a line ends the paragraph before it. A number other than 1 may begin a line of one. */
function interrupts(line) {
  const item = ITEM.exec(line);
  return !line.trim() || FENCE.test(line) || (item !== null && (item[2] === undefined || item[2] === "1"));
}

/** The line after the code whose `opening` is in the line `at`. */
function fenceEnd(lines, at, opening = lines[at]) {
  const [, , marks] = FENCE.exec(opening);
  for (let end = at + 1; end < lines.length; end += 1) {
    const line = lines[end].trim();
    if (line.length >= marks.length && line === marks[0].repeat(line.length)) return end + 1;
  }
  return lines.length;
}

/** Code, without its fences and their indentation. */
function code(lines) {
  const [, indent, marks] = FENCE.exec(lines[0]), last = lines.at(-1).trim();
  const closed = lines.length > 1 && last.startsWith(marks) && last === marks[0].repeat(last.length);
  const inside = lines.slice(1, closed ? -1 : undefined).map((line) => dedented(line, indent.length));
  return element("pre", { dir: "ltr" }, element("code", {}, inside.join("\n").replace(/\n$/, "")));
}

/** The list that begins at the line `at`, and the line after it. */
function list(lines, at, depth) {
  const first = ITEM.exec(lines[at])[2], numbered = first !== undefined;
  const node = numbered ? element("ol", { dir: "auto", start: Number(first) }) : element("ul", { dir: "auto" });
  let end = at;
  for (let found = ITEM.exec(lines[at]); found !== null && (found[2] !== undefined) === numbered;) {
    const begin = at;
    end = at = itemEnd(lines, begin, found[1].length);
    const [before, ...after] = blocks(contents(lines.slice(begin, end), found[0].length), depth + 1);
    const item = element("li", {}, ...(before?.tagName === "P" ? before.childNodes : [before ?? ""]), ...after);
    if (numbered && found[2] !== first) item.value = Number(found[2]); // equal numbers are counted
    node.append(item);
    while (at < lines.length && !lines[at].trim()) at += 1;
    found = at < lines.length ? ITEM.exec(lines[at]) : null;
  }
  return { node, end };
}

/** The line after an item: lines that are indented more belong to it, and those that go on with its last paragraph. */
function itemEnd(lines, begin, indent) {
  let end = begin + 1, inParagraph = false;
  for (let at = begin; at < lines.length;) {
    const line = at === begin ? lines[at].replace(ITEM, "") : lines[at];
    const isBlank = !line.trim(), isCode = FENCE.test(line), goesOn = inParagraph && !isCode && !ITEM.test(line);
    if (at > begin && !isBlank && !goesOn && indentation(line) <= indent) break;
    at = isCode ? fenceEnd(lines, at, line) : at + 1;
    inParagraph = !isBlank && !isCode;
    if (!isBlank) end = at;
  }
  return end;
}

/** The lines of an item, without its mark and without the indentation that the others have because of it. */
function contents([first, ...others], width) {
  const indents = others.filter((line) => line.trim()).map(indentation).filter((each) => each > 0);
  const common = Math.min(width, ...indents);
  return [first.slice(width), ...others.map((line) => dedented(line, common))];
}

const indentation = (line) => line.length - line.trimStart().length;
const dedented = (line, most) => line.slice(Math.min(most, indentation(line)));

function paragraph(lines) {
  const [first, ...others] = [lines[0].replace(/^\s*#{1,6}\s+/, ""), ...lines.slice(1)];
  return element("p", { dir: "auto" }, ...inline(first), ...others.flatMap((line) => [element("br"), ...inline(line)]));
}

function inline(text) {
  const nodes = [];
  let from = 0;
  for (const found of text.matchAll(INLINE)) {
    nodes.push(text.slice(from, found.index));
    const [whole, , code, bold, label, target, bare] = found;
    if (code !== undefined) nodes.push(element("code", {}, code.replace(/^ (.*) $/, "$1")));
    else if (bold !== undefined) nodes.push(element("strong", {}, bold));
    else nodes.push(element("a", { href: target ?? bare, rel: "noopener noreferrer", target: "_blank" }, label ?? bare));
    from = found.index + whole.length;
  }
  nodes.push(text.slice(from));
  return nodes;
}
