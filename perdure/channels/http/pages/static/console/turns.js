/** The pages "Turns" and "Turn": a list, and one turn with its timeline as a picture and its prompts. */

import { element } from "../chat/elements.js";
import { ago, ask, button, choice, duration, facts, field, id, number, part, state, table, user } from "./parts.js";
import { picture } from "./timeline.js";

const MOST = 100;
const SETTLED = ["done", "failed", "cancelled"];

export const turns = {
  title: "Turns",
  every: 4000,
  tools: (context) => [
    choice("Ended", "status", [["", "in any way, or not"], ["failed", "failed"], ["cancelled", "cancelled"], ["done", "done"]], context),
    field("user", "user_id", context), field("tenant", "tenant", context), field("session", "session_id", context),
  ],
  load: (api, { query }, signal) => api.get("turns", { ...query, limit: MOST }, signal),
  show: (found) => [table("Turns", [
    ["turn", (row) => id(row.turn_id, "turns")],
    ["session", (row) => id(row.session_id)],
    ["user", user],
    ["agent", (row) => row.agent],
    ["channel", (row) => row.channel],
    ["status", (row) => state(row.status)],
    ["attempts#", (row) => row.attempts],
    ["accepted", (row) => ago(row.accepted_at)],
    ["took#", (row) => (row.settled_at === null ? null : duration((new Date(row.settled_at) - new Date(row.accepted_at)) / 1000))],
    ["error", (row) => row.error && `${row.error.code}: ${row.error.message}`],
  ], found, { key: (row) => row.turn_id, none: "No turn." })],
};

function act(found, context) {
  const at = `turns/${found.turn_id}`;
  const made = [];
  if (!SETTLED.includes(found.status)) {
    made.push(button("Cancel…", () => ask(
      { title: "Cancel the turn", text: "A turn that runs is cancelled at its next safe point.", yes: "Cancel it", danger: true },
      () => context.api.send("POST", `${at}/cancel`), context.reload), { danger: true }));
  }
  if (["failed", "cancelled"].includes(found.status)) {
    let again;
    made.push(button("Try again…", () => ask(
      { title: "Try the turn again", text: "Its messages are accepted as a new turn of the conversation.", yes: "Try again" },
      async () => { again = await context.api.send("POST", `${at}/retry`); }, () => context.go(`turns/${again.turn_id}`))));
  }
  return made;
}

function prompts(context) {
  const made = element("details", { "data-key": "prompts" }, element("summary", {}, "What the model calls were given"));
  made.addEventListener("toggle", async () => {
    if (!made.open || made.querySelector("section") !== null) return;
    try {
      const { steps } = await context.api.get(`turns/${context.argument}/prompt`);
      made.append(...steps.map((step) => element("section", {},
        element("h3", {}, `Step ${step.step} · ${step.model} · `, element("code", {}, step.instructions_hash ?? "")),
        ...step.parts.map((each, at) => element("details", { "data-key": `part ${step.step} ${at}` },
          element("summary", {}, `${each.kind}${each.role ? ` (${each.role})` : ""} · ${number(each.tokens)} tokens${each.ids ? ` · ${each.ids.length} ids` : ""}${each.note ? ` · ${each.note}` : ""}`),
          element("pre", {}, each.text || "–"))))));
      if (!steps.length) made.append(element("section", { className: "none" }, "No model call is committed."));
    } catch (error) {
      made.append(element("p", { className: "bad", role: "alert" }, error.message));
    }
  });
  return made;
}

export const turn = {
  title: "Turn",
  every: 2000,
  load: async (api, { argument }, signal) => {
    const found = await api.get(`turns/${encodeURIComponent(argument)}/timeline`, {}, signal);
    const moves = found.settled_at === null || found.deliveries.some((each) => each.status === "pending");
    return moves ? found : { ...found, now: found.settled_at };
  },
  show: (found, context) => [
    facts([
      ["turn", element("code", {}, found.turn_id)],
      ["session", element("a", { href: `#/turns?session_id=${found.session_id}` }, element("code", {}, found.session_id))],
      ["status", state(found.status)],
      ["agent", found.agent],
      ["channel", found.channel],
      ["attempts", found.attempts],
      ["held by", found.held_by],
      ["accepted", ago(found.accepted_at)],
      ["took", found.settled_at && duration((new Date(found.settled_at) - new Date(found.accepted_at)) / 1000)],
      ["cost", found.cost_usd && `${found.cost_usd} USD`],
      ["error", found.error_code],
      ["last attempt's error", found.attempt_error],
      ["agent's version", found.fingerprint && element("code", {}, found.fingerprint.slice(0, 12))],
    ]),
    element("div", { className: "more" }, ...act(found, context)),
    part("Timeline", picture(found)),
    part("Calls", table("Calls", [
      ["tool", (row) => row.tool],
      ["effect", (row) => row.effect],
      ["status", (row) => state(row.status === "unknown" ? "in doubt" : row.status, row.status === "unknown" ? "bad" : undefined)],
      ["waits for", (row) => row.waits_for],
      ["began", (row) => ago(row.intended_at)],
      ["took#", (row) => (row.finished_at === null ? null : duration((new Date(row.finished_at) - new Date(row.intended_at)) / 1000))],
      ["decided", (row) => row.decided_by && `by ${row.decided_by}`],
    ], found.calls, { none: "No call." })),
    found.deliveries.length ? part("Deliveries", table("Deliveries", [
      ["delivery", (row) => id(row.delivery_id)],
      ["what", (row) => (row.asks ? "request for approval" : "reply")],
      ["status", (row) => state(row.status)],
      ["attempts#", (row) => row.attempts],
      ["delivered", (row) => ago(row.delivered_at)],
      ["last error", (row) => row.last_error],
    ], found.deliveries)) : null,
    prompts(context),
  ],
};
