/** The page "Sessions": those that have something to do, with what they wait for, or the newest ones. */

import { element } from "../chat/elements.js";
import { ago, ask, button, choice, duration, field, id, state, table, user } from "./parts.js";

const MOST = 200;

const end = (row, context) => button("End…", () => ask(
  { title: "End the session", text: "Turns that were accepted run first. The next message begins a new session.", yes: "End it", danger: true },
  () => context.api.send("POST", `sessions/${row.session_id}/end`, { reason: "ended in the console" }), context.reload), { label: `End session ${row.session_id}` });

const turnsOf = (row) => element("a", { href: `#/turns?session_id=${row.session_id}` }, id(row.session_id));

const live = (found, context) => table("Live sessions", [
  ["session", turnsOf],
  ["user", user],
  ["agent", (row) => row.agent],
  ["state", (row) => state(row.state)],
  ["oldest turn", (row) => id(row.turn_id, "turns")],
  ["status", (row) => state(row.status)],
  ["turns#", (row) => row.unsettled],
  ["age#", (row) => duration(Math.round(row.age_s))],
  ["why", (row) => row.reason],
  ["", (row) => button("Cancel…", () => ask(
    { title: "Cancel the turn", text: "A turn that runs is cancelled at its next safe point.", yes: "Cancel it", danger: true },
    () => context.api.send("POST", `turns/${row.turn_id}/cancel`), context.reload), { label: `Cancel turn ${row.turn_id}` })],
], found, { key: (row) => row.session_id, none: "No session has an unsettled turn." });

const newest = (found, context) => table("Sessions", [
  ["session", turnsOf],
  ["user", user],
  ["agent", (row) => row.agent],
  ["state", (row) => state(row.state)],
  ["title", (row) => row.title],
  ["turns#", (row) => row.turn_count],
  ["messages#", (row) => row.message_count],
  ["begun", (row) => ago(row.created_at)],
  ["active", (row) => ago(row.last_activity_at)],
  ["", (row) => (row.ended_at === null ? end(row, context) : null)],
], found, { key: (row) => row.session_id, none: "No session." });

export const sessions = {
  title: "Sessions",
  every: 2000,
  tools: (context) => [
    choice("Show", "show", [["", "with unsettled turns"], ["newest", "the newest"]], context),
    ...(context.query.show === "newest" ? [field("user", "user_id", context), field("tenant", "tenant", context)] : []),
  ],
  load: (api, { query }, signal) => (query.show === "newest"
    ? api.get("sessions", { limit: MOST, user_id: query.user_id, tenant: query.tenant }, signal)
    : api.get("sessions/live", { limit: MOST }, signal)),
  show: (found, context) => [context.query.show === "newest" ? newest(found, context) : live(found, context)],
};
