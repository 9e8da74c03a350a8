/** The page "Status": what does not work, the processes, the backlog, the servers and the budgets. Pauses. */

import { element } from "../chat/elements.js";
import { ago, ask, button, bytes, duration, facts, id, number, part, state, table, user } from "./parts.js";

const amount = ({ number: count, oldest_s: oldest }, most) =>
  `${count >= most ? `${number(count)} or more` : number(count)}${oldest === null ? "" : `, the oldest for ${duration(oldest)}`}`;

function backlog(found) {
  const due = Object.entries(found.due).map(([priority, each]) => [`due, priority ${priority}`, each]);
  const rows = [...due, ...Object.entries(found.amounts)].filter(([, each]) => each.number);
  return table("Backlog", [
    ["what", ([what]) => what.replaceAll("_", " ")],
    ["number#", ([, each]) => amount(each, found.counted_up_to)],
  ], rows, { none: "Nothing waits." });
}

export const condition = {
  title: "Status",
  every: 5000,
  load: (api, _context, signal) => api.get("status", {}, signal),
  show: (found) => [
    element("p", { className: "lead" }, state(found.status), ` perdure ${found.release}`,
      found.intake_closed ? element("span", { className: "bad" }, " · the intake is closed") : null),
    part("Faults", table("Faults", [
      ["severity", (row) => state(row.severity)],
      ["part", (row) => row.part],
      ["message", (row) => row.message],
    ], found.faults, { none: "None." })),
    part("Processes", table("Processes", [
      ["state", (row) => state(row.state)],
      ["kind", (row) => row.kind],
      ["name", (row) => row.name],
      ["release", (row) => row.release],
      ["seen", (row) => `${duration(Math.round(row.seen_s))} ago`],
      ["started", (row) => ago(row.started_at)],
      ["queues", (row) => row.queues.join(", ")],
    ], found.processes, { none: "No process has reported." })),
    part("Backlog", backlog(found)),
    part("Unsettled turns", table("Unsettled turns", [
      ["agent", (row) => row.agent],
      ["status", (row) => state(row.status)],
      ["turns#", (row) => number(row.turns)],
    ], found.unsettled, { none: "None." })),
    found.failures.length ? part("Failures of the last hour", table("Failures", [
      ["agent", (row) => row.agent],
      ["code", (row) => row.code],
      ["turns#", (row) => number(row.turns)],
    ], found.failures)) : null,
    part("Sessions without a result for a minute", table("Stuck sessions", [
      ["session", (row) => id(row.session_id)],
      ["turn", (row) => id(row.turn_id, "turns")],
      ["agent", (row) => row.agent],
      ["status", (row) => state(row.status)],
      ["age#", (row) => duration(Math.round(row.age_s))],
      ["why", (row) => row.reason],
    ], found.stuck, { none: "None." })),
    found.budgets.length ? part("Budgets of today", table("Budgets", [
      ["tenant", (row) => row.tenant], ["user", (row) => row.user],
      ["spent, USD#", (row) => row.spent_usd], ["limit, USD#", (row) => row.limit_usd],
    ], found.budgets)) : null,
    part("Servers", facts([
      ["PostgreSQL", found.database && `${bytes(found.database.size_bytes)}, ${found.database.connections} of ${found.database.max_connections} connections`],
      ["Oldest transaction", found.database && duration(Math.round(found.database.oldest_transaction_s))],
      ...found.redis.map((each) => [each.name, each.fault ?? [bytes(each.memory_bytes), each.limit_bytes ? `of ${bytes(each.limit_bytes)}` : null, each.policy].filter(Boolean).join(", ")]),
      ...found.disks.map((each) => [`disk of ${each.name}`, `${bytes(each.used_bytes)} of ${bytes(each.size_bytes)}`]),
    ])),
  ],
};

const named = (pause) => [
  pause.user_id === null ? (pause.tenant === null ? null : `tenant ${pause.tenant}`) : `user ${user(pause)}`,
  pause.agent === null ? null : `agent ${pause.agent}`,
].filter(Boolean).join(", ");

function begin(context) {
  const fields = ["tenant", "user_id", "agent"].map((name) => [name, element("input", { "aria-label": name.replace("_id", ""), spellcheck: false })]);
  ask({
    title: "Pause",
    text: element("div", {},
      element("p", {}, "Messages are accepted and wait. Turns that run continue. Of several, all must apply."),
      ...fields.map(([name, input]) => element("label", {}, name.replace("_id", ""), input))),
    yes: "Pause",
  }, () => context.api.send("POST", "pauses", Object.fromEntries(fields.map(([name, input]) => [name, input.value.trim() || null]))), context.reload);
}

export const pauses = {
  title: "Pauses",
  every: 5000,
  tools: (context) => [button("Pause a tenant, user or agent…", () => begin(context))],
  load: (api, _context, signal) => api.get("pauses", {}, signal),
  show: (found, context) => [table("Pauses", [
    ["who waits", named],
    ["since", (row) => ago(row.paused_at)],
    ["", (row) => button("Resume", () => ask(
      { title: "Resume", text: `Turns of ${named(row)} run again.`, yes: "Resume" },
      () => {
        const query = new URLSearchParams(["tenant", "user_id", "agent"].filter((name) => row[name] !== null).map((name) => [name, row[name]]));
        return context.api.send("DELETE", `pauses?${query}`);
      }, context.reload), { label: `Resume ${named(row)}` })],
  ], found, { key: named, none: "Nobody waits." })],
};
