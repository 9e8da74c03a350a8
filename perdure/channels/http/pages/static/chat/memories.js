/** The page "What I know about you": the user's memories, to see, correct and forget. */

import { byId, element } from "./elements.js";

const PAGE = 20;
const KINDS = { fact: "Fact", preference: "Preference", insight: "Insight", conversation: "Quotation" };

const day = (instant) => new Date(instant).toLocaleDateString(undefined, { dateStyle: "medium" });
const moment = (instant) => new Date(instant).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" });

export class Memories {
  /** The ids of the listed memories in the gateway's order; the next page follows the last one. */
  #ids = [];
  /** The number of the newest loading: an earlier one that ends later shows nothing. */
  #loading = 0;

  /**
   * @param {() => import("./api.js").Api} api
   * @param {(conversation: string) => void} onOpen opens a conversation of a source message
   */
  constructor(api, onOpen) {
    this.api = api;
    this.onOpen = onOpen;
    this.dialog = byId("memories");
    this.list = byId("memory-list");
    this.status = byId("memory-status");
    byId("close-memories").addEventListener("click", () => this.dialog.close());
    byId("more-memories").addEventListener("click", () => this.#more());
  }

  /** Show the page with the newest memories. */
  show() {
    this.list.replaceChildren();
    this.#ids = [];
    this.dialog.showModal();
    return this.#more();
  }

  async #more() {
    const more = byId("more-memories"), mine = this.#loading += 1, first = !this.#ids.length;
    more.hidden = true;
    this.#say("Loading…");
    const after = first ? "" : `&after=${this.#ids.at(-1)}`;
    try {
      const found = await this.api().ask("GET", `/v1/memories?user_id=${encodeURIComponent(this.api().user)}&limit=${PAGE + 1}${after}`);
      if (mine !== this.#loading) return;
      const shown = found.slice(0, PAGE);
      this.#ids.push(...shown.map((each) => each.id));
      const made = shown.map((each) => this.#item(each));
      this.list.append(...made);
      this.#say("");
      this.#empty();
      more.textContent = "Show more";
      more.hidden = found.length <= PAGE;
      if (!first) made[0]?.querySelector("button").focus();
    } catch (error) {
      if (mine !== this.#loading) return;
      this.#say(`The memories could not be read: ${error.message}`, true);
      more.textContent = "Try again";
      more.hidden = false;
    }
  }

  #empty() {
    const none = this.list.querySelector(".none");
    if (this.#ids.length) none?.remove();
    else if (none === null) {
      this.list.append(element("li", { className: "none" }, "Nothing yet. What you tell me is remembered after a conversation's session has ended."));
    }
  }

  #say(text, bad = false) {
    this.status.textContent = text;
    this.status.classList.toggle("bad", bad);
  }

  #item(memory) {
    const ended = memory.valid_until !== null;
    const made = element("li", { "data-id": memory.id, className: ended ? "ended" : "" },
      element("p", { className: "content" }, memory.content),
      element("p", { className: "about" }, ...[
        KINDS[memory.type], memory.attribute, ended ? `${day(memory.valid_from)} – ${day(memory.valid_until)}, no longer` : `since ${day(memory.valid_from)}`,
      ].filter((each) => each !== null).join(" · ")),
      this.#sources(memory),
      element("div", { className: "actions" },
        ended || memory.type === "conversation" ? null : element("button", {
          type: "button", className: "quiet", "aria-label": `Correct: ${memory.content}`, onclick: () => this.#correct(made, memory),
        }, "Correct"),
        element("button", {
          type: "button", className: "quiet", "aria-label": `Forget: ${memory.content}`, onclick: () => this.#forget(made, memory),
        }, "Forget")));
    return made;
  }

  #sources(memory) {
    const count = memory.message_ids.length;
    if (!count) return element("p", { className: "about" }, "No message is known.");
    const made = element("details", {}, element("summary", {}, count === 1 ? "From 1 message" : `From ${count} messages`));
    made.addEventListener("toggle", async () => {
      if (!made.open || made.querySelector("ul") !== null) return;
      made.querySelector(".bad")?.remove();
      try {
        const { sources } = await this.api().ask("GET", `/v1/memories/${memory.id}`);
        if (made.querySelector("ul") === null) made.append(element("ul", {}, ...sources.map((each) => this.#source(each))));
        if (sources.length < count) made.append(element("p", { className: "about" }, `The first ${sources.length} of ${count}.`));
      } catch (error) {
        made.append(element("p", { className: "bad", role: "alert" }, error.message));
      }
    });
    return made;
  }

  #source({ conversation, channel, role, text, said_at: at }) {
    return element("li", {},
      element("p", { className: "about" }, `${role === "user" ? "You" : "Agent"} · ${moment(at)} · ${channel}`),
      element("blockquote", {}, text),
      conversation === null ? null : element("button", {
        type: "button", className: "quiet", onclick: () => { this.dialog.close(); this.onOpen(conversation); },
      }, "Open the conversation"));
  }

  /** Replace a memory's actions by a form, until it is sent or given up. `send` gets what is entered. */
  #ask(item, content, send) {
    const actions = item.querySelector(".actions"), error = element("p", { className: "bad", role: "alert" });
    const close = () => { form.remove(); actions.hidden = false; actions.querySelector("button").focus(); };
    const form = element("form", {
      onsubmit: async (event) => {
        event.preventDefault();
        const buttons = [...form.querySelectorAll("button")];
        for (const each of buttons) each.disabled = true;
        try {
          await send();
        } catch (problem) {
          error.textContent = problem.message;
          for (const each of buttons) each.disabled = false;
        }
      },
      onkeydown: (event) => {
        if (event.key !== "Escape") return;
        event.preventDefault(); // else it closes the page
        event.stopPropagation();
        close();
      },
    });
    form.append(...content(close), error);
    actions.hidden = true;
    item.append(form);
  }

  #correct(item, memory) {
    const input = element("textarea", { value: memory.content, rows: 2, maxLength: 1000, required: true, "aria-label": "The right words" });
    this.#ask(item, (close) => [input, element("div", { className: "buttons" },
      element("button", { type: "button", className: "quiet", onclick: close }, "Cancel"),
      element("button", { type: "submit" }, "Save"))], async () => {
      if (input.value.trim() === memory.content) return void this.#replace(item, [this.#item(memory)]);
      const right = await this.api().ask("PATCH", `/v1/memories/${memory.id}`, { content: input.value });
      if (right.id !== memory.id) this.#ids.splice(0, 0, right.id);
      const old = right.id === memory.id ? [] : [this.#item({ ...memory, valid_until: right.valid_from })];
      this.#replace(item, [this.#item(right), ...old]);
      this.#say("Corrected.");
    });
    input.focus();
    input.select();
  }

  #replace(item, items) {
    item.replaceWith(...items);
    items[0].querySelector(".actions button").focus();
  }

  #forget(item, memory) {
    const sure = element("button", { type: "submit", className: "danger" }, "Forget it");
    this.#ask(item, (close) => [
      element("p", {}, "Forget this for good? Nothing is learnt from its messages again; they stay in their conversations."),
      element("div", { className: "buttons" }, element("button", { type: "button", className: "quiet", onclick: close }, "Keep it"), sure),
    ], async () => {
      await this.api().ask("DELETE", `/v1/memories/${memory.id}`);
      this.#ids = this.#ids.filter((each) => each !== memory.id);
      const next = item.nextElementSibling ?? item.previousElementSibling;
      item.remove();
      this.#say("Forgotten.");
      if (!this.#ids.length && !byId("more-memories").hidden) return void await this.#more();
      this.#empty();
      (next?.querySelector(".actions button") ?? byId("close-memories")).focus();
    });
    sure.focus();
  }
}
