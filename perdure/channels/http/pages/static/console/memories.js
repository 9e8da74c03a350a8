/** The page "Memories": what is remembered of one user, with its sources; to correct and to forget. */

import { element } from "../chat/elements.js";
import { ago, ask, button, field, id, part, table } from "./parts.js";

const MOST = 100;

function sources(memory, context) {
  const made = element("details", { "data-key": `sources ${memory.id}` }, element("summary", {}, `${memory.message_ids.length} messages`));
  made.addEventListener("toggle", async () => {
    if (!made.open || made.querySelector("ul, p") !== null) return;
    try {
      const { sources: said, used_in: used } = await context.api.get(`memories/${memory.id}`);
      made.append(element("ul", {}, ...said.map((each) => element("li", {},
        `${each.role} · ${new Date(each.said_at).toLocaleString()} · ${each.channel}`, element("blockquote", {}, each.text)))));
      if (used.length) made.append(element("p", {}, "In the prompts of ", ...used.flatMap((each, at) => [at ? ", " : "", id(each.turn_id, "turns")])));
    } catch (error) {
      made.append(element("p", { className: "bad", role: "alert" }, error.message));
    }
  });
  return made;
}

function correct(memory, context) {
  const input = element("textarea", { value: memory.content, rows: 3, maxLength: 1000, "aria-label": "The right words" });
  ask({ title: "Correct the memory", text: input, yes: "Save" },
    () => context.api.send("PATCH", `memories/${memory.id}`, { content: input.value }), context.reload);
}

const forget = (memory, context) => ask(
  { title: "Forget the memory", text: `${memory.content} — for good: nothing is learnt from its messages again.`, yes: "Forget it", danger: true },
  () => context.api.send("DELETE", `memories/${memory.id}`), context.reload);

export const memories = {
  title: "Memories",
  every: 8000,
  tools: (context) => [field("user", "user_id", context), field("tenant", "tenant", context)],
  load: (api, { query }, signal) => (query.user_id
    ? api.get("memories", { limit: MOST, user_id: query.user_id, tenant: query.tenant, after: query.after }, signal) : []),
  show: (found, context) => (context.query.user_id ? [
    part(`Of ${context.query.user_id}`, table("Memories", [
      ["memory", (row) => element("span", { className: row.valid_until === null || new Date(row.valid_until) > new Date() ? "" : "ended", dir: "auto" }, row.content)],
      ["type", (row) => row.type],
      ["about", (row) => [row.subject, row.attribute].filter(Boolean).join(": ")],
      ["importance#", (row) => row.importance.toFixed(2)],
      ["since", (row) => ago(row.valid_from)],
      ["until", (row) => ago(row.valid_until)],
      ["sources", (row) => sources(row, context)],
      ["", (row) => element("div", { className: "row" },
        row.valid_until !== null ? null : button("Correct…", () => correct(row, context), { label: `Correct: ${row.content}` }),
        button("Forget…", () => forget(row, context), { danger: true, label: `Forget: ${row.content}` }))],
    ], found, { key: (row) => row.id, none: "Nothing is remembered." })),
    element("div", { className: "more" },
      found.length < MOST ? null : button("Older", () => context.set({ after: found.at(-1).id })),
      context.query.after ? button("Newest", () => context.set({ after: "" })) : null),
  ] : [element("p", { className: "none" }, "Name a user: memories are read one user at a time.")]),
};
