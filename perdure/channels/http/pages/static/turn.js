/** One message or tool call as the page shows it, and a turn's events applied to them. */

import { element } from "./elements.js";
import { rendered } from "./text.js";

/** A message of the user; `turnId` is that of its turn, once it is accepted. */
export function userMessage(text, turnId = "") {
  return element("article", { className: "message user", "aria-label": "You", "data-turn": turnId },
    element("div", { className: "text" }, text));
}

/** A message of the agent. */
export function agentMessage(text) {
  const made = element("article", { className: "message assistant", "aria-label": "Agent" });
  made.append(element("div", { className: "text" }, ...rendered(text)));
  return made;
}

/** A tool call, closed; its result is added later. */
export function toolCall(call) {
  const shown = typeof call.arguments === "string" ? call.arguments : JSON.stringify(call.arguments, null, 2);
  return element("details", { className: "tool", "data-call": call.id },
    element("summary", {}, `Uses ${call.name}`), element("pre", {}, shown));
}

/** Add a call's result to what `toolCall` made. */
export function addResult(log, callId, content) {
  const made = [...log.querySelectorAll("details.tool")].findLast((each) => each.dataset.call === callId);
  if (made && made.querySelectorAll("pre").length === 1) made.append(element("pre", {}, content));
}

/** Show a committed message of a transcript. */
export function show(log, message) {
  for (const call of message.tool_calls ?? []) addCall(log, call);
  if (message.role === "user") log.append(userMessage(message.content, message.turn_id));
  if (message.role === "tool") addResult(log, message.tool_call_id, message.content);
  if (message.role === "assistant" && message.content.trim()) log.append(agentMessage(message.content));
}

function addCall(log, call) {
  const known = [...log.querySelectorAll("details.tool")].some((each) => each.dataset.call === call.id && !each.dataset.old);
  if (!known) log.append(toolCall(call));
}

/** The events of one turn, applied to the page: provisional text is replaced by the message that commits it. */
export class LiveTurn {
  /**
   * @param {HTMLElement} log
   * @param {{ decide: (callId: string, decision: string) => Promise<boolean> }} actions
   */
  constructor(log, actions) {
    this.log = log;
    this.actions = actions;
    this.provisional = null;
    this.text = "";
    for (const each of log.querySelectorAll("details.tool")) each.dataset.old = "true";
  }

  apply({ kind, data }) {
    switch (kind) {
      case "delta": this.#grow(data.text); break;
      case "rewind": this.#discard(); break;
      case "message":
        this.#discard();
        if (data.role !== "user" || !this.#shows(data.turn_id)) show(this.log, data);
        break;
      case "tool_call": addCall(this.log, data); break;
      case "tool_result": addResult(this.log, data.id, data.content); break;
      case "approval_required": this.#ask(data); break;
      case "done": this.#end(data); break;
      default: break;
    }
  }

  /** Whether the page has the user's message already: it was sent here. */
  #shows(turnId) {
    return [...this.log.querySelectorAll(".user")].some((each) => each.dataset.turn === turnId);
  }

  #grow(text) {
    this.text += text;
    if (this.provisional === null) {
      this.provisional = agentMessage("");
      this.provisional.setAttribute("aria-busy", "true");
      this.log.append(this.provisional);
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
    const card = element("section", { className: "approval", "data-call": call.call_id, "aria-label": "Approval" },
      element("h2", {}, `May the agent use ${call.tool}?`),
      element("pre", {}, JSON.stringify(call.arguments, null, 2)),
      element("div", { className: "buttons" },
        element("button", { className: "quiet", type: "button", onclick: () => decide("deny") }, "Deny"),
        element("button", { type: "button", onclick: () => decide("approve") }, "Approve")));
    this.log.append(card);
  }

  #end(turn) {
    this.#discard();
    for (const each of this.log.querySelectorAll(".approval")) each.remove();
    if (turn.status === "failed") [...this.log.querySelectorAll(".assistant")].at(-1)?.classList.add("failed");
  }
}
