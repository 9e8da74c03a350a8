/** Requests of the console: with the browser's session, and with its CSRF token for each that changes something. */

import { readJson } from "../chat/elements.js";

/** An answer with an error status; `code` is the gateway's. */
export class Refused extends Error {
  constructor(status, code, detail) {
    super(detail);
    this.status = status;
    this.code = code;
  }
}

export class Api {
  #csrf = null;

  /** The browser's session: `{ operator, csrf, expires_at, needs_key }`. `operator` is null if there is none. */
  async session() {
    const found = await this.#json("GET", "console/session");
    this.#csrf = found.csrf;
    return found;
  }

  /** Begin a session; `key` is null for a gateway without keys. */
  async signIn(key) {
    const headers = key === null ? {} : { Authorization: `Bearer ${key}` };
    const found = await this.#json("POST", "console/session", undefined, headers);
    this.#csrf = found.csrf;
    return found;
  }

  signOut() {
    return this.#json("DELETE", "console/session");
  }

  /** The JSON of a route of the HTTP API, such as `get("turns", { status: "failed" })`. Values of null are left out. */
  get(path, query = {}, signal) {
    const given = Object.entries(query).filter(([, value]) => value !== null && value !== "" && value !== undefined);
    const asked = new URLSearchParams(given).toString();
    return this.#json("GET", `console/v1/${path}${asked && `?${asked}`}`, undefined, {}, signal);
  }

  /** Send a request that changes something. */
  send(method, path, body) {
    return this.#json(method, `console/v1/${path}`, body);
  }

  async #json(method, path, body, headers = {}, signal) {
    const asked = fetch(path, { // relative to the page: the gateway may be mounted below a path
      method,
      signal,
      cache: "no-store",
      headers: {
        ...headers,
        ...(method === "GET" || this.#csrf === null ? {} : { "X-CSRF-Token": this.#csrf }),
        ...(body === undefined ? {} : { "Content-Type": "application/json" }),
      },
      body: body === undefined ? undefined : JSON.stringify(body),
    });
    const answer = await asked.catch((error) => { throw error instanceof TypeError ? new Error("The gateway cannot be reached.") : error; });
    if (answer.ok) return answer.status === 204 ? null : readJson(await answer.text());
    const problem = await answer.json().catch(() => ({}));
    throw new Refused(answer.status, problem.code ?? "UNKNOWN", problem.detail ?? `The server answered with the status ${answer.status}.`); // a proxy's answer has no detail
  }
}

/** An id or a name as one segment of a path. */
export const segment = (text) => encodeURIComponent(text);
