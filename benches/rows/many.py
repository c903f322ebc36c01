"""Many sessions that are stored already: what several rows start from."""

import os
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import lab
from transcripts import Transcript

PROJECTS = 100


@dataclass
class Many:
    """A root whose sessions are all durable, and the store that has them."""

    kept: lab.Sessiond
    folder: Path
    bucket: str
    count: int
    bytes: int
    took: float


def make(bench, count: int, port: int) -> Many:
    """Files of a few kilobytes with a time in the past, streamed by a daemon and flushed. The ledgers name the store by its address, so it is
    used behind this port ever after."""
    folder, bucket = bench.work / f"many-{count}-{port}", bench.bucket()
    kept = lab.Sessiond(bench.program, folder, f"s3://{bucket}/kept?endpoint=http://127.0.0.1:{port}")
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
        # The index follows behind; what it still waits for would be work at the next start.
        deadline = time.monotonic() + 300
        while kept.ask({"op": "status"})["status"]["index_waiting"] and time.monotonic() < deadline:
            time.sleep(0.2)
        daemon.stop()
    return Many(kept, folder, bucket, count, total, time.monotonic() - began)

