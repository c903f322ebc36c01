/**
 * A SessionStore of the Claude Agent SDK on a running `sessiond serve-store`.
 *
 *     const store = new SessiondStore("http://127.0.0.1:7474");
 *     for await (const message of query({ prompt, options: { sessionStore: store, sessionStoreFlush: "eager" } })) …
 *
 * An append resolves when its entries are durable in the session's log, and may be repeated: the SDK does so when a call
 * fails, and nothing is stored twice. It rejects with Fenced when another writer took the session over; loading it again
 * goes on from there.
 */

import { createHash, randomBytes } from "node:crypto";
import { request } from "node:http";
import { foldSessionSummary } from "@anthropic-ai/claude-agent-sdk";
import type { SessionKey, SessionStore, SessionStoreEntry, SessionSummaryEntry } from "@anthropic-ai/claude-agent-sdk";

/** The server says by then that the store does not answer; the SDK waits for 60 seconds. */
const TIMEOUT = 45_000;

type Answer = { status: number; body: string };
type Known = { version: number; data: Record<string, unknown> | undefined };

/** The server refused, and says why. */
export class StoreError extends Error {
  readonly status: number;

  constructor(status: number, answer: { error?: string; hint?: string | null }) {
    super((answer.error ?? "no reason given") + (answer.hint ? ` (${answer.hint})` : ""));
    this.status = status;
  }
}

/** Another writer took the session over. */
export class Fenced extends StoreError {}

export class SessiondStore implements SessionStore {
  readonly #address: URL;
  readonly #nonce = randomBytes(16);
  readonly #appended = new Map<string, number>();
  readonly #summaries = new Map<string, Known>();

  /** `unix:///PATH` or `http://127.0.0.1:PORT`, as the server says when it starts. */
  constructor(address: string) {
    this.#address = new URL(address);
  }

  async append(key: SessionKey, entries: SessionStoreEntry[]): Promise<void> {
    if (entries.length === 0) return;
    const place = JSON.stringify(named(key));
    // The same for an append that is repeated, since only one that went well is counted.
    const count = this.#appended.get(place) ?? 0;
    const hash = createHash("sha256").update(this.#nonce).update(JSON.stringify([count, place, entries]));
    const body = { key: named(key), batch: hash.digest("hex"), entries };
    if (key.subpath === undefined) await this.#appendAndSummarise(key, place, body);
    else await this.#call("append", body);
    this.#appended.set(place, count + 1);
  }

  async load(key: SessionKey): Promise<SessionStoreEntry[] | null> {
    const { status, body } = await this.#ask("load", { key: named(key) }, 404);
    // An agent that was killed may have left a line that is none; the agent itself passes over it.
    return status === 404 ? null : body.split("\n").flatMap(entry);
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
    return (await this.#call("list-subkeys", { key: named(key) })).subkeys;
  }

  async delete(key: SessionKey): Promise<void> {
    this.#summaries.delete(JSON.stringify(named({ projectKey: key.projectKey, sessionId: key.sessionId })));
    await this.#call("delete", { key: named(key) });
  }

  /** What the SDK makes of the entries goes along; if another process did so in between, it is made anew. */
  async #appendAndSummarise(key: SessionKey, place: string, body: { entries: SessionStoreEntry[] }): Promise<void> {
    for (let attempt = 0; attempt < 10; attempt++) {
      const { version, data } = this.#summaries.get(place) ?? (await this.#summary(key));
      this.#summaries.delete(place);
      const before = data && { sessionId: key.sessionId, mtime: 0, data };
      const folded = foldSessionSummary(before, key, body.entries).data;
      const answer = await this.#ask("append", { ...body, summary: { after: version, data: folded } }, 412);
      if (answer.status === 412) continue;
      if (JSON.parse(answer.body).summary === version + 1) this.#summaries.set(place, { version: version + 1, data: folded });
      return;
    }
    throw new StoreError(412, { error: "others keep writing to this session" });
  }

  async #summary(key: SessionKey): Promise<Known> {
    const { status, body } = await this.#ask("summary", { key: named(key) }, 404);
    if (status === 404) return { version: 0, data: undefined };
    const { version, data } = JSON.parse(body);
    return { version, data };
  }

  async #call(call: string, body: unknown): Promise<any> {
    return JSON.parse((await this.#ask(call, body)).body);
  }

  async #ask(call: string, body: unknown, expected?: number): Promise<Answer> {
    const answer = await this.#post(`/v1/${call}`, Buffer.from(JSON.stringify(body)));
    if (answer.status === 200 || answer.status === expected) return answer;
    let reason = {};
    try {
      reason = JSON.parse(answer.body);
    } catch {
      // Not our server, or one that broke off.
    }
    throw answer.status === 409 ? new Fenced(409, reason) : new StoreError(answer.status, reason);
  }

  #post(path: string, body: Buffer): Promise<Answer> {
    const { protocol, hostname, port, pathname } = this.#address;
    const where = protocol === "unix:" ? { socketPath: decodeURIComponent(pathname) } : { host: hostname.replace(/^\[|\]$/g, ""), port };
    const headers = { "content-type": "application/json", "content-length": body.length };
    return new Promise((resolve, reject) => {
      const call = request({ ...where, method: "POST", path, headers, timeout: TIMEOUT }, (answer) => {
        const pieces: Buffer[] = [];
        answer.on("data", (piece) => pieces.push(piece));
        answer.on("error", reject);
        answer.on("end", () => resolve({ status: answer.statusCode ?? 0, body: Buffer.concat(pieces).toString() }));
      });
      call.on("timeout", () => call.destroy(new Error(`sessiond did not answer ${path} within ${TIMEOUT} ms`)));
      call.on("error", reject);
      call.end(body);
    });
  }
}

function named(key: SessionKey): Record<string, string> {
  const named = { project_key: key.projectKey, session_id: key.sessionId };
  return key.subpath === undefined ? named : { ...named, subpath: key.subpath };
}

function entry(line: string): SessionStoreEntry[] {
  try {
    return [JSON.parse(line)];
  } catch {
    return [];
  }
}
