/**
 * A SessionStore of the Claude Agent SDK on a running `sessiond serve-store`.
 *
 *     const store = new SessiondStore("http://127.0.0.1:7474");
 *     for await (const message of query({ prompt, options: { sessionStore: store, sessionStoreFlush: "eager" } })) …
 *
 * An append resolves once its entries are durable in the session's log. The SDK repeats a failed append; no entry is
 * stored twice. An append rejects with Fenced if another writer claimed the session. Load the session again to continue
 * from that writer's entries.
 */

import { createHash, randomBytes } from "node:crypto";
import { request } from "node:http";
import { foldSessionSummary } from "@anthropic-ai/claude-agent-sdk";
import type { SessionKey, SessionStore, SessionStoreEntry, SessionSummaryEntry } from "@anthropic-ai/claude-agent-sdk";

/** The server reports an unresponsive store before this time-out; the SDK waits for 60 seconds. */
const TIMEOUT = 45_000;

type Response = { status: number; body: string };
type Summary = { version: number; data: Record<string, unknown> | undefined };

/** The server rejected a request; the message has the reason. */
export class StoreError extends Error {
  readonly status: number;

  constructor(status: number, body: { error?: string; hint?: string | null }) {
    super((body.error ?? "unknown error") + (body.hint ? ` (${body.hint})` : ""));
    this.status = status;
  }
}

/** Another writer claimed the session. */
export class Fenced extends StoreError {}

export class SessiondStore implements SessionStore {
  readonly #address: URL;
  readonly #token: string | undefined;
  readonly #nonce = randomBytes(16);
  readonly #appended = new Map<string, number>();
  readonly #summaries = new Map<string, Summary>();

  /**
   * `unix:///PATH` or `http://127.0.0.1:PORT`, as the server prints when it starts, and the token of its
   * `--token-file`.
   */
  constructor(address: string, token?: string) {
    this.#address = new URL(address);
    this.#token = token;
  }

  async append(key: SessionKey, entries: SessionStoreEntry[]): Promise<void> {
    if (entries.length === 0) return;
    const id = JSON.stringify(requestKey(key));
    // A repeated append gets the same batch ID, because only successful appends are counted.
    const count = this.#appended.get(id) ?? 0;
    const hash = createHash("sha256").update(this.#nonce).update(JSON.stringify([count, id, entries]));
    const body = { key: requestKey(key), batch_id: hash.digest("hex"), entries };
    if (key.subpath === undefined) await this.#appendWithSummary(key, id, body);
    else await this.#call("append", body);
    this.#appended.set(id, count + 1);
  }

  async load(key: SessionKey): Promise<SessionStoreEntry[] | null> {
    const { status, body } = await this.#send("load", { key: requestKey(key) }, 404);
    // A killed agent may have left an incomplete line. The agent itself ignores it, too.
    return status === 404 ? null : body.split("\n").flatMap(parseEntry);
  }

  async listSessions(projectKey: string): Promise<Array<{ sessionId: string; mtime: number }>> {
    const { sessions } = await this.#call("list-sessions", { project_key: projectKey });
    return sessions.map((found: any) => ({ sessionId: found.session_id, mtime: found.mtime }));
  }

  async listSessionSummaries(projectKey: string): Promise<SessionSummaryEntry[]> {
    const { summaries } = await this.#call("list-session-summaries", { project_key: projectKey });
    return summaries.map((found: any) => ({ sessionId: found.session_id, mtime: found.mtime, data: found.data }));
  }

  async listSubkeys(key: { projectKey: string; sessionId: string }): Promise<string[]> {
    return (await this.#call("list-subkeys", { key: requestKey(key) })).subkeys;
  }

  async delete(key: SessionKey): Promise<void> {
    this.#summaries.delete(JSON.stringify(requestKey({ projectKey: key.projectKey, sessionId: key.sessionId })));
    await this.#call("delete", { key: requestKey(key) });
  }

  /** Appends with an updated summary. If another process has changed the summary, computes it again. */
  async #appendWithSummary(key: SessionKey, id: string, body: { entries: SessionStoreEntry[] }): Promise<void> {
    for (let attempt = 0; attempt < 10; attempt++) {
      const { version, data } = this.#summaries.get(id) ?? (await this.#summary(key));
      this.#summaries.delete(id);
      const previous = data && { sessionId: key.sessionId, mtime: 0, data };
      const folded = foldSessionSummary(previous, key, body.entries).data;
      const response = await this.#send("append", { ...body, summary: { base_version: version, data: folded } }, 412);
      if (response.status === 412) continue;
      if (JSON.parse(response.body).summary_version === version + 1) this.#summaries.set(id, { version: version + 1, data: folded });
      return;
    }
    throw new StoreError(412, { error: "other processes keep changing the summary of this session" });
  }

  async #summary(key: SessionKey): Promise<Summary> {
    const { status, body } = await this.#send("summary", { key: requestKey(key) }, 404);
    if (status === 404) return { version: 0, data: undefined };
    const { version, data } = JSON.parse(body);
    return { version, data };
  }

  async #call(call: string, body: unknown): Promise<any> {
    return JSON.parse((await this.#send(call, body)).body);
  }

  async #send(call: string, body: unknown, expected?: number): Promise<Response> {
    const response = await this.#post(`/v1/${call}`, Buffer.from(JSON.stringify(body)));
    if (response.status === 200 || response.status === expected) return response;
    let error = {};
    try {
      error = JSON.parse(response.body);
    } catch {
      // The response is incomplete, or comes from another server.
    }
    throw response.status === 409 ? new Fenced(409, error) : new StoreError(response.status, error);
  }

  #post(path: string, body: Buffer): Promise<Response> {
    const { protocol, hostname, port, pathname } = this.#address;
    const where = protocol === "unix:" ? { socketPath: decodeURIComponent(pathname) } : { host: hostname.replace(/^\[|\]$/g, ""), port };
    const authorization = this.#token === undefined ? {} : { authorization: `Bearer ${this.#token}` };
    const headers = { "content-type": "application/json", "content-length": body.length, ...authorization };
    return new Promise((resolve, reject) => {
      const call = request({ ...where, method: "POST", path, headers, timeout: TIMEOUT }, (response) => {
        const chunks: Buffer[] = [];
        response.on("data", (chunk) => chunks.push(chunk));
        response.on("error", reject);
        response.on("end", () => resolve({ status: response.statusCode ?? 0, body: Buffer.concat(chunks).toString() }));
      });
      call.on("timeout", () => call.destroy(new Error(`sessiond did not respond to ${path} within ${TIMEOUT} ms`)));
      call.on("error", reject);
      call.end(body);
    });
  }
}

function requestKey(key: SessionKey): Record<string, string> {
  const main = { project_key: key.projectKey, session_id: key.sessionId };
  return key.subpath === undefined ? main : { ...main, subpath: key.subpath };
}

function parseEntry(line: string): SessionStoreEntry[] {
  try {
    return [JSON.parse(line)];
  } catch {
    return [];
  }
}
