/** A subset of Markdown as DOM nodes: paragraphs, lists, fenced code, inline code, bold, and links to http(s). */

import { element } from "./elements.js";

const INLINE = /`([^`\n]+)`|\*\*([^*\n]+)\*\*|\[([^\]\n]{1,300})\]\((https?:\/\/[^\s)]{1,2000})\)|(https?:\/\/[^\s<>"')\]]{1,2000})/g;

/** The nodes of a text. An open code fence is code to the end. */
export function rendered(text) {
  const nodes = [];
  const parts = text.split(/^```[^\n]*\n?/m);
  parts.forEach((part, index) => {
    if (index % 2) nodes.push(element("pre", {}, element("code", {}, part.replace(/\n$/, ""))));
    else nodes.push(...blocks(part));
  });
  return nodes;
}

function blocks(text) {
  return text.split(/\n{2,}/).filter((block) => block.trim()).map((block) => {
    const lines = block.split("\n").filter((line) => line.trim());
    const bullets = lines.every((line) => /^\s*[-*•]\s/.test(line));
    const numbers = lines.every((line) => /^\s*\d{1,3}[.)]\s/.test(line));
    if (bullets || numbers) {
      const items = lines.map((line) => element("li", {}, ...inline(line.replace(/^\s*([-*•]|\d{1,3}[.)])\s+/, ""))));
      return element(bullets ? "ul" : "ol", {}, ...items);
    }
    const children = block.replace(/^#{1,6}\s+/, "").split("\n").flatMap((line, index) =>
      index ? [element("br"), ...inline(line)] : inline(line));
    return element("p", {}, ...children);
  });
}

function inline(text) {
  const nodes = [];
  let from = 0;
  for (const found of text.matchAll(INLINE)) {
    nodes.push(text.slice(from, found.index));
    const [whole, code, bold, label, target, bare] = found;
    if (code !== undefined) nodes.push(element("code", {}, code));
    else if (bold !== undefined) nodes.push(element("strong", {}, bold));
    else nodes.push(element("a", { href: target ?? bare, rel: "noopener noreferrer", target: "_blank" }, label ?? bare));
    from = found.index + whole.length;
  }
  nodes.push(text.slice(from));
  return nodes;
}
