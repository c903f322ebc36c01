"""The final flush: a second of an agent's work is waiting when SIGTERM comes."""

import ctypes
import datetime
import gzip
import os
import re
import time

import lab
from figures import Figure, Measured, ms
from rows.append import SESSION, append, pieces
from transcripts import Transcript

BACKLOG = 10


def durable_at(log: str) -> float:
    """When it said so, in seconds since 1970."""
    said = re.findall(r"^(\S+Z) .*everything is durable", log, re.MULTILINE)[-1]
    return datetime.datetime.fromisoformat(said).timestamp()


def inotify() -> float:
    """What the kernel takes to close an inotify descriptor with watches, which every process that has one pays at its end."""
    libc = ctypes.CDLL(None)
    descriptor = libc.inotify_init()
    for directory in (b"/", b"/usr", b"/etc"):
        libc.inotify_add_watch(descriptor, directory, 2)
    began = time.monotonic()
    os.close(descriptor)
    return time.monotonic() - began


def measure(bench) -> Measured:
    runs = 8 if bench.short else 60
    added = pieces(BACKLOG * runs, seed=7)
    took, puts, ends, floor = [], [], [], []
    with bench.directory("stop") as directory:
        bucket = bench.bucket()
        # An interval that leaves the whole second to the final flush.
        kept = lab.Sessiond(bench.program, directory, f"s3://{bucket}/kept?endpoint=http://127.0.0.1:{bench.s3_port}")
        path, bare = kept.transcript(SESSION), lab.S3(bench.s3_port)
        path.write_bytes(b"".join(Transcript(SESSION).bytes(1 << 20)))
        for run in range(runs):
            some = added[run * BACKLOG : (run + 1) * BACKLOG]
            with kept.daemon("--flush-interval", "30s") as daemon:
                kept.flush()
                for piece in some:
                    append(path, piece)
                    time.sleep(1 / BACKLOG)
                told, began = time.time(), time.monotonic()
                daemon.stop()
                ends.append(time.monotonic() - began)
                took.append(durable_at(daemon.tail()) - told)
            floor.append(inotify())
            body = gzip.compress(b"".join(some), 6)
            began = time.monotonic()
            bare.put(bucket, f"bare/{run}", body)
            puts.append(time.monotonic() - began)
    p99, put, end = lab.quantile(took, 0.99), lab.median(puts), lab.quantile(ends, 0.99)
    against = f"p50 {ms(put)}, p99 {ms(lab.quantile(puts, 0.99))}: a bare PUT of the same bytes"
    kernel = f"; the kernel closes the file watches in {ms(lab.median(floor))}"
    figures = [
        Figure(
            "stop",
            "final flush",
            p99 / put,
            "×",
            f"p50 {ms(lab.median(took))}, p99 {ms(p99)} from SIGTERM to durable",
            against,
            5,
            "p99 within 5 × one PUT",
            noise=10,
        ),
        Figure("stop", "process exit", end / put, "×", f"p50 {ms(lab.median(ends))}, p99 {ms(end)}", against + kernel, noise=20),
    ]
    return Measured(figures, [f"{runs} shutdowns, each after {BACKLOG} appends of 4 KB in the last second."])
