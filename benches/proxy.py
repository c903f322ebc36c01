"""A proxy for HTTP/1.1 on loopback that counts requests and bytes and can delay every request.

It understands where a request begins and ends and nothing else. A delay is per request, as a longer way to the server would add it,
not per packet. It runs in a thread of its own with an event loop of its own.
"""

import asyncio
import contextlib
import threading
import time


class Proxy:
    """Forwards requests to a local port."""

    def __init__(self, upstream: int) -> None:
        self.upstream, self.delay, self.tasks = upstream, 0.0, set()
        self.reset()
        self.loop, ready = asyncio.new_event_loop(), threading.Event()
        self.thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self.thread.start()
        ready.wait()

    def reset(self) -> None:
        self.requests, self.body_up, self.bytes_up, self.bytes_down, self.seen = 0, 0, 0, 0, []

    def close(self) -> None:
        """Ends every connection."""
        self.loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(self.loop)])
        self.thread.join(5)

    def _run(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self.loop)
        with contextlib.suppress(asyncio.CancelledError):
            self.loop.run_until_complete(self._listen(ready))

    async def _listen(self, ready: threading.Event) -> None:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 20, backlog=1024)
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        await server.serve_forever()

    async def _serve(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        # The event loop has only weak references to its tasks.
        self.tasks.add(asyncio.current_task())
        try:
            server, to_server = await asyncio.open_connection("127.0.0.1", self.upstream, limit=1 << 20)
            try:
                while await self._exchange(client, to_server, server, to_client):
                    pass
            finally:
                to_server.close()
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError, ValueError):
            # A killed process closed its connection; close the other side too.
            pass
        finally:
            to_client.close()
            self.tasks.discard(asyncio.current_task())

    async def _exchange(self, client, to_server, server, to_client) -> bool:
        """Forwards one request and its response; returns whether another may follow."""
        head = await client.readuntil(b"\r\n\r\n")
        began = time.monotonic()
        self.requests += 1
        self.bytes_up += len(head)
        words, fields = parse(head)
        length = int(fields.get(b"content-length", 0))
        if self.delay:
            await asyncio.sleep(self.delay)
        to_server.write(head)
        # Concurrently with the response, because a client may wait for "100 Continue" before it sends the body.
        up = asyncio.ensure_future(self._pass(client, to_server, length, chunked=b"transfer-encoding" in fields, up=True))
        status = 100
        while status < 200:
            answer = await server.readuntil(b"\r\n\r\n")
            answer_words, answer_fields = parse(answer)
            status = int(answer_words[1])
            self.bytes_down += len(answer)
            to_client.write(answer)
        bodiless = words[0] == b"HEAD" or status in (204, 304)
        if not bodiless:
            known = b"content-length" in answer_fields or b"transfer-encoding" in answer_fields
            size = int(answer_fields.get(b"content-length", 0 if known else 1 << 60))
            await self._pass(server, to_client, size, chunked=b"transfer-encoding" in answer_fields, up=False)
        await to_client.drain()
        await up
        self.seen.append((words[0].decode(), words[1].decode(), status, length, began, time.monotonic()))
        return b"close" not in (answer_fields.get(b"connection", b""), fields.get(b"connection", b""))

    async def _pass(self, reader, writer, left: int, chunked: bool, up: bool) -> None:
        if chunked:
            size = 1
            while size:
                line = await reader.readuntil(b"\r\n")
                size = int(line.split(b";")[0], 16)
                writer.write(line)
                await self._pass(reader, writer, size + 2, chunked=False, up=up)
            return
        while left > 0:
            piece = await reader.read(min(left, 1 << 18))
            if not piece:
                return
            left -= len(piece)
            if up:
                self.bytes_up += len(piece)
                self.body_up += len(piece)
            else:
                self.bytes_down += len(piece)
            writer.write(piece)
            await writer.drain()


def parse(head: bytes) -> tuple[list[bytes], dict[bytes, bytes]]:
    first, *rest = head[:-4].split(b"\r\n")
    fields = (line.split(b":", 1) for line in rest)
    return first.split(b" ", 2), {name.strip().lower(): value.strip().lower() for name, value in fields}
