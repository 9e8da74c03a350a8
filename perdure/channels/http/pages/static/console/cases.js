/** The pages "CaseBank" and "Run": runs of the policy, and one run's plan with duplicates side by side. */

import { element } from "../chat/elements.js";
import { ago, ask, button, choice, facts, id, part, state, table } from "./parts.js";

const MOST = 50;
const WAITING = "waiting_approval";

export const runs = {
  title: "CaseBank",
  every: 4000,
  tools: (context) => [
    button("Plan a run (changes nothing)", async () => {
      const made = await context.api.send("POST", "consolidation/dry-run?wait=0", {});
      context.go(`runs/${made.run_id}`);
    }),
    button("Run the policy…", () => ask(
      { title: "Run the policy", text: "Cases that fail, duplicates and unused cases are archived, after approval if PERDURE_CASEBANK__APPROVAL asks for it.", yes: "Run" },
      () => context.api.send("POST", "consolidation/run?wait=0", {}), context.reload)),
  ],
  load: (api, _context, signal) => api.get("consolidation/runs", { limit: 100 }, signal),
  show: (found) => [table("Runs", [
    ["run", (row) => id(row.run_id, "runs")],
    ["kind", (row) => (row.dry_run ? "dry run" : "run")],
    ["phase", (row) => state(row.phase)],
    ["done#", (row) => `${row.done} of ${row.total}`],
    ["started", (row) => ago(row.started_at)],
    ["finished", (row) => ago(row.finished_at)],
    ["error", (row) => row.error],
  ], found, { key: (row) => row.run_id, none: "No run yet." })],
};

const ACTIONS = { remove: "Removed: it fails too often", merge: "Merged into a duplicate that is used more", archive: "Archived: it is not used", spare: "Spared" };

const side = (heading, caseId, query, response) => element("div", { className: "case" },
  element("h4", {}, heading, " ", element("code", {}, caseId)),
  query === null ? element("p", { className: "soft" }, "The case was erased.") : element("p", {}, element("strong", {}, query)),
  response === null ? null : element("pre", {}, response));

function line(row) {
  const about = [row.similarity === null ? null : `similarity ${row.similarity.toFixed(3)}`, `${row.usage_count} uses`,
    row.success_rate === null ? null : `${row.success_rate.toFixed(0)} % success`].filter(Boolean).join(" · ");
  return element("article", { className: "plan", "data-key": `line ${row.position}` },
    element("h3", {}, ACTIONS[row.action], " ", row.outcome === null ? null : state(row.outcome)),
    element("p", { className: "soft" }, `${row.reason} · ${about}`),
    row.outcome_reason === null ? null : element("p", { className: "soft" }, `Spared when the plan was applied: ${row.outcome_reason}`),
    element("div", { className: "sides" },
      side(row.action === "merge" ? "Goes" : "Case", row.case_id, row.query, row.response_text),
      row.keeper_id === null ? null : side("Stays", row.keeper_id, row.keeper_query, row.keeper_response_text)));
}

function decide(found, verb, context) {
  const approves = verb === "approve";
  ask({
    title: approves ? "Approve the plan" : "Reject the plan",
    text: approves ? "A worker applies it. Archived cases can be restored." : "No case is changed.",
    yes: approves ? "Approve" : "Reject", danger: !approves,
  }, () => context.api.send("POST", `consolidation/runs/${found.run_id}/${verb}`), context.reload);
}

export const run = {
  title: "Run of the CaseBank's policy",
  every: 4000,
  tools: (context) => [choice("Show", "action", [["", "all"], ["merge", "merged"], ["remove", "removed"], ["archive", "archived"], ["spare", "spared"]], context)],
  load: async (api, { argument, query }, signal) => {
    const at = `consolidation/runs/${encodeURIComponent(argument)}`;
    const [found, lines] = await Promise.all([
      api.get(at, {}, signal), api.get(`${at}/report`, { action: query.action, after: query.after, limit: MOST }, signal)]);
    return { found, lines };
  },
  show: ({ found, lines }, context) => [
    facts([
      ["run", element("code", {}, found.run_id)], ["kind", found.dry_run ? "dry run" : "run"], ["phase", state(found.phase)],
      ["progress", `${found.done} of ${found.total}`],
      ["plan", found.plan && `${found.plan.removed_cases} removed, ${found.plan.merged_cases} merged, ${found.plan.archived_cases} archived`],
      ["outcome", found.outcome && `${found.outcome.removed_cases} removed, ${found.outcome.merged_cases} merged, ${found.outcome.archived_cases} archived`],
      ["started", ago(found.started_at)], ["expires", found.phase === WAITING ? ago(found.expires_at) : null],
      ["decided by", found.decided_by], ["error", found.error],
    ]),
    found.phase !== WAITING ? null : element("div", { className: "more" },
      button("Approve…", () => decide(found, "approve", context)), button("Reject…", () => decide(found, "reject", context), { danger: true })),
    part("Plan", ...(lines.length ? lines.map(line) : [element("p", { className: "none" }, "No case.")])),
    element("div", { className: "more" },
      lines.length < MOST ? null : button("More", () => context.set({ after: lines.at(-1).position })),
      context.query.after ? button("From the beginning", () => context.set({ after: "" })) : null),
  ],
};
