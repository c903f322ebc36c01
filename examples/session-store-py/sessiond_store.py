"""A SessionStore of the Claude Agent SDK on a running `sessiond serve-store`.

    store = SessiondStore("unix:///home/me/.local/share/sessiond/session-store/.sessiond/session-store")
    options = ClaudeAgentOptions(session_store=store, session_store_flush="eager")

An append returns when its entries are durable in the session's log, and may be repeated: the SDK does so when a call fails,
and nothing is stored twice. It raises Fenced when another writer took the session over; loading it again goes on from there.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import socket
from typing import Any
from urllib.parse import urlsplit

import anyio.to_thread
from claude_agent_sdk import SessionStore, fold_session_summary

# The server says by then that the store does not answer; the SDK waits for 60 seconds.
TIMEOUT = 45.0


class StoreError(Exception):
    """The server refused, and says why."""

    def __init__(self, status: int, answer: dict[str, Any]) -> None:
        hint = answer.get("hint")
        super().__init__(f"{answer.get('error', 'no reason given')}" + (f" ({hint})" if hint else ""))
        self.status = status


class Fenced(StoreError):
    """Another writer took the session over."""


class SessiondStore(SessionStore):
    def __init__(self, address: str) -> None:
        self._address = address
        self._nonce = os.urandom(16)
        self._appended: dict[str, int] = {}
        self._summaries: dict[tuple[str, str], tuple[int, dict[str, Any] | None]] = {}

    async def append(self, key, entries) -> None:
        if not entries:
            return
        named = _named(key)
        body: dict[str, Any] = {"key": named, "batch": self._batch(named, entries), "entries": entries}
        if "subpath" in named:
            await self._call("append", body)
        else:
            await self._append_and_summarise(key, body)
        self._appended[_text(named)] = self._appended.get(_text(named), 0) + 1

    async def load(self, key):
        status, answer = await self._ask("load", {"key": _named(key)})
        if status == 404:
            return None
        # An agent that was killed may have left a line that is none; the agent itself passes over it.
        return [entry for entry in map(_entry, answer.split(b"\n")) if entry is not None]

    async def list_sessions(self, project_key):
        return (await self._call("list-sessions", {"project_key": project_key}))["sessions"]

    async def list_session_summaries(self, project_key):
        found = (await self._call("list-session-summaries", {"project_key": project_key}))["summaries"]
        return [{name: summary[name] for name in ("session_id", "mtime", "data")} for summary in found]

    async def list_subkeys(self, key):
        return (await self._call("list-subkeys", {"key": _named(key)}))["subkeys"]

    async def delete(self, key) -> None:
        self._summaries.pop((key["project_key"], key["session_id"]), None)
        await self._call("delete", {"key": _named(key)})

    def _batch(self, named, entries) -> str:
        """The same for an append that is repeated, since only one that went well is counted."""
        count = self._appended.get(_text(named), 0)
        text = json.dumps([count, named, entries], sort_keys=True)
        return hashlib.sha256(self._nonce + text.encode()).hexdigest()

    async def _append_and_summarise(self, key, body) -> None:
        """What the SDK makes of the entries goes along; if another process did so in between, it is made anew."""
        place = (key["project_key"], key["session_id"])
        for _ in range(10):
            version, data = self._summaries.pop(place, None) or await self._summary(key)
            before = None if data is None else {"session_id": key["session_id"], "mtime": 0, "data": data}
            data = fold_session_summary(before, key, body["entries"])["data"]
            status, answer = await self._ask("append", {**body, "summary": {"after": version, "data": data}}, {412})
            if status != 412:
                if json.loads(answer)["summary"] == version + 1:
                    self._summaries[place] = (version + 1, data)
                return
        raise StoreError(412, {"error": "others keep writing to this session"})

    async def _summary(self, key) -> tuple[int, dict[str, Any] | None]:
        status, answer = await self._ask("summary", {"key": _named(key)})
        if status == 404:
            return 0, None
        found = json.loads(answer)
        return found["version"], found["data"]

    async def _call(self, call: str, body: dict[str, Any]) -> Any:
        return json.loads((await self._ask(call, body, ()))[1])

    async def _ask(self, call: str, body: dict[str, Any], expected=(404,)) -> tuple[int, bytes]:
        # NaN and the like are not JSON.
        sent = json.dumps(body, allow_nan=False).encode()
        status, answer = await anyio.to_thread.run_sync(self._post, f"/v1/{call}", sent)
        if status == 200 or status in expected:
            return status, answer
        try:
            reason = json.loads(answer)
        except ValueError:
            reason = {}
        raise (Fenced if status == 409 else StoreError)(status, reason)

    def _post(self, path: str, body: bytes) -> tuple[int, bytes]:
        connection = _connection(self._address)
        try:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=TIMEOUT)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _connection(address: str) -> http.client.HTTPConnection:
    parts = urlsplit(address)
    if parts.scheme == "unix":
        return _UnixConnection(parts.path)
    return http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port, timeout=TIMEOUT)


def _named(key) -> dict[str, str]:
    return {name: key[name] for name in ("project_key", "session_id", "subpath") if key.get(name) is not None}


def _text(named) -> str:
    return json.dumps(named, sort_keys=True)


def _entry(line: bytes) -> Any | None:
    try:
        return json.loads(line)
    except ValueError:
        return None
