"""Append 4 KB at a time to a 12 MB session and make each durable: uploaded bytes, CPU, time."""

import gzip
import json
import sys
import time
from collections import Counter
from pathlib import Path

import lab
import rivals
from figures import Figure, Measured, kib, ms, plain
from proxy import Proxy
from transcripts import Transcript

SESSION = "3f2a0000-0000-4000-8000-000000000001"
SIZE = 12 << 20
PIECE = 4096


def pieces(count: int, seed: int = 2) -> list[bytes]:
    """Whole lines of close to 4 KB together."""
    made, lines, held = [], Transcript(SESSION, seed).lines(), b""
    while len(made) < count:
        line = next(lines)
        if len(line) > PIECE:
            continue
        if len(held) + len(line) > PIECE:
            made.append(held)
            held = b""
        held += line
    return made


def append(path: Path, piece: bytes) -> None:
    with open(path, "ab") as file:
        file.write(piece)


def ours(bench, directory: Path, port: int, added: list[bytes], start: bytes, proxy: Proxy | None) -> dict:
    """Streams what is added, each flushed through the socket, with one bare PUT of the same bytes between."""
    bucket = bench.bucket()
    kept = lab.Sessiond(bench.program, directory, f"s3://{bucket}/kept?endpoint=http://127.0.0.1:{port}")
    path = kept.transcript(SESSION)
    path.write_bytes(start)
    bare, took, puts = lab.S3(port), [], []
    bare.put(bucket, "bare/first", b"x")
    with kept.daemon() as daemon:
        kept.flush()
        time.sleep(1)
        if proxy:
            proxy.reset()
        before = daemon.cpu_seconds()
        for number, piece in enumerate(added):
            append(path, piece)
            began = time.perf_counter()
            kept.flush(SESSION)
            took.append(time.perf_counter() - began)
            if not proxy:
                body = gzip.compress(piece, 6)
                began = time.perf_counter()
                bare.put(bucket, f"bare/{number}", body)
                puts.append(time.perf_counter() - began)
        # Merging goes on behind the last flush and is part of the price.
        time.sleep(2)
        found = {"took": took, "puts": puts, "cpu": daemon.cpu_seconds() - before}
        if proxy:
            found |= {"up": proxy.bytes_up, "body": proxy.body_up, "requests": proxy.requests, "by": by_kind(proxy)}
        daemon.stop()
    return found


def by_kind(proxy: Proxy) -> Counter:
    """Bytes of bodies up and requests, by what they are for."""
    counted = Counter()
    for method, target, _, length, *_ in list(proxy.seen):
        kind = "list" if "list-type" in target else target.partition("?")[0].split("/")[-2]
        counted[f"{method} {kind}"] += 1
        if length:
            counted[f"bytes {kind}"] += length
    return counted


def adapter(bench, directory: Path, proxy: Proxy, added: list[bytes]) -> dict:
    """The Agent SDK's reference adapter, called once per append in a process that stays."""
    found = lab.agent_sdk()
    (directory / "appends.json").write_text(json.dumps([piece.decode() for piece in added]))
    bucket = bench.bucket()
    proxy.reset()
    extra = {"PYTHONPATH": f"{found['python']}:{found['adapter']}", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, lab.HERE / "adapter.py", f"http://127.0.0.1:{proxy.port}", bucket, directory / "appends.json", directory / "adapter.json"]
    lab.Process(command, directory / "home-adapter", extra).finish(300)
    told = json.loads((directory / "adapter.json").read_text())
    return {**told, "up": proxy.bytes_up, "requests": proxy.requests}


def measure(bench) -> Measured:
    added = pieces(60 if bench.short else 200)
    start = b"".join(Transcript(SESSION).bytes(SIZE))
    floor = sum(len(gzip.compress(piece, 6)) for piece in added)
    proxy = bench.proxy()
    with bench.directory("append") as directory:
        timed = ours(bench, directory / "timed", bench.s3_port, added, start, None)
        counted = ours(bench, directory / "counted", proxy.port, added, start, proxy)
        others = {}
        some = added[: 5 if bench.short else 40]
        for kind in rivals.all_of(bench):
            kept = directory / f"kept-{kind.__name__}"
            kept.mkdir()
            path = kept / f"{SESSION}.jsonl"
            path.write_bytes(start)
            rival = kind(bench, directory, proxy.port)
            rival.prepare(kept)
            rival.sync(kept)
            proxy.reset()
            done = []
            for piece in some:
                append(path, piece)
                done.append(rival.sync(kept))
            others[kind.name] = {
                "took": [one.took for one in done],
                "cpu": sum(one.cpu for one in done),
                "up": proxy.bytes_up,
                "requests": proxy.requests,
                "count": len(done),
            }
        if not bench.short:
            others["SDK's S3 adapter"] = {**adapter(bench, directory, proxy, added), "count": len(added)}
    count = len(added)
    cpu = timed["cpu"] / count
    best_name, best = min(((name, one["cpu"] / one["count"]) for name, one in others.items()), key=lambda pair: pair[1])
    p50, put = lab.median(timed["took"]), lab.median(timed["puts"])
    log = counted["by"]["bytes log"]
    tools = {name: one for name, one in others.items() if "SDK" not in name}
    tool_name, tool = min(((name, one["cpu"] / one["count"]) for name, one in tools.items()), key=lambda pair: pair[1])
    figures = [
        Figure(
            "append",
            "bytes uploaded",
            counted["body"] / floor,
            "×",
            f"{kib(counted['body'] / count)} per append",
            f"{kib(floor / count)}: gzip of the appended bytes",
            1.3,
            "at most 1.3 × the gzip size",
        ),
        Figure(
            "append", "bytes uploaded, entries only", log / floor, "×", f"{kib(log / count)} per append", f"{kib(floor / count)}: gzip of the appended bytes"
        ),
        Figure(
            "append",
            "CPU",
            cpu / best,
            "×",
            f"{ms(cpu)} per append",
            f"{ms(best)}: {best_name}, the fastest of the compared tools",
            1 / 20,
            "at least 20 × less (0.05 ×)",
        ),
        Figure(
            "append",
            "time to durable",
            p50 / put,
            "×",
            f"p50 {ms(p50)}, p99 {ms(lab.quantile(timed['took'], 0.99))}",
            f"p50 {ms(put)}, p99 {ms(lab.quantile(timed['puts'], 0.99))}: a bare PUT of the same bytes",
            2,
            "p50 within 2 ×",
            noise=2,
        ),
    ]
    if tool_name != best_name:
        figures.insert(3, Figure("append", "CPU, compared with file sync tools", cpu / tool, "×", f"{ms(cpu)} per append", f"{ms(tool)}: {tool_name}"))
    rows = ["| | KiB uploaded per append | CPU per append | p50 | p99 | requests per append |", "|---|---|---|---|---|---|"]
    mine = {**counted, "cpu": timed["cpu"], "took": timed["took"], "count": count}
    for name, one in {"sessiond": mine, **others}.items():
        up, cpu_each, asked_each = (one[what] / one["count"] for what in ("up", "cpu", "requests"))
        took = f"{ms(lab.median(one['took']))} | {ms(lab.quantile(one['took'], 0.99))}"
        rows.append(f"| {name} | {plain(up / 1024)} | {ms(cpu_each)} | {took} | {plain(asked_each)} |")
    asked = ", ".join(f"{name} {value:,}" for name, value in sorted(counted["by"].items()))
    text = (
        f"Here, the uploaded bytes include HTTP headers. sessiond and the adapter ran {count} appends, each tool {len(some)} (one process per sync).\n\n"
        + "\n".join(rows)
    )
    return Measured(figures, [text + f"\n\nRequests that sessiond sent to the store in these {count} appends: {asked}."])
