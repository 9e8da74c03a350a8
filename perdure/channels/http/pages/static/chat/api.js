/** Requests to the gateway, with the token in a header, and a turn's event stream that survives lost connections. */

import { readJson } from "./elements.js";

const FIRST_PAUSE_MS = 300;
const LONGEST_PAUSE_MS = 5000;
/** A request without an answer for this time, or an event stream without a byte, is lost: streams have a byte every 15 s. */
const LOST_MS = 60_000;

/** An answer with an error status; `code` is the gateway's. */
export class Refused extends Error {
  constructor(status, code, detail) {
    super(detail);
    this.status = status;
    this.code = code;
  }
}

/** Whether the same request may work later: the gateway restarts, or is busy. */
const passes = (error) => !(error instanceof Refused) || error.status === 429 || error.status >= 500;

const pause = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));

export class Api {
  /**
   * @param {string | null} token
   * @param {(text: string) => void} onTrouble called while the gateway cannot be reached, and with "" once it can
   */
  constructor(token, onTrouble) {
    this.token = token;
    this.onTrouble = onTrouble;
    this.user = signedInUser() ?? (token === null ? "local" : subject(token));
  }

  /** Send a request once; the JSON of the answer. */
  async ask(method, path, body, headers = {}) {
    const answer = await this.#fetch(method, path, body, headers);
    return answer.status === 204 ? null : readJson(await answer.text());
  }

  /** Upload a file for a message of the user. */
  upload(file) {
    const where = `user_id=${encodeURIComponent(this.user)}&name=${encodeURIComponent(file.name.slice(-200))}`;
    return this.ask("POST", `/v1/files?${where}`, file);
  }

  /** The bytes of a file of the user. */
  async download(fileId) {
    return (await this.#fetch("GET", `/v1/files/${fileId}/content`, undefined, {})).blob();
  }

  /** Send a request until the gateway answers it. Only for requests that may be repeated. */
  async insist(method, path, body) {
    for (let tries = 0; ; tries += 1) {
      try {
        const answer = await this.ask(method, path, body);
        this.onTrouble("");
        return answer;
      } catch (error) {
        if (!passes(error)) throw error;
        this.onTrouble(`${error instanceof Refused ? error.message : "The connection is lost."} Trying again…`);
        await pause(backoff(tries));
      }
    }
  }

  /** Pass the events of a turn to `apply`, from `position.last` on, until the turn is settled or `signal` aborts. */
  async follow(turnId, position, apply, signal) {
    for (let tries = 0; !signal.aborted; tries += 1) {
      try {
        const headers = position.last === null ? {} : { "Last-Event-ID": position.last };
        const answer = await this.#fetch("GET", `/v1/turns/${turnId}/events`, undefined, headers, signal);
        if (answer.status === 204) return;
        for await (const event of events(answer.body)) {
          tries = 0;
          this.onTrouble("");
          position.last = event.id;
          apply(event);
          if (event.kind === "done") return;
        }
      } catch (error) {
        if (signal.aborted) return;
        if (!passes(error)) throw error;
      }
      if (signal.aborted) return;
      this.onTrouble("The connection is lost. The answer goes on as soon as it is back.");
      await pause(backoff(tries));
    }
  }

  async #fetch(method, path, body, headers, signal) {
    const isFile = body instanceof Blob, ends = new AbortController();
    const late = isFile ? 0 : setTimeout(() => ends.abort(new Error(`The gateway has not answered for ${LOST_MS / 1000} s.`)), LOST_MS);
    signal?.addEventListener("abort", () => ends.abort(), { once: true });
    const answer = await fetch(path.slice(1), { // relative to the page: the gateway may be mounted below a path
      method,
      signal: ends.signal,
      cache: "no-store",
      headers: {
        ...headers,
        ...(this.token === null ? {} : { Authorization: `Bearer ${this.token}` }),
        ...(body === undefined || isFile ? {} : { "Content-Type": "application/json" }), // a file has its own type
      },
      body: body === undefined || isFile ? body : JSON.stringify(body),
    }).finally(() => clearTimeout(late));
    if (answer.ok) return answer;
    const problem = await answer.json().catch(() => ({}));
    throw new Refused(answer.status, problem.code ?? "UNKNOWN", problem.detail ?? `The server answered with the status ${answer.status}.`); // a proxy's answer has no detail
  }
}

const backoff = (tries) => Math.min(LONGEST_PAUSE_MS, FIRST_PAUSE_MS * 2 ** tries) * (0.75 + Math.random() / 2);

/** The user whom the application around the gateway has signed in; null if the gateway itself asks for a token. */
export const signedInUser = () => document.querySelector('meta[name="user"]')?.content ?? null;

/** The user whom a token is for, as the page shows it. The gateway verifies the token with each request. */
function subject(token) {
  try {
    const claims = token.split(".")[1].replaceAll("-", "+").replaceAll("_", "/");
    const bytes = Uint8Array.from(atob(claims), (character) => character.charCodeAt(0));
    return String(JSON.parse(new TextDecoder().decode(bytes)).sub);
  } catch {
    throw new Refused(401, "UNAUTHORIZED", "This is not a user token.");
  }
}

/** The events of a body of server-sent events, until it ends or is lost. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "", late = 0;
  try {
    for (;;) {
      clearTimeout(late);
      late = setTimeout(() => reader.cancel(), LOST_MS);
      const { value, done } = await reader.read();
      if (done) return;
      text += value;
      const blocks = text.split("\n\n");
      text = blocks.pop();
      for (const block of blocks) {
        const event = parsed(block);
        if (event !== null) yield event;
      }
    }
  } finally {
    clearTimeout(late);
  }
}

function parsed(block) {
  const fields = Object.fromEntries(block.split("\n").filter((line) => !line.startsWith(":")).map((line) => {
    const at = line.indexOf(": ");
    return [line.slice(0, at), line.slice(at + 2)];
  }));
  return fields.data === undefined ? null : { id: fields.id, kind: fields.event, data: readJson(fields.data) };
}
