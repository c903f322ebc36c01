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
CHUNK = 4096
# Longer than the daemon collects entries for one index transaction, in seconds.
INDEX_DELAY = 6


def chunks(count: int, seed: int = 2) -> list[bytes]:
    """Returns chunks of complete lines, each close to 4 KB."""
    chunks_made, lines, pending = [], Transcript(SESSION, seed).lines(), b""
    while len(chunks_made) < count:
        line = next(lines)
        if len(line) > CHUNK:
            continue
        if len(pending) + len(line) > CHUNK:
            chunks_made.append(pending)
            pending = b""
        pending += line
    return chunks_made


def append(path: Path, chunk: bytes) -> None:
    with open(path, "ab") as file:
        file.write(chunk)


def measure_sessiond(bench, directory: Path, port: int, added: list[bytes], start: bytes, proxy: Proxy | None) -> dict:
    """Streams the chunks, each flushed through the socket, with a bare PUT of the same bytes after each."""
    bucket = bench.bucket()
    sessiond = lab.Sessiond(bench.program, directory, f"s3://{bucket}/kept?endpoint=http://127.0.0.1:{port}")
    path = sessiond.transcript(SESSION)
    path.write_bytes(start)
    bare, took, puts = lab.S3(port), [], []
    bare.put(bucket, "bare/first", b"x")
    with sessiond.daemon() as daemon:
        sessiond.flush()
        # The index of the first 12 MB is not part of an append.
        daemon.wait_until_idle(INDEX_DELAY)
        if proxy:
            proxy.reset()
        before = daemon.cpu_seconds()
        for number, chunk in enumerate(added):
            append(path, chunk)
            began = time.perf_counter()
            sessiond.flush(SESSION)
            took.append(time.perf_counter() - began)
            if not proxy:
                body = gzip.compress(chunk, 6)
                began = time.perf_counter()
                bare.put(bucket, f"bare/{number}", body)
                puts.append(time.perf_counter() - began)
        # Compaction and the index continue after the last flush and are part of the cost.
        daemon.wait_until_idle(INDEX_DELAY)
        found = {"took": took, "puts": puts, "cpu": daemon.cpu_seconds() - before}
        if proxy:
            found |= {"up": proxy.bytes_up, "body": proxy.body_up, "requests": proxy.requests, "by": by_kind(proxy)}
        daemon.stop()
    return found


def by_kind(proxy: Proxy) -> Counter:
    """Counts uploaded bytes and requests by purpose."""
    counted = Counter()
    for method, target, _, length, *_ in list(proxy.seen):
        kind = "list" if "list-type" in target else target.partition("?")[0].split("/")[-2]
        counted[f"{method} {kind}"] += 1
        if length:
            counted[f"bytes {kind}"] += length
    return counted


def adapter(bench, directory: Path, proxy: Proxy, added: list[bytes]) -> dict:
    """The Agent SDK's reference adapter, called once per append in one process."""
    found = lab.agent_sdk()
    (directory / "appends.json").write_text(json.dumps([chunk.decode() for chunk in added]))
    bucket = bench.bucket()
    proxy.reset()
    extra = {"PYTHONPATH": f"{found['python']}:{found['adapter']}", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, lab.HERE / "adapter.py", f"http://127.0.0.1:{proxy.port}", bucket, directory / "appends.json", directory / "adapter.json"]
    lab.Process(command, directory / "home-adapter", extra).finish(300)
    result = json.loads((directory / "adapter.json").read_text())
    return {**result, "up": proxy.bytes_up, "requests": proxy.requests}


def measure(bench) -> Measured:
    added = chunks(60 if bench.short else 200)
    start = b"".join(Transcript(SESSION).bytes(SIZE))
    floor = sum(len(gzip.compress(chunk, 6)) for chunk in added)
    proxy = bench.proxy()
    with bench.directory("append") as directory:
        timed = measure_sessiond(bench, directory / "timed", bench.s3_port, added, start, None)
        counted = measure_sessiond(bench, directory / "counted", proxy.port, added, start, proxy)
        others = {}
        some = added[: 5 if bench.short else 40]
        for kind in rivals.all_of(bench):
            source = directory / f"kept-{kind.__name__}"
            source.mkdir()
            path = source / f"{SESSION}.jsonl"
            path.write_bytes(start)
            rival = kind(bench, directory, proxy.port)
            rival.prepare(source)
            rival.sync(source)
            proxy.reset()
            done = []
            for chunk in some:
                append(path, chunk)
                done.append(rival.sync(source))
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
            1.6,
            "at most 1.6 × the gzip size",
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
            1.3,
            "at most 1.3 ×",
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
    own_result = {**counted, "cpu": timed["cpu"], "took": timed["took"], "count": count}
    for name, one in {"sessiond": own_result, **others}.items():
        up, cpu_each, requests_each = (one[what] / one["count"] for what in ("up", "cpu", "requests"))
        took = f"{ms(lab.median(one['took']))} | {ms(lab.quantile(one['took'], 0.99))}"
        rows.append(f"| {name} | {plain(up / 1024)} | {ms(cpu_each)} | {took} | {plain(requests_each)} |")
    requests = ", ".join(f"{name} {value:,}" for name, value in sorted(counted["by"].items()))
    text = (
        f"Here, the uploaded bytes include HTTP headers. sessiond and the adapter ran {count} appends, each tool {len(some)} (one process per sync).\n\n"
        + "\n".join(rows)
    )
    return Measured(figures, [text + f"\n\nRequests that sessiond sent to the store in these {count} appends: {requests}."])
