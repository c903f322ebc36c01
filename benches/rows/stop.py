"""The final flush: a second of an agent's work is waiting when SIGTERM comes."""

import gzip
import time

import lab
from figures import Figure, Measured, ms
from rows.append import SESSION, append, pieces
from transcripts import Transcript

BACKLOG = 10


def measure(bench) -> Measured:
    runs = 8 if bench.short else 60
    added = pieces(BACKLOG * runs, seed=7)
    took, puts, cpu = [], [], []
    with bench.folder("stop") as folder:
        bucket = bench.bucket()
        # An interval that leaves the whole second to the final flush.
        kept = lab.Sessiond(bench.program, folder, f"s3://{bucket}/kept?endpoint=http://127.0.0.1:{bench.s3_port}")
        path, bare = kept.transcript(SESSION), lab.S3(bench.s3_port)
        path.write_bytes(b"".join(Transcript(SESSION).bytes(1 << 20)))
        for run in range(runs):
            some = added[run * BACKLOG : (run + 1) * BACKLOG]
            with kept.daemon("--flush-interval", "30s") as daemon:
                kept.flush()
                for piece in some:
                    append(path, piece)
                    time.sleep(1 / BACKLOG)
                before = daemon.cpu_seconds()
                began = time.monotonic()
                daemon.stop()
                took.append(time.monotonic() - began)
                cpu.append(daemon.cpu - before)
            body = gzip.compress(b"".join(some), 6)
            began = time.monotonic()
            bare.put(bucket, f"bare/{run}", body)
            puts.append(time.monotonic() - began)
    p99, put = lab.quantile(took, 0.99), lab.median(puts)
    ours = f"p50 {ms(lab.median(took))}, p99 {ms(p99)} from SIGTERM to exit"
    against = f"p50 {ms(put)}, p99 {ms(lab.quantile(puts, 0.99))}: a bare PUT of the same bytes"
    text = f"{runs} ends, each with {BACKLOG} appends of 4 KB in the last second; CPU of one end {ms(lab.median(cpu))}."
    return Measured([Figure("stop", "final flush", p99 / put, "×", ours, against, 5, "p99 within 5 × one PUT")], [text])
