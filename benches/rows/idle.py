"""An idle minute with a thousand old sessions, compared with litestream on an idle database."""

import sqlite3
import time
from pathlib import Path

import lab
import rivals
from figures import Figure, Measured, ms
from rows.many import ten_thousand, thousand

# The sampling interval for wake-ups.
LOOK = 0.25


def litestream(bench, directory: Path, port: int) -> lab.Process:
    directory.mkdir()
    with sqlite3.connect(directory / "kept.db") as database:
        database.executescript("PRAGMA journal_mode = WAL; CREATE TABLE lines (line TEXT);")
        database.executemany("INSERT INTO lines VALUES (?)", [("x" * 500,)] * 2000)
    bucket = bench.bucket()
    settings = directory / "litestream.yml"
    settings.write_text(
        f"dbs:\n  - path: {directory}/kept.db\n    replica:\n      type: s3\n      bucket: {bucket}\n      path: kept\n"
        f"      endpoint: http://127.0.0.1:{port}\n      region: us-east-1\n      force-path-style: true\n"
    )
    return lab.Process([rivals.litestream(), "replicate", "-config", settings], directory)


def measure(bench) -> Measured:
    seconds = 30 if bench.short else 60
    many, its_proxy = ten_thousand(bench) if bench.short else thousand(bench), bench.proxy()
    ours_proxy = many.proxy
    with bench.directory("litestream") as directory, many.kept.daemon(timeout=120) as daemon:
        other = litestream(bench, directory / "l", its_proxy.port)
        try:
            # Work after a start is not idle time.
            time.sleep(3 if bench.short else 35)
            found = watch({"sessiond": (daemon, ours_proxy), "litestream": (other, its_proxy)}, seconds)
        finally:
            other.kill()
        daemon.stop()
    ours, its = found["sessiond"], found["litestream"]
    per = 60 / seconds
    figures = [
        Figure("idle", f"requests in {seconds} s", ours["requests"], "", f"{ours['requests']}", f"{its['requests']}: litestream", 0, "0"),
        Figure(
            "idle",
            "wake-ups of the process in 60 s",
            ours["moments"] * per,
            "",
            f"{ours['moments'] * per:.0f} ({ours['wakeups'] * per:.0f} thread wake-ups)",
            f"{its['moments'] * per:.0f} ({its['wakeups'] * per:.0f}): litestream",
            6,
            "no timer more than once in 10 s",
            noise=10,
        ),
        Figure(
            "idle",
            "CPU in 60 s",
            ours["cpu"] / max(its["cpu"], 1 / lab.TICK),
            "×",
            ms(ours["cpu"] * per),
            f"{ms(its['cpu'] * per)}: litestream",
            noise=0.5,
        ),
    ]
    when = ", ".join(f"{moment:.0f}" for moment in ours["when"])
    text = f"The process woke up {ours['moments']} times in these {seconds} s, at second {when or '–'}; open connections: {ours['connections']}."
    return Measured(figures, [text + (f" Requests: {ours['targets']}." if ours["targets"] else "")])


def watch(processes: dict, seconds: float) -> dict:
    """Measures both during this time: a moment is a quarter of a second in which any thread was woken."""
    state = {}
    for name, (process, proxy) in processes.items():
        proxy.reset()
        state[name] = {"last": process.wakeups(), "first": process.wakeups(), "cpu": process.cpu_seconds(), "when": []}
    began = time.monotonic()
    while (now := time.monotonic() - began) < seconds:
        time.sleep(LOOK)
        for name, (process, _) in processes.items():
            woken = process.wakeups()
            if woken != state[name]["last"]:
                state[name]["when"].append(now)
                state[name]["last"] = woken
    for name, (process, proxy) in processes.items():
        one = state[name]
        one["wakeups"] = sum(count - one["first"].get(thread, 0) for thread, count in one["last"].items())
        one |= {
            "moments": len(one["when"]),
            "cpu": process.cpu_seconds() - one["cpu"],
            "requests": proxy.requests,
            "connections": process.connections(),
        }
        one["targets"] = ", ".join(sorted({f"{method} {target}" for method, target, *_ in list(proxy.seen)}))
    return state
