/** One message or tool call as the page shows it, and a turn's events applied to them. */

import { element } from "./elements.js";
import { rendered } from "./text.js";

/** A message of the user; `turnId` is that of its turn, once it is accepted, and `parts` has its files. */
export function userMessage(text, turnId = "", parts = []) {
  const names = parts.filter((each) => each.type !== "text").map((each) => each.name || each.type);
  return element("article", { className: "message user", "aria-label": "You", "data-turn": turnId },
    element("div", { className: "text" }, ...names.map((name) => element("span", { className: "file" }, name)), text));
}

/** A message of the agent, or the error that is shown in its place. */
export function agentMessage(text, failed = false) {
  const made = element("article", { className: "message assistant", "aria-label": failed ? "Error" : "Agent" });
  made.classList.toggle("failed", failed);
  made.append(element("div", { className: "text" }, ...rendered(text)));
  return made;
}

/** Add a node to the end of the log, before the messages of the user that wait for an earlier answer. */
export function place(log, node) {
  log.insertBefore(node, log.querySelector(".user.queued"));
}

/** Show a committed message of a transcript. */
export function show(log, message) {
  for (const call of message.tool_calls ?? []) addCall(log, message.turn_id, call);
  if (message.role === "user") place(log, userMessage(message.content, message.turn_id, message.parts));
  if (message.role === "tool") addResult(log, message.turn_id, message.tool_call_id, message.content);
  if (message.role === "assistant" && message.content.trim()) {
    place(log, agentMessage(message.content, message.error !== undefined));
  }
}

/** The element of a tool call. The ids of calls are distinct within a turn only. */
function findCall(log, turnId, callId) {
  return [...log.querySelectorAll("details.tool")].find((each) => each.dataset.call === `${turnId}:${callId}`);
}

/** Show a tool call, closed, unless it is shown. */
function addCall(log, turnId, call) {
  if (findCall(log, turnId, call.id)) return;
  const shown = typeof call.arguments === "string" ? call.arguments : JSON.stringify(call.arguments, null, 2);
  place(log, element("details", { className: "tool", "data-call": `${turnId}:${call.id}` },
    element("summary", {}, `Uses ${call.name}`), element("pre", {}, shown)));
}

/** Add its result to a tool call, once. */
function addResult(log, turnId, callId, content) {
  const made = findCall(log, turnId, callId);
  if (made && made.querySelectorAll("pre").length === 1) made.append(element("pre", {}, content));
}

/** The events of one turn, applied to the page: provisional text is replaced by the message that commits it. */
export class LiveTurn {
  /**
   * @param {HTMLElement} log
   * @param {string} turnId
   * @param {{ decide: (callId: string, decision: string) => Promise<boolean> }} actions
   */
  constructor(log, turnId, actions) {
    this.log = log;
    this.turnId = turnId;
    this.actions = actions;
    this.provisional = null;
    this.text = "";
  }

  apply({ kind, data }) {
    switch (kind) {
      case "delta": this.#grow(data.text); break;
      case "rewind": this.#discard(); break;
      case "message":
        this.#discard();
        if (data.role !== "user" || !this.#showsUser()) show(this.log, data);
        break;
      case "tool_call": addCall(this.log, this.turnId, data); break;
      case "tool_result": addResult(this.log, this.turnId, data.id, data.content); break;
      case "approval_required": this.#ask(data); break;
      case "approval_decided": this.#decided(data); break;
      case "done": this.#end(data); break;
      default: break;
    }
  }

  /** Whether the page has the user's message already: it was sent here. */
  #showsUser() {
    return [...this.log.querySelectorAll(".user")].some((each) => each.dataset.turn === this.turnId);
  }

  #grow(text) {
    this.text += text;
    if (this.provisional === null) {
      this.provisional = agentMessage("");
      this.provisional.setAttribute("aria-busy", "true");
      place(this.log, this.provisional);
    }
    const shown = this.provisional.querySelector(".text");
    shown.classList.add("streaming");
    shown.replaceChildren(...rendered(this.text));
  }

  #discard() {
    this.provisional?.remove();
    this.provisional = null;
    this.text = "";
  }

  #ask(call) {
    if ([...this.log.querySelectorAll(".approval")].some((each) => each.dataset.call === call.call_id)) return;
    const decide = async (decision) => {
      for (const button of card.querySelectorAll("button")) button.disabled = true;
      if (await this.actions.decide(call.call_id, decision)) card.remove();
      else for (const button of card.querySelectorAll("button")) button.disabled = false;
    };
    const own = call.approver === "user";
    const card = element("section", { className: "approval", "data-call": call.call_id, "aria-label": "Approval" },
      element("h2", {}, own ? `May the agent use ${call.tool}?` : `${call.tool} waits for someone else's approval.`),
      element("pre", {}, JSON.stringify(call.arguments, null, 2)));
    if (own) card.append(element("div", { className: "buttons" },
      element("button", { className: "quiet", type: "button", onclick: () => decide("deny") }, "Deny"),
      element("button", { type: "button", onclick: () => decide("approve") }, "Approve")));
    place(this.log, card);
  }

  #decided(call) {
    for (const each of this.log.querySelectorAll(".approval")) if (each.dataset.call === call.call_id) each.remove();
  }

  #end(turn) {
    this.#discard();
    for (const each of this.log.querySelectorAll(".approval")) each.remove();
  }
}
