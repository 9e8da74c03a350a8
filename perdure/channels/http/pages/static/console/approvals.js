/** The page "Approvals": tool calls that wait for a person. */

import { element, readJson, shownJson } from "../chat/elements.js";
import { ago, ask, button, field, id, table, user } from "./parts.js";

const MOST = 200;

function decide(row, decision, context) {
  const approves = decision === "approve";
  const input = element("textarea", { value: shownJson(row.arguments), rows: 6, spellcheck: false, "aria-label": "Arguments" });
  ask({
    title: `${approves ? "Approve" : "Deny"} ${row.tool}`,
    text: element("div", {},
      element("p", {}, `Of ${user(row)}, by the agent ${row.agent}.`),
      approves ? element("label", {}, "Arguments with which it runs", input) : element("pre", {}, shownJson(row.arguments))),
    yes: approves ? "Approve" : "Deny", danger: !approves,
  }, () => {
    let given = null;
    if (approves) {
      try {
        given = readJson(input.value);
      } catch {
        throw new Error("The arguments are no JSON.");
      }
    }
    const changed = approves && JSON.stringify(given) !== JSON.stringify(row.arguments);
    return context.api.send("POST", `turns/${row.turn_id}/approval`, { call_id: row.call_id, decision, ...(changed ? { arguments: given } : {}) });
  }, context.reload);
}

export const approvals = {
  title: "Approvals",
  every: 2000,
  tools: (context) => [field("user", "user_id", context), field("tenant", "tenant", context)],
  load: (api, { query }, signal) => api.get("approvals", { limit: MOST, user_id: query.user_id, tenant: query.tenant }, signal),
  show: (found, context) => [table("Approvals", [
    ["tool", (row) => row.tool],
    ["arguments", (row) => element("pre", {}, shownJson(row.arguments, 1))],
    ["user", user],
    ["agent", (row) => row.agent],
    ["approver", (row) => row.approver],
    ["waits since", (row) => ago(row.waiting_since)],
    ["expires", (row) => ago(row.expires_at)],
    ["turn", (row) => id(row.turn_id, "turns")],
    ["", (row) => element("div", { className: "row" },
      button("Approve…", () => decide(row, "approve", context), { label: `Approve ${row.tool} of ${user(row)}` }),
      button("Deny…", () => decide(row, "deny", context), { danger: true, label: `Deny ${row.tool} of ${user(row)}` }))],
  ], found, { key: (row) => `${row.turn_id} ${row.call_id}`, none: "No call waits for a person." })],
};
