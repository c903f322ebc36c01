"""The final flush: SIGTERM arrives with one second of an agent's work not flushed."""

import ctypes
import datetime
import gzip
import os
import re
import time

import lab
from figures import Figure, Measured, ms
from rows.append import SESSION, append, chunks
from transcripts import Transcript

BACKLOG = 10


def durable_at(log: str) -> float:
    """Returns the time of the log line, in seconds since 1970."""
    logged_at = re.findall(r"^(\S+Z) .*everything is durable", log, re.MULTILINE)[-1]
    return datetime.datetime.fromisoformat(logged_at).timestamp()


def inotify() -> float:
    """Returns the time in which the kernel closes an inotify descriptor with watches. Every process with watches pays it at its end."""
    libc = ctypes.CDLL(None)
    descriptor = libc.inotify_init()
    for directory in (b"/", b"/usr", b"/etc"):
        libc.inotify_add_watch(descriptor, directory, 2)
    began = time.monotonic()
    os.close(descriptor)
    return time.monotonic() - began


def measure(bench) -> Measured:
    runs = 8 if bench.short else 60
    added = chunks(BACKLOG * runs, seed=7)
    took, puts, ends, floor = [], [], [], []
    with bench.directory("stop") as directory:
        bucket = bench.bucket()
        # The long interval leaves the whole second to the final flush.
        sessiond = lab.Sessiond(bench.program, directory, f"s3://{bucket}/kept?endpoint=http://127.0.0.1:{bench.s3_port}")
        path, bare = sessiond.transcript(SESSION), lab.S3(bench.s3_port)
        path.write_bytes(b"".join(Transcript(SESSION).bytes(1 << 20)))
        for run in range(runs):
            some = added[run * BACKLOG : (run + 1) * BACKLOG]
            with sessiond.daemon("--flush-interval", "30s") as daemon:
                sessiond.flush()
                for chunk in some:
                    append(path, chunk)
                    time.sleep(1 / BACKLOG)
                signaled_at, began = time.time(), time.monotonic()
                daemon.stop()
                ends.append(time.monotonic() - began)
                took.append(durable_at(daemon.tail()) - signaled_at)
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
