/** A turn's timeline as a picture (SVG): its wait, model calls, tool calls, waits, decisions, and take-overs. */

const WIDTH = 960, LABELS = 190, ROW = 26, BAR = 14, TOP = 34, RIGHT = 14;
const XMLNS = "http://www.w3.org/2000/svg";

function svg(tag, attributes, ...children) {
  const made = document.createElementNS(XMLNS, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children.filter((each) => each !== null));
  return made;
}

const at = (instant) => (instant === null || instant === undefined ? null : new Date(instant).getTime());

const span = (milliseconds) => {
  const seconds = milliseconds / 1000;
  if (seconds < 1) return `${Math.round(milliseconds)} ms`;
  if (seconds < 90) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
};

/**
 * The rows of the picture: `{ label, bars: [{ from, to, kind, text }], marks: [{ at, kind, text }] }`, times in
 * milliseconds. A model's call begins when what it waits for has ended: the step before it, its calls, or a take-over.
 */
export function rowsOf(found) {
  const began = at(found.started_at), ended = at(found.settled_at), now = at(found.now), last = ended ?? now;
  const takeovers = found.takeovers.map((each) => ({ at: at(each.at), kind: "takeover", text: `${each.owner} took the turn over from ${each.lost}` }));
  const rows = [{
    label: "queue", marks: takeovers.map((each) => ({ ...each })),
    bars: [{ from: at(found.accepted_at), to: began ?? last, kind: "wait", text: "waits for a worker" }],
  }];
  let free = began;
  for (const step of found.steps) {
    const end = at(step.committed_at);
    const lost = takeovers.map((each) => each.at).filter((each) => each > (free ?? end) && each < end);
    const begin = Math.max(free ?? end, ...lost);
    const tokens = step.usage ? `, ${step.usage.input_tokens ?? "?"} → ${step.usage.output_tokens ?? "?"} tokens` : "";
    rows.push({
      label: `${step.step}. ${step.model ?? "model"}`, marks: [],
      bars: [...lost.map((each, index) => ({ from: lost[index - 1] ?? free, to: each, kind: "lost", text: "lost with its worker" })), { from: Math.min(begin, end), to: end, kind: step.fallback ? "fallback" : "model", text: `model call${step.fallback ? " of a fallback" : ""}${tokens}` }],
    });
    free = end;
    for (const call of found.calls.filter((each) => each.seq === step.seq)) {
      rows.push(callRow(call, end, last));
      free = Math.max(free, at(call.finished_at) ?? last);
    }
  }
  if (ended === null && began !== null && found.status === "running" && found.calls.every((each) => each.finished_at !== null)) {
    rows.push({ label: "model", marks: [], bars: [{ from: Math.max(free, ...takeovers.map((each) => each.at)), to: now, kind: "running", text: "a model call runs" }] });
  }
  for (const delivery of found.deliveries) {
    const done = at(delivery.delivered_at);
    rows.push({
      label: delivery.asks ? "request" : "delivery", marks: [],
      bars: [{ from: at(delivery.created_at), to: done ?? now, kind: delivery.status === "failed" ? "failed" : done === null ? "wait" : "delivery", text: `${delivery.status}, ${delivery.attempts} attempts` }],
    });
  }
  return rows;
}

/** `replied`: when the reply with the call was committed. A person decides before the call begins. */
function callRow(call, replied, last) {
  const intended = at(call.intended_at), decided = at(call.decided_at), finished = at(call.finished_at);
  const doubt = call.status === "unknown", row = { label: call.tool, bars: [], marks: [] };
  const asked = call.approver !== null;
  if (asked) row.bars.push({ from: replied, to: decided ?? finished ?? last, kind: "person", text: `waits for ${call.approver === "staff" ? "staff" : "the user"} to decide` });
  if (decided !== null) row.marks.push({ at: decided, kind: call.status === "denied" ? "denied" : "approved", text: `${call.status === "denied" ? "denied" : "approved"} by ${call.decided_by}` });
  const begin = asked ? decided && Math.max(decided, intended) : intended;
  if (begin !== null && call.status !== "denied" && !(asked && call.status === "asked")) {
    const kind = doubt ? "doubt" : call.status === "failed" ? "failed" : finished === null ? "running" : call.waits_for === null ? "tool" : "wait";
    const what = doubt ? "in doubt: the worker died, and the call may have happened" : call.waits_for === null ? `${call.effect} call, ${call.status}` : `waits for ${call.waits_for}, ${call.status}`;
    row.bars.push({ from: begin, to: finished ?? last, kind, text: what });
  }
  if (doubt) row.marks.push({ at: finished ?? last, kind: "doubt", text: "in doubt" });
  return row;
}

const NAMES = { wait: "waits", model: "model call", fallback: "fallback model", tool: "tool call", person: "waits for a person", running: "runs", failed: "failed", lost: "lost with its worker", doubt: "in doubt", delivery: "delivery" };
const MARKS = { takeover: "taken over", approved: "approved", denied: "denied", doubt: "in doubt" };

/** The picture, with a legend of what it has. Each bar and mark has its times as a tooltip and for screen readers. */
export function picture(found) {
  const rows = rowsOf(found);
  const times = rows.flatMap((row) => [...row.bars.flatMap(({ from, to }) => [from, to]), ...row.marks.map((mark) => mark.at)]);
  const first = Math.min(...times), last = Math.max(...times, first + 1);
  const scale = (WIDTH - LABELS - RIGHT) / (last - first);
  const x = (time) => LABELS + (time - first) * scale;
  const height = TOP + rows.length * ROW + 8;
  const box = svg("svg", { viewBox: `0 0 ${WIDTH} ${height}`, class: "timeline", role: "img", "aria-label": `The timeline of the turn: ${span(last - first)}` });
  for (let tick = 0; tick <= 5; tick += 1) {
    const time = first + (last - first) * tick / 5;
    box.append(svg("line", { x1: x(time), x2: x(time), y1: TOP - 8, y2: height, class: "grid" }),
      svg("text", { x: x(time), y: TOP - 14, class: "tick", "text-anchor": tick === 0 ? "start" : tick === 5 ? "end" : "middle" }, tick === 0 ? "0" : span(time - first)));
  }
  rows.forEach((row, index) => {
    const y = TOP + index * ROW;
    const label = row.label.length > 24 ? `${row.label.slice(0, 23)}…` : row.label;
    box.append(svg("text", { x: LABELS - 10, y: y + BAR, class: "label", "text-anchor": "end" }, label, svg("title", {}, row.label)));
    for (const bar of row.bars) {
      const wide = Math.max(x(bar.to) - x(bar.from), 2);
      box.append(svg("rect", { x: x(bar.from), y: y + 3, width: wide, height: BAR, rx: 3, class: `bar ${bar.kind}` },
        svg("title", {}, `${row.label}: ${bar.text}; ${span(bar.to - bar.from)}, from ${span(bar.from - first)} on`)));
    }
    for (const mark of row.marks) {
      const cx = x(mark.at), cy = y + 3 + BAR / 2;
      const title = svg("title", {}, `${mark.text}, after ${span(mark.at - first)}`);
      if (mark.kind === "takeover") {
        box.append(svg("line", { x1: cx, x2: cx, y1: TOP - 8, y2: height, class: "takeover" }),
          svg("path", { d: `M${cx - 6} ${TOP - 10}h12l-6 9z`, class: "mark takeover" }, title));
      } else box.append(svg("path", { d: `M${cx} ${cy - 9}l9 9-9 9-9-9z`, class: `mark ${mark.kind}` }, title));
    }
  });
  const figure = document.createElement("figure");
  figure.className = "scroll";
  figure.tabIndex = 0; // else the keyboard does not scroll it
  const caption = document.createElement("figcaption");
  const bars = [...new Set(rows.flatMap((row) => row.bars.map((bar) => bar.kind)))].map((kind) => [`bar ${kind}`, NAMES[kind]]);
  const marks = [...new Set(rows.flatMap((row) => row.marks.map((mark) => mark.kind)))].map((kind) => [`mark ${kind}`, MARKS[kind]]);
  for (const [kind, name] of [...bars, ...marks]) {
    const item = document.createElement("span");
    const shape = kind.startsWith("bar") ? svg("rect", { x: 0, y: 2, width: 14, height: 10, rx: 2, class: kind }) : svg("path", { d: "M7 0l7 7-7 7-7-7z", class: kind });
    item.append(svg("svg", { viewBox: "0 0 14 14", width: 14, height: 14, "aria-hidden": "true" }, shape), ` ${name}`);
    caption.append(item);
  }
  figure.append(box, caption);
  return figure;
}
