"""Many daemons on one PostgreSQL and one S3 server, each with an agent that appends every second."""

import contextlib
import os
import re
import signal
import threading
import time
import uuid
from pathlib import Path

import lab
from figures import Figure, Measured, ms, plain
from proxy import Proxy
from transcripts import Transcript

# The default flush interval of the daemon, in seconds.
INTERVAL = 1.0
# Maximum seconds until idle connections are closed; the daemon closes them after 30 s.
RELEASED = 60


def sessions(count: int) -> list[str]:
    return [str(uuid.UUID(int=(number << 64) + 0x8000_0000_0000_0001, version=4)) for number in range(count)]


def floor(bench, proxy: Proxy, rate: int, seconds: int, body: bytes) -> list[float]:
    """Sends the same number of bare PUTs per second, evenly spread, on a few connections."""
    bucket, took, workers = bench.bucket(), [], 8

    def worker(number: int) -> None:
        client, began = lab.S3(proxy.port), time.monotonic()
        for turn in range(number, rate * seconds, workers):
            time.sleep(max(0.0, began + turn / rate - time.monotonic()))
            start = time.monotonic()
            client.put(bucket, f"bare/{turn}", body)
            took.append(time.monotonic() - start)

    threads = [threading.Thread(target=worker, args=(number,)) for number in range(workers)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    return took


def append_all(fleet: dict[str, lab.Sessiond], seconds: int, sample) -> list[tuple[str, float]]:
    """Appends once per second in each session, in turn; returns the session and the time of each append."""
    lines = [line for line in Transcript("00000000-0000-4000-8000-000000000002", 5).bytes(200_000) if len(line) < 2000]
    paths = {session: sessiond.transcript(session) for session, sessiond in fleet.items()}
    appends, began = [], time.monotonic()
    for second in range(seconds):
        for number, (session, path) in enumerate(paths.items()):
            time.sleep(max(0.0, began + second + number / len(paths) - time.monotonic()))
            line = lines[(second * len(paths) + number) % len(lines)].replace(b"00000000-0000-4000-8000-000000000002", session.encode())
            with open(path, "ab", buffering=0) as file:
                file.write(line)
            appends.append((session, time.monotonic()))
        if second % 10 == 5:
            sample()
    return appends


def lags(appends: list[tuple[str, float]], proxy: Proxy) -> tuple[list[float], int, int]:
    """Returns the times from each append to the response to the first later PUT, the number of appends without one, and the number of PUTs."""
    puts: dict[str, list[tuple[float, float]]] = {}
    for method, target, status, _, began, ended in list(proxy.seen):
        if method == "PUT" and "/log/" in target and status < 300:
            puts.setdefault(target.split("/log/")[0].rsplit("/", 1)[1], []).append((began, ended))
    found, missing = [], 0
    for session, at in appends:
        ended = [end for began, end in puts.get(session, []) if began > at]
        if ended:
            found.append(min(ended) - at)
        else:
            missing += 1
    return found, missing, sum(map(len, puts.values()))


@contextlib.contextmanager
def raise_inotify_limit(count: int):
    """Raises the limit of inotify instances per user (128), and restores it afterwards. In containers each daemon would be another user."""
    allowed = Path("/proc/sys/fs/inotify/max_user_instances")
    before = int(allowed.read_text())
    if before >= count + 64:
        yield
        return
    if not os.access(allowed, os.W_OK):
        raise RuntimeError(f"{allowed} is {before}, and {count} daemons of one user need more: sysctl fs.inotify.max_user_instances={count + 64}")
    allowed.write_text(f"{count + 64}\n")
    try:
        yield
    finally:
        allowed.write_text(f"{before}\n")


def measure(bench) -> Measured:
    count, seconds = (10, 10) if bench.short else (200, 60)
    proxy, names = bench.proxy(), sessions(count)
    with raise_inotify_limit(count), bench.directory("fleet") as directory, lab.postgres(f"max_connections={2 * count + 50}", "shared_buffers=128MB") as (port, _):
        lab.psql(port, "CREATE DATABASE bench")
        bucket, index = bench.bucket(), f"postgres://postgres@127.0.0.1:{port}/bench"
        fleet = {}
        try:
            for number, session in enumerate(names):
                fleet[session] = sessiond = lab.Sessiond(
                    bench.program, directory / str(number), f"s3://{bucket}/kept?endpoint=http://127.0.0.1:{proxy.port}", index
                )
                sessiond.transcript(session)
                sessiond.start(timeout=120)
            time.sleep(2)
            proxy.reset()
            max_connections = 0

            def sample() -> None:
                nonlocal max_connections
                max_connections = max([max_connections, *(sessiond.process.connections(port) for sessiond in fleet.values())])

            before = sum(sessiond.process.cpu_seconds() for sessiond in fleet.values())
            appends = append_all(fleet, seconds, sample)
            time.sleep(5)
            cpu = sum(sessiond.process.cpu_seconds() for sessiond in fleet.values()) - before
            found, missing, puts = lags(appends, proxy)
            requests = proxy.requests
            pss = sum(sessiond.process.pss_kib() for sessiond in fleet.values())
            used = connections(port)
            deadline = time.monotonic() + (0 if bench.short else RELEASED)
            while (left := connections(port)) and time.monotonic() < deadline:
                time.sleep(1)
            failures = int(lab.psql(port, "SELECT count(*) FROM failures", "bench").stdout)
            for sessiond in fleet.values():
                sessiond.process.child.send_signal(signal.SIGTERM)
            problems, kinds = 0, set()
            for sessiond in fleet.values():
                problems += sessiond.process.finish(60, codes=range(-64, 256)).child.returncode != 0
                lines = re.findall(r" (?:WARN|ERROR) (.*)", Path(sessiond.process.log).read_text())
                problems += len(lines)
                kinds |= {re.sub(r"[0-9a-f]{8,}|\d+", "…", line)[:120] for line in lines}
        finally:
            for sessiond in fleet.values():
                if sessiond.process:
                    sessiond.process.kill()
        bare = floor(bench, proxy, count, 5 if bench.short else 15, b"x" * 700)
    p99 = lab.quantile(found, 0.99)
    errors = problems + failures + missing
    least = lab.quantile(bare, 0.99)
    figures = [
        Figure(
            "fleet",
            f"errors of {count} daemons in {seconds} s",
            errors,
            "",
            f"{errors} in {len(appends):,} appends" + (f": {'; '.join(sorted(kinds)[:3])}" if kinds else ""),
            "–",
            0,
            "none",
        ),
        Figure(
            "fleet",
            "p99 lag",
            p99 / INTERVAL,
            "intervals",
            f"p50 {ms(lab.median(found))}, p99 {ms(p99)}",
            f"p50 {ms(lab.median(bare))}, p99 {ms(least)}: a bare PUT at the same rate",
            3,
            "3 flush intervals",
            noise=1,
        ),
        Figure(
            "fleet",
            "PUTs per append",
            puts / len(appends),
            "×",
            f"{puts:,} PUTs, {requests:,} requests in total",
            f"{len(appends):,}: one PUT per append",
            noise=1.1,
        ),
        Figure(
            "fleet",
            "connections of one daemon",
            max_connections,
            "",
            f"at most {max_connections}; {used} in total a few seconds after the last append",
            "–",
            2,
            "at most 2",
        ),
    ]
    if not bench.short:
        figures.append(Figure("fleet", "connections left when idle", left, "", f"{left} in total after at most {RELEASED} s", "–", 0, "released"))
    took = f"CPU of all {count} daemons together: {plain(cpu)} s in {seconds + 5} s, {ms(cpu / len(appends))} per append; memory {plain(pss / 1024)} MiB (PSS)."
    return Measured(figures, [f"{took} The S3 server, PostgreSQL, the proxy and the appending process share the cores with the daemons."])


def connections(port: int) -> int:
    """Returns the number of client connections to the database, without the one of the query."""
    query = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
    return int(lab.psql(port, query).stdout)
