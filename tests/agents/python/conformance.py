"""Runs the Agent SDK's own conformance suite against the example adapter; each contract on a server of its own.

Arguments: the program, a folder to work in. Prints how many contracts had a store.
"""

import asyncio
import subprocess
import sys
from pathlib import Path

from claude_agent_sdk.testing import run_session_store_conformance
from sessiond_store import SessiondStore

program, work = sys.argv[1], Path(sys.argv[2])
servers: list[subprocess.Popen] = []


def make_store() -> SessiondStore:
    number = len(servers)
    # Both ways to be asked, in turn.
    listen = f"unix://{work}/{number}.sock" if number % 2 else "http://127.0.0.1:0"
    named = ["--root", f"{work}/{number}", "--namespace", f"contract-{number}", "--listen", listen]
    server = subprocess.Popen([program, "serve-store", *named], stdout=subprocess.PIPE, text=True)
    servers.append(server)
    line = server.stdout.readline()
    assert line.startswith("listening on "), line
    return SessiondStore(line.removeprefix("listening on ").strip())


try:
    asyncio.run(run_session_store_conformance(make_store))
finally:
    for server in servers:
        server.terminate()
    codes = [server.wait(30) for server in servers]
assert not any(codes), f"a server did not end well: {codes}"
print(f"{len(servers)} stores")
