/** One message or tool call as the page shows it, and a turn's events applied to them. */

import { element, leaveFocus, shownJson } from "./elements.js";
import { shownFile } from "./files.js";
import { Growing, rendered } from "./text.js";

const CUT_OFF = "The answer was cut off at the model's limit of tokens.";

const RESUMED = {
  worker_lost: "The worker was lost. Another one continues the answer.",
  error: "An attempt failed unexpectedly. The next one continues the answer.",
};

/** A message that a message of a chat service replies to or forwards: its title, and between two marks its text. */
const QUOTED = /(?:^|\n\n)([^\n]+):\n<quoted_message ([0-9a-f]{16})>\n([^]*?)\n<\/quoted_message \2>/g;

/** The text of a message of the user as nodes. */
function withQuotations(text) {
  const nodes = [];
  let end = 0;
  for (const found of text.matchAll(QUOTED)) {
    nodes.push(text.slice(end, found.index), element("blockquote", { dir: "auto", title: found[1] }, found[3]));
    end = found.index + found[0].length;
  }
  return [...nodes, text.slice(end)].filter((each) => each !== "");
}

/**
 * A message of the user; `turnId` is that of its turn, once it is accepted, and `parts` has its files. `said` has both
 * for `said`.
 */
export function userMessage(text, turnId = "", parts = []) {
  const files = parts.filter((each) => each.type !== "text");
  const made = element("article", { className: "message user", "aria-label": "You", "data-turn": turnId },
    element("div", { className: "text", dir: "auto" }, ...files.map(shownFile), ...withQuotations(text)));
  made.said = { text, files: files.map(({ type, file_id, name }) => ({ type, file_id, ...(name ? { name } : {}) })) };
  return made;
}

/** What the user said in a turn, as the members `text` or `parts` of a message. */
export function saidIn(log, turnId) {
  const said = [...log.querySelectorAll(".user:not(.answer)")].filter((each) => each.dataset.turn === turnId).map((each) => each.said);
  const text = said.map((each) => each.text).filter((each) => each.trim()).join("\n\n"), files = said.flatMap((each) => each.files);
  if (!files.length) return { text };
  return { parts: [...(text ? [{ type: "text", text }] : []), ...files] };
}

/** A message of the agent, or the error that is shown in its place. */
export function agentMessage(text, failed = false) {
  const made = element("article", { className: "message assistant", "aria-label": failed ? "Error" : "Agent" });
  made.classList.toggle("failed", failed);
  made.append(element("div", { className: "text" }, ...rendered(text)));
  return made;
}

/** What is shown in place of an answer that does not come. */
export const noAnswer = (why) => element("p", { className: "note" }, why);

/** Add a node to the end of the log, before the messages of the user that wait for an earlier answer. */
export function place(log, node) {
  log.insertBefore(node, log.querySelector(".user.queued"));
}

/** Show the error in place of a turn's answer, once, with a button that sends the turn's message again. */
export function showFailure(log, turnId, text, retry) {
  if ([...log.querySelectorAll(".failed")].some((each) => each.dataset.failed === turnId)) return;
  const made = agentMessage(text, true);
  made.dataset.failed = turnId;
  if (Object.values(saidIn(log, turnId)).some((each) => each.length)) {
    made.append(element("button", { type: "button", className: "retry", onclick: () => retry(turnId) }, "Try again"));
  }
  place(log, made);
}

/** Show a committed message of a transcript; one that is `past` has no answers of the user elsewhere on the page. */
export function show(log, message, retry, past = false) {
  for (const call of message.tool_calls ?? []) {
    addCall(log, message.turn_id, call);
    const asked = call.question && call.arguments.question;
    if (asked) addQuestion(log, `${message.turn_id}:${call.id}`, 1, asked, call.question);
  }
  if (message.role === "tool" && past) addAnswer(log, `${message.turn_id}:${message.tool_call_id}`, message);
  if (message.role === "user") place(log, userMessage(message.content, message.turn_id, message.parts));
  if (message.role === "tool") addResult(log, message.turn_id, message.tool_call_id, message.content);
  if (message.role !== "assistant" || !message.content.trim()) return;
  if (message.error) showFailure(log, message.turn_id, message.content, retry);
  else {
    place(log, agentMessage(message.content));
    if (message.stop_reason === "length" && !message.tool_calls) place(log, noAnswer(CUT_OFF));
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

/** Show a question to the user, once for each number `asked`. */
function addQuestion(log, call, asked, text, state = "open") {
  if ([...log.querySelectorAll(".question")].some((each) => each.dataset.asked === `${call}:${asked}`)) return;
  const shown = agentMessage(text);
  shown.classList.add("question");
  shown.dataset.asked = `${call}:${asked}`;
  shown.dataset.state = state;
  place(log, shown);
}

/** Show the user's answer to a question below it, as the model has read it. */
function addAnswer(log, call, { turn_id: turnId, content }) {
  const question = [...log.querySelectorAll(".question")].find((each) => each.dataset.asked === `${call}:1`);
  if (question?.dataset.state !== "answered") return;
  const answer = userMessage(content, turnId);
  answer.classList.add("answer");
  question.after(answer);
}

/** Add its result to a tool call, once. */
function addResult(log, turnId, callId, content) {
  const made = findCall(log, turnId, callId);
  if (made && made.querySelectorAll("pre").length === 1) made.append(element("pre", {}, content));
}

function removeCard(card) {
  leaveFocus(card);
  card.remove();
}

/** The events of one turn, applied to the page: provisional text is replaced by the message that commits it. */
export class LiveTurn {
  /**
   * @param {HTMLElement} log
   * @param {string} turnId
   * @param {{
   *   decide: (callId: string, decision: string) => Promise<boolean>,
   *   joined: (turnId: string) => void,
   *   retry: (turnId: string) => void,
   * }} actions
   */
  constructor(log, turnId, actions) {
    this.log = log;
    this.turnId = turnId;
    this.actions = actions;
    this.provisional = null;
    this.growing = null;
    this.answers = false;
  }

  apply({ kind, data }) {
    switch (kind) {
      case "delta": this.#grow(data.text); break;
      case "rewind": this.#discard(); break;
      case "message":
        this.#discard();
        if (data.role !== "user") this.answers = true;
        if (data.role === "user" && (this.answers || data.turn_id !== this.turnId)) this.#join(data);
        else if (data.role !== "user" || !this.#showsUser()) show(this.log, data, this.actions.retry);
        break;
      case "tool_call": addCall(this.log, this.turnId, data); break;
      case "tool_result": addResult(this.log, this.turnId, data.id, data.content); break;
      case "approval_required": this.#ask(data); break;
      case "approval_decided": this.#decided(data); break;
      case "state": this.#resumed(data.resumed); this.#question(data.waiting_for); break;
      case "done": this.#end(data); break;
      default: break;
    }
  }

  /** Whether the page has the user's message already: it was sent here. */
  #showsUser() {
    return [...this.log.querySelectorAll(".user")].some((each) => each.dataset.turn === this.turnId);
  }

  /** Show a message that joined the turn while it ran, below what came before; the one that was sent here moves. */
  #join(message) {
    const sent = [...this.log.querySelectorAll(".user")].find((each) => each.dataset.text === message.content &&
      (each.classList.contains("queued") || each.dataset.turn === this.turnId));
    if (sent === undefined || !this.answers) return show(this.log, message, this.actions.retry);
    this.actions.joined(sent.dataset.turn);
    sent.classList.remove("queued");
    sent.dataset.turn = message.turn_id;
    delete sent.dataset.text;
    place(this.log, sent);
  }

  #grow(text) {
    if (this.provisional === null) {
      this.provisional = agentMessage("");
      this.provisional.setAttribute("aria-busy", "true");
      const shown = this.provisional.querySelector(".text");
      shown.classList.add("streaming");
      this.growing = new Growing(shown);
      place(this.log, this.provisional);
    }
    this.growing.add(text);
  }

  #discard() {
    this.growing?.end();
    this.provisional?.remove();
    this.provisional = null;
  }

  #ask(call) {
    if ([...this.log.querySelectorAll(".approval")].some((each) => each.dataset.call === call.call_id)) return;
    const decide = async (decision, pressed) => {
      const had = leaveFocus(card);
      for (const button of card.querySelectorAll("button")) button.disabled = true;
      if (await this.actions.decide(call.call_id, decision)) return card.remove();
      for (const button of card.querySelectorAll("button")) button.disabled = false;
      if (had) pressed.focus();
    };
    const own = call.approver === "user";
    const card = element("section", { className: "approval", "data-call": call.call_id, "aria-label": "Approval" },
      element("h2", {}, own ? `May the agent use ${call.tool}?` : `${call.tool} waits for someone else's approval.`),
      element("pre", {}, shownJson(call.arguments)));
    if (own) card.append(element("div", { className: "buttons" },
      element("button", { className: "quiet", type: "button", onclick: (event) => decide("deny", event.currentTarget) }, "Deny"),
      element("button", { type: "button", onclick: (event) => decide("approve", event.currentTarget) }, "Approve")));
    place(this.log, card);
  }

  /** Say once that another worker runs the turn. */
  #resumed(why) {
    if (!why || [...this.log.querySelectorAll(".note")].some((each) => each.dataset.turn === this.turnId)) return;
    place(this.log, element("p", { className: "note", "data-turn": this.turnId }, RESUMED[why] ?? RESUMED.error));
  }

  /** Show the question for which the turn waits, with what did not fit, each time that it is asked. */
  #question(waiting) {
    if (waiting?.kind !== "user") return;
    const text = [waiting.problem, waiting.question].filter(Boolean).join("\n\n");
    addQuestion(this.log, `${this.turnId}:${waiting.call_id}`, waiting.asked, text);
  }

  #decided(call) {
    for (const each of this.log.querySelectorAll(".approval")) if (each.dataset.call === call.call_id) removeCard(each);
  }

  #end(turn) {
    this.#discard();
    for (const each of this.log.querySelectorAll(".approval")) removeCard(each);
  }
}
