/** The page "What I know about you": the user's memories, to see, correct and forget. */

import { byId, element } from "./elements.js";

const PAGE = 20;
const MOST_AT_ONCE = 999;
const KINDS = { fact: "Fact", preference: "Preference", insight: "Insight", conversation: "Quotation" };

const day = (instant) => new Date(instant).toLocaleDateString(undefined, { dateStyle: "medium" });
const moment = (instant) => new Date(instant).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" });

export class Memories {
  /** The ids of the listed memories in the gateway's order; the next page follows the last one. */
  #ids = [];
  /** The listed memories by id: their text as JSON, and their elements. */
  #items = new Map();
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
    this.#items.clear();
    this.dialog.showModal();
    return this.#more();
  }

  #read(limit, after = "") {
    return this.api().ask("GET", `/v1/memories?user_id=${encodeURIComponent(this.api().user)}&limit=${limit}${after}`);
  }

  async #more() {
    const more = byId("more-memories"), mine = this.#loading += 1, shown = this.#ids.length;
    more.hidden = true;
    this.#say("Loading…");
    try {
      const found = await this.#read(PAGE + 1, shown ? `&after=${this.#ids.at(-1)}` : "");
      if (mine !== this.#loading) return;
      this.#put(found.slice(0, PAGE), found.length > PAGE);
      if (shown) this.#items.get(this.#ids[shown])?.item.querySelector("button").focus();
    } catch (error) {
      if (mine !== this.#loading) return;
      if (error.status === 404 && shown) return void await this.#again(shown + PAGE); // another tab has forgotten the last one
      this.#fail(error);
    }
  }

  /** Read the listed memories again: what is corrected or forgotten ends others, or lets them hold again. */
  async #refresh(count) {
    const mine = this.#loading += 1, most = Math.min(Math.max(count, PAGE), MOST_AT_ONCE), more = byId("more-memories");
    more.disabled = true;
    try {
      const found = await this.#read(most + 1);
      if (mine !== this.#loading) return;
      this.#ids = [];
      this.#put(found.slice(0, most), found.length > most);
    } finally {
      more.disabled = false;
    }
  }

  async #again(count) {
    try {
      await this.#refresh(count);
    } catch (error) {
      this.#fail(error);
    }
  }

  /** Add memories to the list. What has not changed keeps its element, with what is open in it. */
  #put(memories, hasMore) {
    const more = byId("more-memories");
    this.#ids.push(...memories.map((each) => each.id));
    for (const each of memories) {
      const text = JSON.stringify(each);
      if (this.#items.get(each.id)?.text !== text) this.#items.set(each.id, { text, item: this.#item(each) });
    }
    const items = this.#ids.map((each) => this.#items.get(each).item), listed = [...this.list.children];
    if (listed.every((each, at) => each === items[at])) this.list.append(...items.slice(listed.length));
    else this.list.replaceChildren(...items);
    this.#say("");
    this.#empty();
    more.textContent = "Show more";
    more.hidden = !hasMore;
  }

  #fail(error) {
    const more = byId("more-memories");
    this.#say(`The memories could not be read: ${error.message}`, true);
    more.textContent = "Try again";
    more.hidden = false;
  }

  #empty() {
    if (!this.#ids.length) {
      this.list.replaceChildren(element("li", { className: "none" }, "Nothing yet. What you tell me is remembered after a conversation's session has ended."));
    }
  }

  #say(text, bad = false) {
    this.status.textContent = text;
    this.status.classList.toggle("bad", bad);
  }

  #item(memory) {
    const { valid_until: until } = memory, ended = until !== null && new Date(until) <= new Date();
    const since = `since ${day(memory.valid_from)}`;
    const made = element("li", { "data-id": memory.id, className: ended ? "ended" : "" },
      element("p", { className: "content", dir: "auto" }, memory.content),
      element("p", { className: "about" }, ...[
        KINDS[memory.type], memory.attribute,
        ended ? `${day(memory.valid_from)} – ${day(until)}, no longer` : until === null ? since : `${since}, until ${day(until)}`,
      ].filter((each) => each !== null).join(" · ")),
      this.#sources(memory),
      element("div", { className: "actions" },
        until !== null || memory.type === "conversation" ? null : element("button", {
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
      element("blockquote", { dir: "auto" }, text),
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
    const input = element("textarea", { value: memory.content, rows: 2, maxLength: 1000, required: true, dir: "auto", "aria-label": "The right words" });
    this.#ask(item, (close) => [input, element("div", { className: "buttons" },
      element("button", { type: "button", className: "quiet", onclick: close }, "Cancel"),
      element("button", { type: "submit" }, "Save"))], async () => {
      const right = input.value.trim() === memory.content ? memory
        : await this.api().ask("PATCH", `/v1/memories/${memory.id}`, { content: input.value });
      this.#items.get(memory.id).text = ""; // its element has the form
      await this.#refresh(this.#ids.length + 1);
      if (right !== memory) this.#say("Corrected.");
      this.#focus(right.id, memory.id);
    });
    input.focus();
    input.select();
  }

  /** Move the keyboard's focus to the first of these memories that is listed. */
  #focus(...ids) {
    const item = ids.map((each) => this.#items.get(each)?.item).find((each) => each?.isConnected);
    (item?.querySelector(".actions button") ?? byId("close-memories")).focus();
  }

  #forget(item, memory) {
    const sure = element("button", { type: "submit", className: "danger" }, "Forget it");
    this.#ask(item, (close) => [
      element("p", {}, "Forget this for good? Nothing is learnt from its messages again; they stay in their conversations."),
      element("div", { className: "buttons" }, element("button", { type: "button", className: "quiet", onclick: close }, "Keep it"), sure),
    ], async () => {
      const at = this.#ids.indexOf(memory.id), near = [this.#ids[at + 1], this.#ids[at - 1]];
      try {
        await this.api().ask("DELETE", `/v1/memories/${memory.id}`);
      } catch (error) {
        if (error.status !== 404) throw error; // else another tab has forgotten it
      }
      await this.#refresh(this.#ids.length);
      this.#say("Forgotten.");
      this.#focus(...near);
    });
    sure.focus();
  }
}
