"""A SessionStore of the Claude Agent SDK on a running `sessiond serve-store`.

    store = SessiondStore("unix:///home/me/.local/share/sessiond/session-store/.sessiond/session-store")
    options = ClaudeAgentOptions(session_store=store, session_store_flush="eager")

An append returns once its entries are durable in the session's log. The SDK repeats a failed append; no entry is stored
twice. An append raises Fenced if another writer claimed the session. Load the session again to continue from that writer's
entries.
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

# The server reports an unresponsive store before this time-out; the SDK waits for 60 seconds.
TIMEOUT = 45.0


class StoreError(Exception):
    """The server rejected a request; the message has the reason."""

    def __init__(self, status: int, body: dict[str, Any]) -> None:
        hint = body.get("hint")
        super().__init__(body.get("error", "unknown error") + (f" ({hint})" if hint else ""))
        self.status = status


class Fenced(StoreError):
    """Another writer claimed the session."""


class SessiondStore(SessionStore):
    def __init__(self, address: str, token: str | None = None) -> None:
        self._address = address
        self._token = token
        self._nonce = os.urandom(16)
        self._appended: dict[str, int] = {}
        self._summaries: dict[tuple[str, str], tuple[int, dict[str, Any] | None]] = {}

    async def append(self, key, entries) -> None:
        if not entries:
            return
        request_key = _request_key(key)
        batch_id = self._batch_id(request_key, entries)
        body: dict[str, Any] = {"key": request_key, "batch_id": batch_id, "entries": entries}
        if "subpath" in request_key:
            await self._call("append", body)
        else:
            await self._append_with_summary(key, body)
        self._appended[_text(request_key)] = self._appended.get(_text(request_key), 0) + 1

    async def load(self, key):
        status, body = await self._send("load", {"key": _request_key(key)})
        if status == 404:
            return None
        # A killed agent may have left an incomplete line. The agent itself ignores it, too.
        return [entry for entry in map(_parse_entry, body.split(b"\n")) if entry is not None]

    async def list_sessions(self, project_key):
        return (await self._call("list-sessions", {"project_key": project_key}))["sessions"]

    async def list_session_summaries(self, project_key):
        found = (await self._call("list-session-summaries", {"project_key": project_key}))["summaries"]
        return [{name: summary[name] for name in ("session_id", "mtime", "data")} for summary in found]

    async def list_subkeys(self, key):
        return (await self._call("list-subkeys", {"key": _request_key(key)}))["subkeys"]

    async def delete(self, key) -> None:
        self._summaries.pop((key["project_key"], key["session_id"]), None)
        await self._call("delete", {"key": _request_key(key)})

    def _batch_id(self, request_key, entries) -> str:
        """A repeated append gets the same batch ID, because only successful appends are counted."""
        count = self._appended.get(_text(request_key), 0)
        text = json.dumps([count, request_key, entries], sort_keys=True)
        return hashlib.sha256(self._nonce + text.encode()).hexdigest()

    async def _append_with_summary(self, key, body) -> None:
        """Appends with an updated summary. If another process has changed the summary, computes it again."""
        session = (key["project_key"], key["session_id"])
        for _ in range(10):
            version, data = self._summaries.pop(session, None) or await self._summary(key)
            previous = None if data is None else {"session_id": key["session_id"], "mtime": 0, "data": data}
            data = fold_session_summary(previous, key, body["entries"])["data"]
            summary = {"base_version": version, "data": data}
            status, response = await self._send("append", {**body, "summary": summary}, {412})
            if status != 412:
                if json.loads(response)["summary_version"] == version + 1:
                    self._summaries[session] = (version + 1, data)
                return
        raise StoreError(412, {"error": "other processes keep changing the summary of this session"})

    async def _summary(self, key) -> tuple[int, dict[str, Any] | None]:
        status, body = await self._send("summary", {"key": _request_key(key)})
        if status == 404:
            return 0, None
        summary = json.loads(body)
        return summary["version"], summary["data"]

    async def _call(self, call: str, body: dict[str, Any]) -> Any:
        return json.loads((await self._send(call, body, ()))[1])

    async def _send(self, call: str, body: dict[str, Any], expected=(404,)) -> tuple[int, bytes]:
        # NaN and infinity are not valid JSON.
        request = json.dumps(body, allow_nan=False).encode()
        status, response = await anyio.to_thread.run_sync(self._post, f"/v1/{call}", request)
        if status == 200 or status in expected:
            return status, response
        try:
            error = json.loads(response)
        except ValueError:
            error = {}
        raise (Fenced if status == 409 else StoreError)(status, error)

    def _post(self, path: str, body: bytes) -> tuple[int, bytes]:
        connection = _connection(self._address)
        try:
            headers = {"Content-Type": "application/json"}
            if self._token is not None:
                headers["Authorization"] = f"Bearer {self._token}"
            connection.request("POST", path, body, headers)
            response = connection.getresponse()
            return response.status, response.read()
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


def _request_key(key) -> dict[str, str]:
    return {name: key[name] for name in ("project_key", "session_id", "subpath") if key.get(name) is not None}


def _text(request_key) -> str:
    return json.dumps(request_key, sort_keys=True)


def _parse_entry(line: bytes) -> Any | None:
    try:
        return json.loads(line)
    except ValueError:
        return None
