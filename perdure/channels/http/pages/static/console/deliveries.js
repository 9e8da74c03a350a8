/** The page "Deliveries": replies to URLs, chats and tasks, with resend. */

import { ago, ask, button, choice, id, state, table, user } from "./parts.js";

const MOST = 200;

const receiver = ({ url, task, channel, place }) => url ?? task ?? `${channel}:${place?.chat ?? ""}`;

/** Count the failed deliveries, then ask whether to send them again. */
async function resendFailed(context) {
  const { deliveries: count } = await context.api.send("POST", "deliveries/resend", { dry_run: true });
  ask(
    { title: "Send the failed deliveries again", text: `${count} deliveries begin a new series of attempts.`, yes: "Send again" },
    () => context.api.send("POST", "deliveries/resend", {}), context.reload,
  );
}

export const deliveries = {
  title: "Deliveries",
  every: 4000,
  tools: (context) => [
    choice("Status", "status", [["", "all"], ["failed", "failed"], ["pending", "pending"], ["delivered", "delivered"]], context),
    button("Resend all failed…", () => resendFailed(context)),
  ],
  load: (api, { query }, signal) => api.get("deliveries", { status: query.status, limit: MOST }, signal),
  show: (found, context) => [table("Deliveries", [
    ["delivery", (row) => id(row.delivery_id)],
    ["turn", (row) => id(row.turn_id, "turns")],
    ["user", user],
    ["receiver", (row) => receiver(row.target)],
    ["status", (row) => state(row.status)],
    ["attempts#", (row) => row.attempts],
    ["created", (row) => ago(row.created_at)],
    ["next or done", (row) => ago(row.delivered_at ?? row.due_at)],
    ["last error", (row) => row.last_error],
    ["", (row) => button("Resend…", () => ask(
      { title: "Send again", text: `${receiver(row.target)} may get this reply a second time; it has the same delivery id.`, yes: "Send again" },
      () => context.api.send("POST", `deliveries/${row.delivery_id}/resend`), context.reload), { label: `Resend delivery ${row.delivery_id}` })],
  ], found, { key: (row) => row.delivery_id, none: "No delivery." })],
};
