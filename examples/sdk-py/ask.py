"""A program on the Claude Agent SDK that continues a conversation on any machine.

    python ask.py "What is in this directory?"          # a new session; prints its ID first
    python ask.py "And what did I just ask?" 3f2a…   # continues it, on any machine

The program does not know about storage. Either sessiond streams the files that the client writes:

    sessiond run --session 3f2a… -- python ask.py "…" 3f2a…

or, if no directory can be shared, sessiond is the SDK's session store: SESSIOND_ADDRESS is the address
that `sessiond serve-store` prints, and PYTHONPATH contains the directory session-store-py.
"""

from __future__ import annotations

import asyncio
import os
import sys

from claude_agent_sdk import ClaudeAgentOptions, MirrorErrorMessage, ResultMessage, SystemMessage, query


async def ask(prompt: str, session: str | None) -> bool:
    options = ClaudeAgentOptions(resume=session)
    if address := os.environ.get("SESSIOND_ADDRESS"):
        from sessiond_store import SessiondStore

        options.session_store = SessiondStore(address)
        # Send each entry immediately, not once per turn: a crash loses at most the last one.
        options.session_store_flush = "eager"
    well = True
    async for message in query(prompt=prompt, options=options):
        if isinstance(message, MirrorErrorMessage):
            # The conversation continues, but this part of it is not durable.
            print(f"not stored: {message.error}", file=sys.stderr)
            well = False
        elif isinstance(message, SystemMessage) and message.subtype == "init":
            print(f"session {message.data['session_id']}")
        elif isinstance(message, ResultMessage):
            well = well and not message.is_error
            print(message.result if message.result is not None else f"failed: {message.subtype}")
    return well


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python ask.py PROMPT [SESSION]")
    sys.exit(0 if asyncio.run(ask(sys.argv[1], sys.argv[2] if len(sys.argv) == 3 else None)) else 1)
