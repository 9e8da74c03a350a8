/** The page: conversations, messages, and the turn that runs. */

import { Api, Refused, signedInUser } from "./api.js";
import { byId, element, leaveFocus } from "./elements.js";
import { Files, loadFiles } from "./files.js";
import { Memories } from "./memories.js";
import { LiveTurn, noAnswer, place, saidIn, show, showFailure, userMessage } from "./turn.js";

const CHANNEL = "web";
/** The key that the page gives to the default conversation: that of messages without a key, as `perdure send` sends. */
const DEFAULT = "";
const DEFAULT_HASH = "#/";
/** The beginning of the id of a message that repeats that of a failed turn: trying twice sends one message. */
const RETRY = "retry-";
const MOST_SESSIONS = 5;
const TOKEN = "perdure.token";
const RUNNING = "perdure.running";
const UNSENT = "perdure.unsent";
const DRAFT = "perdure.draft";
const LOOK_MS = 3000;
const STOPPED = "The answer was stopped.";

const app = byId("app"), log = byId("log"), text = byId("text"), status = byId("status");

/** @type {Api} */
let api;
const files = new Files((file) => api.upload(file));
const memories = new Memories(() => api, (key) => open_(key));
/**
 * `title` is null until the conversation has a message. `remember`: whether memories are extracted from it.
 * @type {{ key: string, title: string | null, session_id: string | null, remember: boolean }}
 */
let open;
/** The conversation that is being opened; `null` once its messages are shown. */
let opening = {};
/** Whether the user sent a message before the messages were shown; it is sent then. */
let hasty = false;
/** How many times the messages of a conversation are being loaded. What is shown meanwhile is replaced. */
let loading = 0;
/** @type {AbortController | null} */
let following = null;
let runningTurn = null;
/** Whether the turn that runs waits for the user's answer to a question. */
let asks = false;
/** Whether the end of the log is in view: what is added is shown, too. */
let readsEnd = true;
/** What the list of conversations shows. */
let listed = "";
/** The messages that are not accepted yet, in their order, with what shows them. The tab's storage keeps them, too. */
let unsent = [];
/** The user's messages that this tab had not delivered when it was reloaded, until a conversation is open. */
const left = [];
/** The last request of each conversation's queue: messages are sent one after another, in their order. */
const queues = new Map();
/** The files of the last message that was written; those of the next one are taken after them. */
let taken = Promise.resolve();
/** When something last happened in the open conversation, and the turns that the page shows. */
let activity = null;
const knownTurns = new Set();
/** The channels over which turns came that were not sent here: an answer to such a turn's question goes over its own. */
const channelOf = new Map();

start();

async function start() {
  bind();
  const token = signedInUser() === null ? sessionStorage.getItem(TOKEN) : null;
  try {
    api = new Api(token, connection);
    await api.ask("GET", `/v1/conversations?limit=1&user_id=${encodeURIComponent(api.user)}`);
  } catch (error) {
    if (!(error instanceof Refused) || ![401, 403].includes(error.status)) return wait(error);
    return signIn(token === null ? null : error.message);
  }
  left.push(...[JSON.parse(sessionStorage.getItem(unsentKey()) ?? "[]")].flat());
  byId("user").textContent = api.user;
  byId("leave").hidden = token === null;
  app.hidden = false;
  const found = await list(), wanted = addressed();
  const first = found.find((each) => each.conversation === wanted) ?? (wanted === null ? found[0] ?? fresh() : named(wanted));
  if (open === undefined) await go(first); // else the user has begun a new one before the list arrived
  setTimeout(look, LOOK_MS);
}

/** The key of the conversation in the page's address; `null` if it has none, or a malformed one. */
function addressed() {
  if (location.hash === DEFAULT_HASH) return DEFAULT;
  try {
    return decodeURIComponent(location.hash.slice(1)) || null;
  } catch {
    return null;
  }
}

const addressOf = (key) => (key === DEFAULT ? DEFAULT_HASH : `#${encodeURIComponent(key)}`);

/** Open the conversation of a changed address: the user went back, or wrote another one. */
function readdressed() {
  if (open === undefined) return;
  const key = addressed();
  if (key === null) history.replaceState(null, "", addressOf(open.key));
  else if (key !== open.key) open_(key);
}

function wait(error) {
  app.hidden = false;
  trouble(error.message);
  setTimeout(() => location.reload(), 2000);
}

function signIn(why) {
  const dialog = byId("sign-in");
  if (dialog.open) return;
  if (why !== null) byId("sign-in-why").textContent = why;
  dialog.addEventListener("cancel", (event) => event.preventDefault());
  dialog.addEventListener("close", () => {
    sessionStorage.setItem(TOKEN, byId("token").value.trim());
    location.reload();
  });
  dialog.showModal();
}

// --- conversations ---------------------------------------------------------------------

const named = (key) => ({ conversation: key, title: key === DEFAULT ? "Default conversation" : null, session_id: null, remember: true });
const fresh = () => named(`web-${crypto.randomUUID().slice(0, 8)}`);

/** The query that selects a conversation's sessions. */
const sessionsOf = (key, limit) => `/v1/sessions?user_id=${encodeURIComponent(api.user)}&limit=${limit}&` +
  (key === DEFAULT ? `channel=${CHANNEL}` : `conversation=${encodeURIComponent(key)}`);

/** The conversations with keys and the default one, if it has a session; the most recently active first. */
async function conversations() {
  const [keyed, [newest]] = await Promise.all([
    api.insist("GET", `/v1/conversations?archived=false&user_id=${encodeURIComponent(api.user)}`),
    api.insist("GET", sessionsOf(DEFAULT, 1)),
  ]);
  for (const each of keyed) each.busy = each.unsettled_turns.length > 0;
  if (newest === undefined) return keyed;
  const { session_id: id, ended_at: ended, last_activity_at: at, unsettled } = newest;
  const keyless = { ...named(DEFAULT), session_id: ended === null ? id : null, last_activity_at: at, busy: unsettled > 0 };
  return [...keyed, keyless].sort((one, other) => Date.parse(other.last_activity_at) - Date.parse(one.last_activity_at));
}

async function list() {
  const found = await conversations();
  const shown = JSON.stringify(found.map((each) => [each.conversation, each.title]));
  if (shown !== listed) { // else a button keeps the focus
    listed = shown;
    byId("conversations").replaceChildren(...found.map((each) => element("li", {}, element("button", {
      type: "button", title: each.title, "data-key": each.conversation, onclick: () => open_(each.conversation),
    }, element("span", { dir: "auto" }, each.title)))));
  }
  const busy = new Set(found.filter((each) => each.busy).map((each) => each.conversation));
  for (const button of byId("conversations").querySelectorAll("button")) {
    const dot = button.querySelector(".busy");
    if (!busy.has(button.dataset.key)) dot?.remove();
    else if (dot === null) button.append(element("span", { className: "busy", role: "img", "aria-label": "not answered yet" }));
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
    element("span", { dir: "auto", title: each.title }, each.title),
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
  if (document.visibilityState === "visible") await lookOnce().catch(failed);
  setTimeout(look, LOOK_MS);
}

async function lookOnce() {
  const key = open.key;
  const current = (await list()).find((each) => each.conversation === key);
  if (current === undefined || open.key !== key || log.querySelector(".unsent")) return;
  if (current.title !== open.title) showTitle([current]);
  showRemembered(current.remember);
  const queue = current.session_id === null ? [] : await queued(current.session_id);
  if (open.key !== key || log.querySelector(".unsent")) return;
  const begun = queue.filter((each) => !remembered(key).includes(each.turn_id));
  if (following !== null) return showQueued(key, begun); // the loop that runs goes on with them
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
  const isFirst = open === undefined, typed = isFirst ? text.value : "", mine = opening = {};
  hasty &&= isFirst;
  following?.abort();
  following = null;
  byId("known").disabled = false;
  open = { key: conversation.conversation, title: conversation.title, session_id: conversation.session_id };
  showRemembered(conversation.remember);
  activity = conversation.last_activity_at ?? null;
  if (isFirst || addressed() === open.key) history.replaceState(null, "", addressOf(open.key));
  else history.pushState(null, "", addressOf(open.key));
  app.classList.remove("listing");
  byId("title").textContent = open.title ?? "New conversation";
  document.title = open.title === null ? "perdure" : `${open.title} · perdure`;
  byId("menu").hidden = open.title === null;
  byId("menu").open = false;
  for (const each of ["rename", "archive"]) byId(each).hidden = open.key === DEFAULT;
  text.value = typed || draftOf(open.key);
  grow();
  mark();
  calm();
  running(null);
  await loadAndFollow();
  if (opening !== mine) return;
  opening = null;
  text.focus();
  for (const message of left.splice(0)) deliver(message); // their ids make sending them again safe
  if (hasty) byId("form").requestSubmit();
}

/** Show all that was said, and go on with the turns that are not settled, behind the messages that are shown. */
async function loadAndFollow() {
  const shown = {};
  loading += 1;
  try {
    for (const message of await load()) shown[message.turn_id] = (shown[message.turn_id] ?? 0) + 1;
  } finally {
    loading -= 1;
    followTurns(shown);
  }
}

/** A session's turns that are not settled, with their messages. */
const queued = (sessionId) => api.insist("GET", `/v1/sessions/${sessionId}/queue`);

/** Show the messages of turns that the transcript does not have yet: the first one is answered, the others wait. */
function showQueued(key, turns) {
  for (const turn of turns) {
    remember(key, turn.turn_id);
    knownTurns.add(turn.turn_id);
    channelOf.set(turn.turn_id, turn.channel);
    if ([...log.querySelectorAll(".user")].some((each) => each.dataset.turn === turn.turn_id)) continue;
    const shown = userMessage(turn.text, turn.turn_id, turn.parts);
    shown.dataset.text = turn.text;
    shown.classList.toggle("queued", turn.turn_id !== runningTurn && remembered(key)[0] !== turn.turn_id);
    log.append(shown);
    markRetried(turn);
  }
}

/** Show that a settled turn has no answer, and that it was stopped, if perdure has not deleted the turn. */
async function sayWhy(turnId) {
  const note = noAnswer("There is no answer.");
  place(log, note);
  try {
    if ((await api.insist("GET", `/v1/turns/${turnId}`)).status === "cancelled") note.textContent = STOPPED;
  } catch { /* the note is true without the reason */ }
}

/** Show the transcript of the conversation's newest sessions, and the messages that wait; the committed messages. */
async function load() {
  const key = open.key;
  const sessions = await api.insist("GET", sessionsOf(key, MOST_SESSIONS));
  const transcripts = [], waiting = [];
  for (const session of sessions.reverse()) {
    // In this order: a turn that is not in the queue has all its messages in the transcript.
    if (session.ended_at === null) waiting.push(...await queued(session.session_id));
    transcripts.push(await api.insist("GET", `/v1/sessions/${session.session_id}/messages`));
  }
  const messages = transcripts.flat(), unsettled = new Set(waiting.map((each) => each.turn_id));
  if (open.key !== key) return [];
  for (const message of messages) knownTurns.add(message.turn_id);
  log.setAttribute("aria-live", "off");
  log.replaceChildren();
  messages.forEach((message, index) => {
    show(log, message, retry, true);
    markRetried(message);
    const ends = messages[index + 1]?.turn_id !== message.turn_id, replies = message.role === "assistant" && !message.tool_calls?.length;
    if (ends && !replies && !unsettled.has(message.turn_id)) sayWhy(message.turn_id);
  });
  showQueued(key, waiting);
  log.append(...unsent.filter((each) => keyOf(each.message) === key).map((each) => each.shown));
  if (!log.children.length) log.append(element("p", { className: "empty" }, "What can I do for you?"));
  log.scrollTop = log.scrollHeight;
  requestAnimationFrame(() => log.setAttribute("aria-live", "polite"));
  return messages;
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
  const key = open.key;
  if (files.any) status.textContent = "Uploading…";
  taken = taken.then(() => files.take());
  const parts = await taken;
  status.textContent = "";
  if (parts === null) return unsay(key, words);
  const said = parts.length === 0 ? { text: words } : { parts: [...(words.trim() ? [{ type: "text", text: words }] : []), ...parts] };
  if (parts.length === 0 && !words.trim()) return;
  await submit(key, said, crypto.randomUUID());
}

/** Send the message of a failed turn again, once: another try has the same id. */
function retry(turnId) {
  const said = saidIn(log, turnId);
  markRetried({ message_id: RETRY + turnId });
  return submit(open.key, said, RETRY + turnId);
}

/** Take the button away from a failed turn whose message this one repeats. */
function markRetried({ message_id: id }) {
  if (!id?.startsWith(RETRY)) return;
  for (const each of log.querySelectorAll(".failed")) {
    if (RETRY + each.dataset.failed !== id) continue;
    leaveFocus(each);
    each.querySelector(".retry")?.remove();
  }
}

async function submit(key, said, messageId) {
  const channel = asks && key === open.key ? channelOf.get(runningTurn) ?? CHANNEL : CHANNEL;
  const message = {
    user_id: api.user, ...said, channel, ...(key === DEFAULT ? {} : { conversation: key }), message_id: messageId,
    metadata: { timezone: Intl.DateTimeFormat().resolvedOptions().timeZone },
    ...(key === open.key && open.title === null && !open.remember ? { remember: false } : {}),
  };
  await deliver(message);
}

/** Put words that were not accepted back, before what was written since. */
function unsay(key, words) {
  const before = (rest) => [words, rest].filter((each) => each.trim()).join("\n");
  if (key !== open.key) return keepDraft(key, before(draftOf(key)));
  text.value = before(text.value);
  draft();
  grow();
}

const keyOf = (message) => message.conversation ?? DEFAULT;

/** Show a message, and send it after those of its conversation that were written before. */
function deliver(message) {
  const key = keyOf(message);
  const written = message.text ?? message.parts.find((each) => each.type === "text")?.text ?? "";
  const shown = userMessage(written, "", message.parts), mine = { message, written, shown };
  shown.dataset.text = written;
  shown.classList.add("unsent");
  if (key === open.key) {
    shown.classList.toggle("queued", following !== null || unsent.some((each) => keyOf(each.message) === key));
    log.querySelector(".empty")?.remove();
    log.append(shown);
    log.scrollTop = log.scrollHeight;
  }
  keepUnsent([...unsent, mine]);
  queues.set(key, (queues.get(key) ?? Promise.resolve()).then(() => post(mine)));
  return queues.get(key);
}

/** Another user may sign in to this tab, if a token has expired or the application around the page has others. */
const unsentKey = () => `${UNSENT}:${api.user}`;

function keepUnsent(messages) {
  unsent = messages;
  if (unsent.length) sessionStorage.setItem(unsentKey(), JSON.stringify(unsent.map((each) => each.message)));
  else sessionStorage.removeItem(unsentKey());
}

async function post(mine) {
  const { message, written, shown } = mine, key = keyOf(message);
  let accepted;
  try {
    accepted = await api.insist("POST", "/v1/messages", message);
    if (message.remember === false) await change({ remember: false }, key); // it did not exist before its first message
  } catch (error) {
    shown.remove();
    unsay(key, written);
    if (key === open.key) files.restore(message.parts ?? []);
    return failed(error);
  } finally {
    keepUnsent(unsent.filter((each) => each !== mine));
  }
  shown.classList.remove("unsent");
  const known = [...log.querySelectorAll(".user")].some((each) => each.dataset.turn === accepted.turn_id);
  if (accepted.duplicate && known) return shown.remove(); // sent before, and shown
  shown.dataset.turn = accepted.turn_id;
  shown.classList.toggle("queued", following !== null && accepted.turn_id !== runningTurn);
  if (accepted.turn_id === runningTurn) place(log, shown); // it answers a question of the turn, or joined it
  remember(key, accepted.turn_id);
  knownTurns.add(accepted.turn_id);
  if (open.key === key) {
    open.session_id = accepted.session_id;
    followTurns();
  }
  attempt(async () => showTitle(await list()));
}

function showTitle(conversations) {
  const found = conversations.find((each) => each.conversation === open.key);
  if (found === undefined) return;
  open.title = found.title;
  byId("title").textContent = found.title;
  document.title = `${found.title} · perdure`;
  byId("menu").hidden = false;
}

function showRemembered(remember) {
  open.remember = remember;
  byId("paused").hidden = remember;
}

function showMemories() {
  const toggle = byId("remember");
  byId("remember-title").textContent = open.title ?? "New conversation";
  toggle.checked = open.remember;
  toggle.disabled = open.key === DEFAULT;
  noteRemembered();
  memories.show();
}

function noteRemembered() {
  byId("remember-note").textContent = open.key === DEFAULT ? "The default conversation is always remembered."
    : open.remember ? "Off: nothing of it, earlier messages included, becomes a memory or is found elsewhere."
      : "Nothing of this conversation becomes a memory. Memories of it that are listed below stay until you forget them.";
}

/** Have the open conversation remembered or not. One without messages is changed with its first message. */
async function setRemembered(remember) {
  const toggle = byId("remember"), opened = open;
  toggle.disabled = true;
  try {
    if (opened.title !== null) await change({ remember }, opened.key);
    if (opened === open) showRemembered(remember);
    noteRemembered();
  } catch (error) {
    byId("remember-note").textContent = `It could not be changed: ${error.message}`;
  } finally {
    toggle.checked = open.remember;
    toggle.disabled = open.key === DEFAULT;
    toggle.focus();
  }
}

/** Follow the conversation's turns one after another. `shown`: how many messages of each the page has. */
async function followTurns(shown = {}) {
  if (following !== null || loading > 0) return; // the loop that runs, or that begins then, goes on with the next turn
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
    joined: (joined) => { if (joined !== turnId) forget(key, joined); },
    retry,
  });
  live.answers = last !== null;
  try {
    await api.follow(turnId, { last }, (event) => {
      live.apply(event);
      if (event.kind === "state") {
        asks = event.data.waiting_for?.kind === "user";
        status.textContent = words(event.data);
      }
      if (event.kind === "progress" && !status.textContent.startsWith("Waits")) status.textContent = `${event.data.tool}: ${event.data.text}`;
      if (event.kind === "tool_result") status.textContent = "Thinking…";
      if (event.kind === "done") settled(turnId, event.data);
      if (readsEnd) log.scrollTop = log.scrollHeight;
    }, signal);
  } catch (error) {
    failed(error);
  }
  if (!signal.aborted) forget(key, turnId);
}

const words = ({ status: state, waiting_for: waiting }) => (waiting ? waits(waiting) : {
  accepted: "Waiting for a worker…", running: "Thinking…", waiting_approval: "Waits for your decision", parked: "The answer is delayed",
}[state] ?? "");

const waits = ({ kind, name, until, progress }) => kind === "user" ? "Waits for your answer" :
  `Waits for ${name} until ${new Date(until).toLocaleString()}${progress === null ? "" : `: ${progress}`}`;

function settled(turnId, turn) {
  const last = [...log.querySelectorAll(".assistant")].at(-1);
  if (turn.status === "done" && last) last.append(rating(turnId));
  if (turn.status === "cancelled") place(log, noAnswer(STOPPED));
  if (turn.status === "failed") showFailure(log, turnId, turn.error.message, retry);
  status.textContent = turn.error === null ? "" : `${turn.error.message} (${turn.error.code})`;
  list().catch(failed);
}

function rating(turnId) {
  const buttons = [["Helpful", 1], ["Not helpful", -1]].map(([label, score]) =>
    element("button", { type: "button", "aria-pressed": "false", onclick: (event) => rate(event.currentTarget, score) }, label));
  const rate = async (chosen, score) => {
    if (!await attempt(() => api.insist("POST", `/v1/turns/${turnId}/feedback`, { score }))) return;
    for (const button of buttons) button.setAttribute("aria-pressed", String(button === chosen));
  };
  return element("div", { className: "rate" }, ...buttons);
}

function running(turnId) {
  runningTurn = turnId;
  asks = false;
  if (turnId === null) leaveFocus(byId("stop"));
  byId("stop").hidden = turnId === null;
  byId("stop").disabled = false;
  if (turnId === null && !status.textContent.endsWith(")") && !showsTrouble()) status.textContent = "";
}

// --- controls --------------------------------------------------------------------------

function bind() {
  byId("form").addEventListener("submit", (event) => {
    event.preventDefault();
    const words_ = text.value;
    if (!words_.trim() && !files.any) return;
    hasty = opening !== null;
    if (hasty) return;
    calm();
    text.value = "";
    draft();
    grow();
    send(words_);
  });
  files.bind(text);
  // The log scrolls smoothly, so it may be far from its end on the way there: only the user scrolls up. The observer keeps
  // the end in view when a phone's keyboard makes the log smaller.
  let before = 0;
  log.addEventListener("scroll", () => {
    if (log.scrollHeight - log.scrollTop - log.clientHeight < 120) readsEnd = true;
    else if (log.scrollTop < before) readsEnd = false;
    before = log.scrollTop;
  });
  new ResizeObserver(() => { if (readsEnd) log.scrollTo({ top: log.scrollHeight, behavior: "instant" }); }).observe(log);
  loadFiles(log, (fileId) => api.download(fileId), trouble);
  text.addEventListener("keydown", (event) => {
    const composes = event.isComposing || event.keyCode === 229; // Safari ends the composition before this event
    if (event.key !== "Enter" || event.shiftKey || composes) return;
    event.preventDefault();
    byId("form").requestSubmit();
  });
  text.addEventListener("input", () => { grow(); draft(); });
  byId("stop").addEventListener("click", () => attempt(async () => {
    leaveFocus(byId("stop"));
    byId("stop").disabled = true;
    status.textContent = "Stopping…"; // a tool that runs ends first
    await api.insist("POST", `/v1/turns/${runningTurn}/cancel`);
  }).then((asked) => { if (!asked) byId("stop").disabled = false; }));
  window.addEventListener("hashchange", readdressed);
  document.querySelector(".skip").addEventListener("click", (event) => { // the address is that of the conversation
    event.preventDefault();
    text.focus();
  });
  byId("new").addEventListener("click", () => go(fresh()));
  byId("open-side").addEventListener("click", () => { app.classList.add("listing"); byId("new").focus(); });
  byId("close-side").addEventListener("click", () => { app.classList.remove("listing"); text.focus(); });
  byId("known").addEventListener("click", showMemories);
  byId("remember").addEventListener("change", (event) => setRemembered(event.target.checked));
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
    byId("menu").querySelector("summary").focus(); // the menu is closed, with the button that opened the dialog
    if (dialog.returnValue === "save") attempt(async () => { await change({ title: byId("new-title").value }); showTitle(await list()); });
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || document.querySelector("dialog[open]") !== null) return;
    if (app.classList.contains("listing")) byId("open-side").focus();
    app.classList.remove("listing");
    closeMenu();
  });
  document.addEventListener("click", (event) => {
    if (!event.target.closest("#menu") || event.target.closest("#menu button")) closeMenu();
  });
  document.addEventListener("visibilitychange", () => {
    if (document.visibilityState === "visible" && runningTurn === null && open !== undefined) refresh().catch(failed);
  });
}

/** What other tabs and channels have added meanwhile. */
async function refresh() {
  await list();
  await loadAndFollow();
}

const change = (changes, key = open.key) =>
  api.insist("PATCH", `/v1/conversations/${encodeURIComponent(key)}?user_id=${encodeURIComponent(api.user)}`, changes);

/** Close the menu; the focus goes from one of its buttons to what opens it. */
function closeMenu() {
  if (byId("menu").querySelector("div").contains(document.activeElement)) byId("menu").querySelector("summary").focus();
  byId("menu").open = false;
}

/** Do something; whether it worked. An error is shown until something else is done. */
async function attempt(work) {
  calm();
  try {
    await work();
    return true;
  } catch (error) {
    failed(error);
    return false;
  }
}

/** Show an error. Without a valid token nothing works, so the page asks for another one; what was written is kept. */
function failed(error) {
  if (error instanceof Refused && error.status === 401 && api.token !== null) signIn(error.message);
  else trouble(error.message);
}

function trouble(message) {
  status.textContent = message;
  status.dataset.trouble = message;
}

const showsTrouble = () => Boolean(status.dataset.trouble) && status.textContent === status.dataset.trouble;

function calm() {
  if (showsTrouble()) trouble("");
}

/** Show that the gateway does not answer; with "" that it does again, and then what was shown before. */
function connection(message) {
  const { lost = "", before = "" } = status.dataset, shows = lost !== "" && status.textContent === lost;
  if (message && !shows) status.dataset.before = status.textContent;
  if (message) status.textContent = message;
  else if (shows) status.textContent = before;
  status.dataset.lost = message;
}

/** Forget the token, and all that this browser keeps of the user: drafts, and messages and turns that are on their way. */
function leave() {
  for (const storage of [localStorage, sessionStorage]) {
    for (const key of Object.keys(storage)) if (key.startsWith("perdure.")) storage.removeItem(key);
  }
  text.value = "";
  location.replace(location.pathname);
}

const draftOf = (key) => sessionStorage.getItem(`${DRAFT}:${api.user}:${key}`) ?? "";

function keepDraft(key, words) {
  if (words) sessionStorage.setItem(`${DRAFT}:${api.user}:${key}`, words);
  else sessionStorage.removeItem(`${DRAFT}:${api.user}:${key}`);
}

function draft() {
  if (open !== undefined) keepDraft(open.key, text.value);
}

function grow() {
  text.style.height = "auto";
  text.style.height = `${text.scrollHeight + 2}px`;
}
