"""The load that streaming puts on PostgreSQL: CPU of the database per append, and transactions, with one session and with many."""

import contextlib
import time
from pathlib import Path

import lab
from figures import Figure, Measured, ms, plain
from rows.fleet import append_all, sessions

# Seconds of CPU per append with one transaction per entry, measured on two cores with the same row before updates were batched.
UNBATCHED = {1: 0.00155, 20: 0.00098}


def cpu_seconds(server: int) -> dict[str, float]:
    """Returns the CPU time of each process of a PostgreSQL server."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == server:
                # Nanoseconds: a backend uses less than a tick per append.
                found[stat.parent.name] = int((stat.parent / "schedstat").read_text().split()[0]) / 1e9
    return found


def transactions(port: int) -> int:
    return int(lab.psql(port, "SELECT xact_commit FROM pg_stat_database WHERE datname = 'bench'").stdout)


def measure_daemon(bench, count: int, seconds: int) -> dict:
    """Runs one daemon; appends to each of its sessions once per second."""
    with bench.directory("index-load") as directory, lab.postgres("shared_buffers=128MB", "autovacuum=off") as (port, log):
        server = int((log.parent / "data/postmaster.pid").read_text().split()[0])
        lab.psql(port, "CREATE DATABASE bench")
        sessiond = lab.Sessiond(bench.program, directory, f"file://{directory}/store", f"postgres://postgres@127.0.0.1:{port}/bench")
        fleet = {session: sessiond for session in sessions(count)}
        with sessiond.daemon() as daemon:
            append_all(fleet, 2, lambda: None)
            wait_until_indexed(sessiond)
            time.sleep(1)
            before, cpu, began = transactions(port), cpu_seconds(server), time.monotonic()
            appends = len(append_all(fleet, seconds, lambda: None))
            wait_until_indexed(sessiond)
            took = time.monotonic() - began
            cpu = sum(seconds - cpu.get(process, 0) for process, seconds in cpu_seconds(server).items())
            # PostgreSQL publishes its statistics with a delay of one second.
            time.sleep(2)
            committed = transactions(port) - before
            daemon.stop()
        indexed = int(lab.psql(port, "SELECT sum(len) FROM files", "bench").stdout)
        written = sum(sessiond.transcript(session).stat().st_size for session in fleet)
        assert indexed == written, f"the index has {indexed} of {written} bytes"
    return {"cpu": cpu / appends, "transactions": committed / took, "appends": appends}


def wait_until_indexed(sessiond: lab.Sessiond) -> None:
    sessiond.flush()
    deadline = time.monotonic() + 60
    while sessiond.request_control({"op": "status"})["status"]["index_backlog"]:
        assert time.monotonic() < deadline, "the index is behind"
        time.sleep(0.1)


def measure(bench) -> Measured:
    figures = []
    for count in (1, 20):
        found = measure_daemon(bench, count, 10 if bench.short else 30)
        was = UNBATCHED[count]
        name = "1 session" if count == 1 else f"{count} sessions"
        figures.append(
            Figure(
                "index load",
                f"CPU of PostgreSQL, {name}",
                found["cpu"] * 1000,
                "ms per append",
                f"{ms(found['cpu'])} per append, {found['appends']} appends",
                f"{ms(was)} with one transaction per entry",
                was * 1000 / 5,
                "a fifth",
                noise=0.5,
            )
        )
        figures.append(
            Figure("index load", f"transactions, {name}", found["transactions"], "per second", f"{plain(found['transactions'])} per second", "–", 1, "at most 1 per second")
        )
    return Measured(figures)
