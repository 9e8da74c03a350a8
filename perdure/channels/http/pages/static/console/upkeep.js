/** The pages "Breakers", "Schedules" and "Cost". */

import { element } from "../chat/elements.js";
import { segment } from "./api.js";
import { ago, ask, button, choice, number, part, state, table, user } from "./parts.js";

const moment = (milliseconds) => (milliseconds === null ? null : ago(new Date(milliseconds).toISOString()));

export const breakers = {
  title: "Breakers",
  every: 3000,
  load: (api, _context, signal) => api.get("breakers", {}, signal),
  show: ({ breakers: found }, context) => [table("Breakers", [
    ["breaker", (row) => element("code", {}, row.name)],
    ["state", (row) => state(row.state)],
    ["failures#", (row) => row.failure_count],
    ["successes#", (row) => row.success_count],
    ["last failure", (row) => moment(row.last_failure_time)],
    ["opened", (row) => moment(row.opened_at)],
    ["", (row) => (row.state === "closed" && !row.failure_count ? null : button("Close…", () => ask(
      { title: "Close the breaker", text: `${row.name} admits calls again, and the turns that wait for it resume.`, yes: "Close it" },
      () => context.api.send("POST", `breakers/${segment(row.name)}/reset`), context.reload), { label: `Close ${row.name}` }))],
  ], found, { key: (row) => row.name, none: "No breaker was used in the last week." })],
};

export const schedules = {
  title: "Schedules",
  every: 8000,
  load: async (api, _context, signal) => {
    const [entries, ofUsers] = await Promise.all([api.get("schedule-entries", {}, signal), api.get("schedules", {}, signal)]);
    return { entries, ofUsers };
  },
  show: ({ entries, ofUsers }, context) => [
    part("Periodic tasks", table("Periodic tasks", [
      ["entry", (row) => row.entry],
      ["schedule", (row) => element("code", {}, row.schedule)],
      ["last done", (row) => ago(row.last_done_at)],
      ["next due", (row) => ago(row.next_due)],
      ["state", (row) => (row.running ? state("running") : row.error === null ? state("ok") : state("failed"))],
      ["attempts#", (row) => row.attempts],
      ["error", (row) => row.error],
    ], entries, { key: (row) => row.entry, none: "None." })),
    part("Of users", table("Schedules of users", [
      ["user", user],
      ["text", (row) => row.text],
      ["when", (row) => element("code", {}, row.cron ?? "once")],
      ["time zone", (row) => row.timezone],
      ["next due", (row) => (row.paused ? state("paused", "warn") : ago(row.next_due))],
      ["error", (row) => row.error],
      ["", (row) => element("div", { className: "row" },
        button(row.paused ? "Resume" : "Pause", () => ask(
          { title: row.paused ? "Resume the schedule" : "Pause the schedule", text: row.text, yes: row.paused ? "Resume" : "Pause" },
          () => context.api.send("PATCH", `schedules/${row.schedule_id}`, { paused: !row.paused }), context.reload), { label: `${row.paused ? "Resume" : "Pause"} ${row.schedule_id}` }),
        button("Remove…", () => ask(
          { title: "Remove the schedule", text: row.text, yes: "Remove it", danger: true },
          () => context.api.send("DELETE", `schedules/${row.schedule_id}`), context.reload), { danger: true, label: `Remove ${row.schedule_id}` }))],
    ], ofUsers, { key: (row) => row.schedule_id, none: "None." })),
  ],
};

const money = (text) => (text === null ? null : Number(text).toFixed(4));

export const cost = {
  title: "Cost",
  every: 30000,
  tools: (context) => [
    choice("By", "by", [["", "agent"], ["model", "model"], ["user", "user"], ["tenant", "tenant"], ["day", "day"]], context),
    choice("of the last", "since", [["", "24 hours"], ["3600", "hour"], ["604800", "7 days"], ["2592000", "30 days"]], context),
  ],
  load: (api, { query }, signal) => api.get("usage", { by: query.by, since_s: query.since }, signal),
  show: (found, { query }) => {
    const most = Math.max(...found.map((row) => Number(row.cost_usd ?? 0)), 0);
    return [
      element("p", { className: "lead" }, `${found.reduce((sum, row) => sum + Number(row.cost_usd ?? 0), 0).toFixed(4)} USD`,
        found.some((row) => row.unpriced) ? element("span", { className: "soft" }, " without replies of unknown price") : null),
      table("Cost", [
        [query.by || "agent", (row) => row.name ?? "no tenant"],
        ...(query.by === "user" ? [["tenant", (row) => row.tenant]] : []),
        ["cost, USD#", (row) => money(row.cost_usd)],
        ["share", (row) => element("meter", { value: Number(row.cost_usd ?? 0), max: most || 1, "aria-hidden": "true" })],
        ["replies#", (row) => number(row.replies)],
        ["input tokens#", (row) => number(row.input_tokens)],
        ["of them cached#", (row) => number(row.cached_tokens)],
        ["output tokens#", (row) => number(row.output_tokens)],
        ["unpriced#", (row) => number(row.unpriced)],
      ], found, { none: "No turn has used a model in this time." }),
    ];
  },
};
