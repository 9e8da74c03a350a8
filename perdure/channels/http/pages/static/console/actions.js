/** The page "Actions": what operators did, here, over the API and by commands. */

import { element } from "../chat/elements.js";
import { ago, button, id, state, table, user } from "./parts.js";

const MOST = 100;
const UUID = /^[0-9a-f]{8}-/;

const TARGETS = [["turns.", "turns"], ["sessions.", "sessions"], ["memories.", "memories"], ["cases.", "runs"]];

function target({ action, target: what }) {
  if (what === null || !UUID.test(what)) return what;
  return id(what, TARGETS.find(([begin]) => action.startsWith(begin))?.[1] ?? null);
}

export const actions = {
  title: "Actions",
  every: 5000,
  load: (api, { query }, signal) => api.get("audit", { limit: MOST, before: query.before }, signal),
  show: (found, context) => [
    table("Actions", [
      ["when", (row) => ago(row.began_at)],
      ["via", (row) => row.via],
      ["who", (row) => row.actor],
      ["action", (row) => row.action],
      ["target", target],
      ["user", user],
      ["note", (row) => row.note],
      ["outcome", (row) => (row.outcome === null ? state("unfinished", "warn") : state(row.outcome, row.outcome === "done" ? "good" : "bad"))],
    ], found, { key: (row) => row.audit_id, none: "No operator has done anything yet." }),
    element("div", { className: "more" },
      found.length < MOST ? null : button("Older", () => context.set({ before: found.at(-1).audit_id })),
      context.query.before ? button("Newest", () => context.set({ before: "" })) : null),
  ],
};
