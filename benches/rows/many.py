"""Many stored sessions, which several rows use."""

import os
import time
import uuid
from dataclasses import dataclass

import lab
from proxy import Proxy
from transcripts import Transcript

PROJECTS = 100


@dataclass
class Many:
    """A root whose sessions are all durable, and its store."""

    kept: lab.Sessiond
    proxy: Proxy
    count: int
    bytes: int
    took: float


def ten_thousand(bench) -> Many:
    """Returns the sessions; a tenth of them in the short form."""
    return bench.once("ten thousand", lambda: make(bench, 1000 if bench.short else 10_000))


def thousand(bench) -> Many:
    return bench.once("a thousand", lambda: make(bench, 1000))


def make(bench, count: int) -> Many:
    """Files of a few kilobytes with a time in the past, streamed by a daemon and flushed. The ledgers contain the address of the
    store, so all rows use it through this proxy, which also counts the requests."""
    directory, bucket, proxy = bench.work / f"many-{count}", bench.bucket(), bench.proxy()
    kept = lab.Sessiond(bench.program, directory, f"s3://{bucket}/kept?endpoint=http://127.0.0.1:{proxy.port}")
    lines, total, old = Transcript("00000000-0000-4000-8000-000000000000", 3).lines(), 0, time.time() - 86_400
    some = [b"".join(next(lines) for _ in range(4)) for _ in range(20)]
    for number in range(count):
        session = str(uuid.UUID(int=(number << 64) + 0x8000_0000_0000_0000, version=4))
        path = kept.transcript(session, f"-work-app-{number % PROJECTS}")
        content = some[number % len(some)].replace(b"00000000-0000-4000-8000-000000000000", session.encode())
        path.write_bytes(content)
        os.utime(path, (old, old))
        total += len(content)
    began = time.monotonic()
    with kept.daemon(timeout=300) as daemon:
        kept.flush()
        # Waits for the index: its backlog would be work at the next start.
        deadline = time.monotonic() + 300
        while kept.request_control({"op": "status"})["status"]["index_backlog"] and time.monotonic() < deadline:
            time.sleep(0.2)
        daemon.stop()
    return Many(kept, proxy, count, total, time.monotonic() - began)
