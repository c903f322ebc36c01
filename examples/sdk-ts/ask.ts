/**
 * A program on the Claude Agent SDK that continues a conversation on any machine.
 *
 *     npx tsc … && node ask.js "What is in this directory?"         # a new session; prints its ID first
 *     node ask.js "And what did I just ask?" 3f2a…               # continues it, on any machine
 *
 * The program does not know about storage. Either sessiond streams the files that the client writes:
 *
 *     sessiond run --session 3f2a… -- node ask.js "…" 3f2a…
 *
 * or, if no directory can be shared, sessiond is the SDK's session store: SESSIOND_ADDRESS is the address
 * that `sessiond serve-store` prints.
 */

import { query, type Options } from "@anthropic-ai/claude-agent-sdk";
import { SessiondStore } from "../session-store-ts/sessiond-store.ts";

const [prompt, session] = process.argv.slice(2);
if (prompt === undefined) {
  console.error("usage: node ask.js PROMPT [SESSION]");
  process.exit(2);
}

const options: Options = {};
if (session !== undefined) options.resume = session;
const address = process.env["SESSIOND_ADDRESS"];
if (address !== undefined) {
  options.sessionStore = new SessiondStore(address);
  // Send each entry immediately, not once per turn: a crash loses at most the last one.
  options.sessionStoreFlush = "eager";
}

let failed = false;
for await (const message of query({ prompt, options })) {
  if (message.type === "system" && message.subtype === "init") {
    console.log(`session ${message.session_id}`);
  } else if (message.type === "system" && message.subtype === "mirror_error") {
    // The conversation continues, but this part of it is not durable.
    console.error(`not stored: ${message.error}`);
    failed = true;
  } else if (message.type === "result") {
    failed ||= message.subtype !== "success";
    console.log(message.subtype === "success" ? message.result : `failed: ${message.subtype}`);
  }
}
process.exitCode = failed ? 1 : 0;
