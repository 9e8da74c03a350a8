/** The page: conversations, messages, and the turn that runs. */

import { Api, Refused, signedInUser } from "./api.js";
import { byId, element } from "./elements.js";
import { Files } from "./files.js";
import { LiveTurn, place, show, userMessage } from "./turn.js";

const CHANNEL = "web";
const MOST_SESSIONS = 5;
const TOKEN = "perdure.token";
const RUNNING = "perdure.running";
const DRAFT = "perdure.draft";
const LOOK_MS = 3000;

const app = byId("app"), log = byId("log"), text = byId("text"), status = byId("status");

/** @type {Api} */
let api;
const files = new Files((file) => api.upload(file), trouble);
/** @type {{ key: string, title: string | null, session_id: string | null }} */
let open;
/** The conversation that is being opened; `null` once its messages are shown. */
let opening = {};
/** Whether the user sent a message before the messages were shown; it is sent then. */
let hasty = false;
/** @type {AbortController | null} */
let following = null;
let runningTurn = null;
/** What the list of conversations shows. */
let listed = "";
/** When something last happened in the open conversation, and the turns that the page shows. */
let activity = null;
const knownTurns = new Set();

start();

async function start() {
  bind();
  const token = signedInUser() === null ? sessionStorage.getItem(TOKEN) : null;
  try {
    api = new Api(token, trouble);
    await api.ask("GET", `/v1/conversations?limit=1&user_id=${encodeURIComponent(api.user)}`);
  } catch (error) {
    if (!(error instanceof Refused) || ![401, 403].includes(error.status)) return wait(error);
    return signIn(token === null ? null : error.message);
  }
  byId("user").textContent = api.user;
  byId("leave").hidden = token === null;
  app.hidden = false;
  const unsent = JSON.parse(sessionStorage.getItem("perdure.unsent") ?? "null");
  const found = await list();
  const wanted = decodeURIComponent(location.hash.slice(1));
  await go(found.find((each) => each.conversation === wanted) ?? (wanted ? named(wanted) : found[0] ?? fresh()));
  if (unsent !== null) await sendAgain(unsent);
  setTimeout(look, LOOK_MS);
}

function wait(error) {
  app.hidden = false;
  trouble(error.message);
  setTimeout(() => location.reload(), 2000);
}

function signIn(why) {
  const dialog = byId("sign-in");
  if (why !== null) byId("sign-in-why").textContent = why;
  dialog.addEventListener("cancel", (event) => event.preventDefault());
  dialog.addEventListener("close", () => {
    sessionStorage.setItem(TOKEN, byId("token").value.trim());
    location.reload();
  });
  dialog.showModal();
}

// --- conversations ---------------------------------------------------------------------

const named = (key) => ({ conversation: key, title: null, session_id: null });
const fresh = () => named(`web-${crypto.randomUUID().slice(0, 8)}`);

async function list() {
  const found = await api.insist("GET", `/v1/conversations?archived=false&user_id=${encodeURIComponent(api.user)}`);
  const shown = JSON.stringify(found.map((each) => [each.conversation, each.title]));
  if (shown !== listed) { // else a button keeps the focus
    listed = shown;
    byId("conversations").replaceChildren(...found.map((each) => element("li", {}, element("button", {
      type: "button", title: each.title, "data-key": each.conversation, onclick: () => open_(each.conversation),
    }, each.title))));
  }
  mark();
  return found;
}

/** Open a conversation of the list as it is now. */
const open_ = (key) => attempt(async () => {
  const found = await list();
  await go(found.find((each) => each.conversation === key) ?? named(key));
});

async function listArchived() {
  const found = await api.insist("GET", `/v1/conversations?archived=true&user_id=${encodeURIComponent(api.user)}`);
  byId("archived-conversations").replaceChildren(...found.map((each) => element("li", {},
    element("span", { title: each.title }, each.title),
    element("button", {
      className: "quiet", type: "button", "aria-label": `Restore ${each.title}`, onclick: () => restore(each.conversation),
    }, "Restore"))));
  if (!found.length) byId("archived-conversations").append(element("li", { className: "none" }, "There is none."));
}

const restore = (key) => attempt(async () => {
  await change({ archived: false }, key);
  await listArchived();
  await open_(key);
});

/** Look for what other devices and channels do: new titles, and turns of the open conversation, which are followed. */
async function look() {
  if (document.visibilityState === "visible") await attempt(lookOnce);
  setTimeout(look, LOOK_MS);
}

async function lookOnce() {
  const key = open.key;
  const current = (await list()).find((each) => each.conversation === key);
  if (current === undefined || open.key !== key || log.querySelector(".unsent")) return;
  const begun = current.unsettled_turns.filter((each) => !remembered(key).includes(each));
  for (const turnId of begun) remember(key, turnId);
  if (following !== null) return; // the loop that runs goes on with them
  if (begun.length || await changedElsewhere(current)) {
    open.session_id = current.session_id;
    await loadAndFollow();
  }
}

/** Whether the conversation has a settled turn that the page does not show. */
async function changedElsewhere(current) {
  if (current.last_activity_at === activity || current.session_id === null) return false;
  activity = current.last_activity_at;
  const messages = await api.insist("GET", `/v1/sessions/${current.session_id}/messages`);
  return messages.some((each) => !knownTurns.has(each.turn_id));
}

function mark() {
  for (const button of byId("conversations").querySelectorAll("button")) {
    if (button.dataset.key === open?.key) button.setAttribute("aria-current", "true");
    else button.removeAttribute("aria-current");
  }
}

async function go(conversation) {
  const typed = open === undefined ? text.value : "", mine = opening = {};
  hasty &&= open === undefined;
  following?.abort();
  following = null;
  open = { key: conversation.conversation, title: conversation.title, session_id: conversation.session_id };
  activity = conversation.last_activity_at ?? null;
  for (const turnId of conversation.unsettled_turns ?? []) remember(open.key, turnId);
  history.replaceState(null, "", `#${encodeURIComponent(open.key)}`);
  app.classList.remove("listing");
  byId("title").textContent = open.title ?? "New conversation";
  document.title = open.title === null ? "perdure" : `${open.title} · perdure`;
  byId("menu").hidden = open.title === null;
  byId("menu").open = false;
  text.value = typed || (sessionStorage.getItem(`${DRAFT}:${api.user}:${open.key}`) ?? "");
  grow();
  mark();
  running(null);
  await loadAndFollow();
  if (opening !== mine) return;
  opening = null;
  text.focus();
  if (hasty) byId("form").requestSubmit();
}

/** Show the transcript, and go on with the turns that are not settled, behind the messages that are shown. */
async function loadAndFollow() {
  const shown = {};
  for (const message of await load()) shown[message.turn_id] = (shown[message.turn_id] ?? 0) + 1;
  followTurns(shown);
}

/** Show the transcript of the conversation's newest sessions; its messages. */
async function load() {
  const key = open.key;
  const where = `user_id=${encodeURIComponent(api.user)}&conversation=${encodeURIComponent(key)}`;
  const sessions = await api.insist("GET", `/v1/sessions?${where}&limit=${MOST_SESSIONS}`);
  const transcripts = [];
  for (const session of sessions.reverse()) {
    transcripts.push(await api.insist("GET", `/v1/sessions/${session.session_id}/messages`));
  }
  if (open.key !== key) return [];
  const unsent = [...log.querySelectorAll(".unsent")];
  for (const message of transcripts.flat()) knownTurns.add(message.turn_id);
  log.setAttribute("aria-live", "off");
  log.replaceChildren();
  for (const message of transcripts.flat()) show(log, message);
  log.append(...unsent);
  if (!log.children.length) log.append(element("p", { className: "empty" }, "What can I do for you?"));
  log.scrollTop = log.scrollHeight;
  requestAnimationFrame(() => log.setAttribute("aria-live", "polite"));
  return transcripts.flat();
}

// --- messages --------------------------------------------------------------------------

/** The conversation's turns that are not known to be settled, oldest first: all tabs of this browser share them. */
const remembered = (key) => [JSON.parse(localStorage.getItem(`${RUNNING}:${api.user}`) ?? "{}")[key] ?? []].flat();

const remember = (key, turnId) => keep(key, [...remembered(key).filter((each) => each !== turnId), turnId]);
const forget = (key, turnId) => keep(key, remembered(key).filter((each) => each !== turnId));

function keep(key, turnIds) {
  const turns = JSON.parse(localStorage.getItem(`${RUNNING}:${api.user}`) ?? "{}");
  if (turnIds.length) turns[key] = turnIds;
  else delete turns[key];
  localStorage.setItem(`${RUNNING}:${api.user}`, JSON.stringify(turns));
}

async function send(words) {
  const parts = await files.take();
  const said = parts.length === 0 ? { text: words } : { parts: [...(words.trim() ? [{ type: "text", text: words }] : []), ...parts] };
  if (parts.length === 0 && !words.trim()) return;
  const message = {
    user_id: api.user, ...said, channel: CHANNEL, conversation: open.key, message_id: crypto.randomUUID(),
  };
  sessionStorage.setItem("perdure.unsent", JSON.stringify(message));
  await deliver(message);
}

/** A message that this tab had not delivered when it was reloaded; its id makes sending it again safe. */
async function sendAgain(unsent) {
  if (unsent.conversation !== open.key) await go(named(unsent.conversation));
  await deliver(unsent);
}

async function deliver(message) {
  log.querySelector(".empty")?.remove();
  const written = message.text ?? message.parts.find((each) => each.type === "text")?.text ?? "";
  const shown = userMessage(written, "", message.parts);
  shown.classList.add("unsent");
  shown.classList.toggle("queued", following !== null);
  log.append(shown);
  log.scrollTop = log.scrollHeight;
  try {
    const accepted = await api.insist("POST", "/v1/messages", message);
    shown.classList.remove("unsent");
    shown.dataset.turn = accepted.turn_id;
    remember(message.conversation, accepted.turn_id);
    knownTurns.add(accepted.turn_id);
    open.session_id = accepted.session_id;
    if (open.key === message.conversation) followTurns();
    if (open.title === null) showTitle(await list());
  } catch (error) {
    shown.remove();
    text.value = written;
    grow();
    trouble(error.message);
  } finally {
    sessionStorage.removeItem("perdure.unsent");
  }
}

function showTitle(conversations) {
  const found = conversations.find((each) => each.conversation === open.key);
  if (found === undefined) return;
  open.title = found.title;
  byId("title").textContent = found.title;
  byId("menu").hidden = false;
}

/** Follow the conversation's turns one after another. `shown`: how many messages of each the page has. */
async function followTurns(shown = {}) {
  if (following !== null) return; // the loop that runs goes on with the next turn
  const mine = following = new AbortController(), key = open.key;
  for (let [turnId] = remembered(key); turnId !== undefined && !mine.signal.aborted; [turnId] = remembered(key)) {
    await follow(key, turnId, shown[turnId] ? `${shown[turnId]}-0` : null, mine.signal);
  }
  if (following !== mine) return;
  following = null;
  running(null);
}

/** Show the events of a turn after the event `last`. */
async function follow(key, turnId, last, signal) {
  knownTurns.add(turnId);
  running(turnId);
  for (const each of log.querySelectorAll(".user.queued")) {
    if (each.dataset.turn === turnId) each.classList.remove("queued");
  }
  const live = new LiveTurn(log, turnId, {
    decide: (callId, decision) => attempt(() => api.insist("POST", `/v1/turns/${turnId}/approval`, { call_id: callId, decision })),
  });
  try {
    await api.follow(turnId, { last }, (event) => {
      const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 120;
      live.apply(event);
      if (event.kind === "state") status.textContent = words(event.data);
      if (event.kind === "done") settled(turnId, event.data);
      if (atEnd) log.scrollTop = log.scrollHeight;
    }, signal);
  } catch (error) {
    trouble(error.message);
  }
  if (!signal.aborted) forget(key, turnId);
}

const words = ({ status: state, waiting_for: waiting }) => (waiting ? waits(waiting) : {
  accepted: "Waiting for a worker…", running: "Thinking…", waiting_approval: "Waits for your decision", parked: "The answer is delayed",
}[state] ?? "");

const waits = ({ name, until, progress }) =>
  `Waits for ${name} until ${new Date(until).toLocaleString()}${progress === null ? "" : `: ${progress}`}`;

function settled(turnId, turn) {
  const last = [...log.querySelectorAll(".assistant")].at(-1);
  if (turn.status === "done" && last) last.append(rating(turnId));
  if (turn.status === "cancelled") place(log, element("p", { className: "empty" }, "The answer was stopped."));
  status.textContent = turn.error === null ? "" : `${turn.error.message} (${turn.error.code})`;
  list();
}

function rating(turnId) {
  const buttons = [["Helpful", 1], ["Not helpful", -1]].map(([label, score]) =>
    element("button", { type: "button", "aria-pressed": "false", onclick: (event) => rate(event.currentTarget, score) }, label));
  const rate = async (chosen, score) => {
    await attempt(() => api.insist("POST", `/v1/turns/${turnId}/feedback`, { score }));
    for (const button of buttons) button.setAttribute("aria-pressed", String(button === chosen));
  };
  return element("div", { className: "rate" }, ...buttons);
}

function running(turnId) {
  runningTurn = turnId;
  byId("stop").hidden = turnId === null;
  if (turnId === null && !status.textContent.endsWith(")")) status.textContent = "";
}

// --- controls --------------------------------------------------------------------------

function bind() {
  byId("form").addEventListener("submit", (event) => {
    event.preventDefault();
    const words_ = text.value;
    if (!words_.trim() && !files.any) return;
    hasty = opening !== null;
    if (hasty) return;
    text.value = "";
    draft();
    grow();
    send(words_);
  });
  files.bind(byId("form"), text);
  text.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    byId("form").requestSubmit();
  });
  text.addEventListener("input", () => { grow(); draft(); });
  byId("stop").addEventListener("click", () => attempt(() => api.insist("POST", `/v1/turns/${runningTurn}/cancel`)));
  byId("new").addEventListener("click", () => go(fresh()));
  byId("open-side").addEventListener("click", () => { app.classList.add("listing"); byId("new").focus(); });
  byId("close-side").addEventListener("click", () => { app.classList.remove("listing"); text.focus(); });
  byId("leave").addEventListener("click", leave);
  byId("archive").addEventListener("click", () => attempt(async () => {
    await change({ archived: true });
    if (byId("archived").open) await listArchived();
    const [first] = await list();
    await go(first ?? fresh());
  }));
  byId("archived").addEventListener("toggle", () => { if (byId("archived").open) attempt(listArchived); });
  byId("end").addEventListener("click", () => attempt(async () => {
    if (open.session_id !== null) await api.ask("POST", `/v1/sessions/${open.session_id}/end`, { reason: "ended on the web" });
    open.session_id = null;
    status.textContent = "This session has ended. The next message begins a new one with its summary.";
  }));
  const dialog = byId("rename-dialog");
  byId("rename").addEventListener("click", () => { byId("new-title").value = open.title; dialog.returnValue = ""; dialog.showModal(); });
  byId("rename-cancel").addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => {
    if (dialog.returnValue === "save") attempt(async () => { await change({ title: byId("new-title").value }); showTitle(await list()); });
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    app.classList.remove("listing");
    byId("menu").open = false;
  });
  document.addEventListener("click", (event) => {
    if (!event.target.closest("#menu") || event.target.closest("#menu button")) byId("menu").open = false;
  });
  document.addEventListener("visibilitychange", () => {
    if (document.visibilityState === "visible" && runningTurn === null && open !== undefined) refresh();
  });
}

/** What other tabs and channels have added meanwhile. */
async function refresh() {
  await list();
  await loadAndFollow();
}

const change = (changes, key = open.key) =>
  api.insist("PATCH", `/v1/conversations/${encodeURIComponent(key)}?user_id=${encodeURIComponent(api.user)}`, changes);

/** Do something; whether it worked. An error is shown. */
async function attempt(work) {
  try {
    await work();
    return true;
  } catch (error) {
    trouble(error.message);
    return false;
  }
}

function trouble(message) {
  if (message || status.dataset.trouble) status.textContent = message;
  status.dataset.trouble = message;
}

/** Forget the token, and all that this browser keeps of the user: drafts, and messages and turns that are on their way. */
function leave() {
  for (const storage of [localStorage, sessionStorage]) {
    for (const key of Object.keys(storage)) if (key.startsWith("perdure.")) storage.removeItem(key);
  }
  text.value = "";
  location.replace(location.pathname);
}

function draft() {
  if (open === undefined) return;
  const key = `${DRAFT}:${api.user}:${open.key}`;
  if (text.value) sessionStorage.setItem(key, text.value);
  else sessionStorage.removeItem(key);
}

function grow() {
  text.style.height = "auto";
  text.style.height = `${text.scrollHeight + 2}px`;
}
