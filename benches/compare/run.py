"""Compares the Agent SDK's reference S3 adapter with sessiond under the same faults, and writes docs/explanation/comparison.md.

See README.md beside this file. Every figure in that document comes from the run that wrote it.
"""

import argparse
import glob
import http.client
import http.server
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from itertools import accumulate
from pathlib import Path

sys.dont_write_bytecode = True
sys.path.append(str(Path(__file__).resolve().parent.parent))
import lab  # noqa: E402
from drive import PROJECT, SESSION  # noqa: E402
from lab import KEYS, TREE  # noqa: E402

HERE = Path(__file__).resolve().parent
SYSTEMS = {"s3": "SDK + S3 adapter", "serve": "SDK + `sessiond serve-store`", "sidecar": "`sessiond daemon` as a sidecar"}


def tools() -> dict:
    def fake_clock(into):
        subprocess.run(["apt-get", "download", "libfaketime"], cwd=into, check=True, capture_output=True)
        subprocess.run(["dpkg", "-x", next(into.glob("*.deb")), into], check=True)

    found = {**lab.agent_sdk(), "weed": lab.weed()}
    try:
        found["clock"] = glob.glob(f"{lab.once('libfaketime', fake_clock)}/usr/lib/*/faketime/libfaketime.so.1")[0]
    except (OSError, subprocess.CalledProcessError, IndexError, StopIteration) as cause:
        found["clock"] = None
        print(f"no libfaketime: {cause}", file=sys.stderr)
    return found


class Proxy(http.server.ThreadingHTTPServer):
    """Forwards and counts requests; injects the fault from the third write to the session on."""

    daemon_threads = True

    def __init__(self, upstream: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.upstream, self.lock = upstream, threading.Lock()
        self.begin(None)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def begin(self, fault) -> None:
        self.fault, self.requests, self.bytes_up, self.writes, self.hits = fault, 0, 0, 0, 0

    def note(self, handler, body: bytes):
        with self.lock:
            self.requests += 1
            self.bytes_up += len(body)
            if handler.command != "PUT" or SESSION not in handler.path:
                return None
            self.writes += 1
            most = {"lost": 1, "503": 3}.get(self.fault, 0)
            if self.writes < 3 or self.hits >= most:
                return None
            self.hits += 1
            return self.fault

    def handle_error(self, request, client_address) -> None:
        """Ignores connections that a killed process closed."""


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Head and body are two writes; the second must not wait for the acknowledgment of the first.
    disable_nagle_algorithm = True

    def forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        fault = self.server.note(self, body)
        if fault == "503":
            self.send_response(503)
            self.send_header("content-length", "0")
            self.end_headers()
            return
        upstream = http.client.HTTPConnection("127.0.0.1", self.server.upstream, timeout=60)
        upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in ("connection", "expect"):
                upstream.putheader(name, value)
        upstream.endheaders(body)
        answer = upstream.getresponse()
        content = answer.read()
        upstream.close()
        if fault == "lost":
            self.close_connection = True
            self.connection.close()
            return
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                self.send_header(name, value)
        length = answer.getheader("content-length") if self.command == "HEAD" else len(content)
        self.send_header("content-length", str(length or 0))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = forward

    def log_message(self, *args) -> None:
        pass


class Bench:
    def __init__(self, found: dict, program: str, s3_port: int) -> None:
        sys.path.insert(0, str(found["python"]))
        import boto3

        os.environ.update(KEYS)
        self.found, self.program, self.proxy = found, program, Proxy(s3_port)
        self.address = f"http://127.0.0.1:{self.proxy.server_port}"
        self.direct = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{s3_port}", region_name="us-east-1")
        self.buckets = 0

    def run(self, kind: str, *, fault=None, turn=10, processes=((0, 300),), pause=0, behind=None) -> dict:
        self.buckets += 1
        self.bucket = f"compare{self.buckets}"
        self.direct.create_bucket(Bucket=self.bucket)
        self.proxy.begin(fault)
        with tempfile.TemporaryDirectory(prefix="compare-") as work:
            self.work = Path(work)
            written, dropped, peaks = 0, [], []
            for number, (first, last) in enumerate(processes):
                clock = behind if number else None
                following = processes[number + 1 :][:1]
                ended = self.run_agent(kind, number, first, last, turn, pause, clock, following, behind)
                written = ended["written"]
                dropped += ended["dropped"]
                peaks += [ended["kib"]] if ended["kib"] is not None else []
            if fault:
                assert self.proxy.hits == {"lost": 1, "503": 3}[fault], f"the fault did not happen: {self.proxy.hits}"
            bytes_up = self.proxy.bytes_up
            numbers, requests = self.load(kind)
        pages = self.direct.get_paginator("list_objects_v2").paginate(Bucket=self.bucket)
        keys = [item["Key"] for page in pages for item in page.get("Contents", []) if SESSION in item["Key"]]
        return {
            "entries": written,
            "lost": written - len(set(numbers)),
            "duplicated": len(numbers) - len(set(numbers)),
            "out of order": sum(number < highest for number, highest in zip(numbers, accumulate(numbers, max))),
            "batches dropped": len(dropped),
            "objects": len(keys),
            "requests to load": requests,
            "KiB uploaded": round(bytes_up / 1024),
            "peak MiB": round(max(peaks) / 1024, 1) if peaks else "–",
        }

    def environment(self, behind) -> dict:
        paths = [self.found["python"], self.found["adapter"], TREE / "examples/session-store-py"]
        environment = {**KEYS, "PATH": os.environ["PATH"], "HOME": str(self.work), "PYTHONPATH": os.pathsep.join(map(str, paths))}
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
        environment["SESSIOND_STORE"] = f"s3://{self.bucket}/kept?endpoint={self.address}"
        environment["SESSIOND_INDEX"] = f"sqlite://{self.work}/index.db"
        if behind:
            environment |= {"LD_PRELOAD": self.found["clock"], "FAKETIME": behind, "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
        return environment

    def start_sessiond(self, *args, behind=None, **more) -> subprocess.Popen:
        log = open(self.work / "sessiond.log", "a")
        return subprocess.Popen([self.program, *map(str, args)], env=self.environment(behind), stderr=log, text=True, **more)

    def serve(self, root: Path, behind=None, listen="http://127.0.0.1:0"):
        server = self.start_sessiond("serve-store", "--root", root, "--listen", listen, behind=behind, stdout=subprocess.PIPE)
        line = server.stdout.readline()
        assert line.startswith("listening on "), (self.work / "sessiond.log").read_text()
        return server, line.removeprefix("listening on ").strip()

    def drive(self, what: str, kind: str, *args, behind=None) -> subprocess.Popen:
        command = [sys.executable, HERE / "drive.py", what, kind, "--bucket", self.bucket, *map(str, args)]
        return subprocess.Popen(command, env=self.environment(behind), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def agent(self, kind: str, number: int, first: int, last: int, turn: int, pause: int, behind) -> subprocess.Popen:
        targets = {"s3": ("--address", self.address), "serve": ("--address", f"unix://{self.work}/{number}.sock")}
        target = targets.get(kind, ("--file", self.work / f"root-{number}/projects/{PROJECT}/{SESSION}.jsonl"))
        return self.drive("write", kind, "--first", first, "--last", last, "--turn", turn, "--pause", pause, *target, behind=behind)

    def run_agent(self, kind: str, number: int, first: int, last: int, turn: int, pause: int, behind, following, next_behind) -> dict:
        """Runs one container with an agent and its sessiond. A pause simulates a power loss two seconds later."""
        root, sessiond = self.work / f"root-{number}", None
        if kind == "serve":
            sessiond, _ = self.serve(root, behind, f"unix://{self.work}/{number}.sock")
        elif kind == "sidecar":
            (root / f"projects/{PROJECT}").mkdir(parents=True)
            if first > 0:
                assert self.start_sessiond("restore", SESSION, "--root", root, behind=behind, stdout=subprocess.DEVNULL).wait() == 0
            ready = self.work / f"ready-{number}"
            sessiond = self.start_sessiond("daemon", "--root", root, "--ready-file", ready, behind=behind)
            while not ready.exists():
                assert sessiond.poll() is None, (self.work / "sessiond.log").read_text()
                time.sleep(0.05)
        for after in following:
            self.waiting = self.agent(kind, number + 1, *after, turn, pause, next_behind)
            assert "ready" in self.waiting.stdout.readline()
        if first > 0:
            agent = self.waiting
            agent.stdin.write("go\n")
            agent.stdin.flush()
        else:
            agent = self.agent(kind, number, first, last, turn, pause, behind)
        ended = json.loads(agent.stdout.readline())
        peak = self.high_water(sessiond) if sessiond else None
        if pause:
            time.sleep(2)
            peak = self.high_water(sessiond) if sessiond else None
            agent.kill()
            if sessiond:
                sessiond.kill()
            ended = {"written": ended["paused"], "dropped": [], "kib": None}
        elif sessiond:
            sessiond.send_signal(signal.SIGTERM)
        agent.wait()
        if sessiond:
            code = sessiond.wait(60)
            assert pause or code == 0, (self.work / "sessiond.log").read_text()
            ended["kib"] = peak
        return ended

    def high_water(self, process) -> int:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

    def load(self, kind: str):
        """Loads the session in a new container; returns the entries and the number of requests."""
        if kind == "sidecar":
            self.proxy.begin(None)
            copy = self.work / "copy"
            assert self.start_sessiond("pull", SESSION, "--to", copy, stdout=subprocess.DEVNULL).wait() == 0, "pull failed"
            lines = (copy / f"projects/{PROJECT}/{SESSION}.jsonl").read_text().splitlines()
            return [json.loads(line)["n"] for line in lines], self.proxy.requests
        server, address = self.serve(self.work / "root-load") if kind == "serve" else (None, self.address)
        self.proxy.begin(None)
        loading = self.drive("load", kind, "--address", address)
        numbers = json.loads(loading.stdout.readline())["numbers"]
        requests = self.proxy.requests
        loading.wait()
        if server:
            server.terminate()
            server.wait()
        return numbers, requests


FAULTS = [
    ("No fault", {}),
    ("Lost response: the third write succeeds, but the connection breaks", {"fault": "lost"}),
    ("Three 503 responses in a row, starting with the third write", {"fault": "503"}),
    ("Power loss during a turn, two seconds after entry 205 of 300", {"pause": 205}),
    ("Resumed after 150 entries on a machine whose clock is 2 s behind", {"processes": ((0, 150), (150, 300)), "behind": "-2s"}),
    ("1,500 appends of one entry each, then a load", {"processes": ((0, 1500),), "turn": 1}),
]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sessiond", default=str(TREE / "target/dist/sessiond"))
    parser.add_argument("--out", default=str(TREE / "docs/explanation/comparison.md"))
    args = parser.parse_args()
    found = tools()
    version = subprocess.run([args.sessiond, "--version"], check=True, capture_output=True, text=True).stdout.strip()
    tables = []
    with lab.seaweedfs(found["weed"]) as port:
        bench = Bench(found, args.sessiond, port)
        for name, how in FAULTS:
            if "behind" in how and not found["clock"]:
                tables.append((name, None))
                continue
            rows = {}
            for kind, system in SYSTEMS.items():
                rows[system] = bench.run(kind, **how)
                print(name, "|", system, "|", rows[system], flush=True)
            tables.append((name, rows))
    build = next((name for name in ("dist", "release") if f"/{name}/" in args.sessiond), "debug")
    Path(args.out).write_text(document(tables, found["sdk"], version, build))


def document(tables, sdk: str, version: str, build: str) -> str:
    boto = next(line for line in (HERE / "requirements.txt").read_text().splitlines() if line.startswith("boto3"))
    lines = [
        "# Comparison with the Agent SDK's S3 store",
        "",
        "`benches/compare/run.py` generates this page. Run it to measure your own machine. It sends the same",
        "conversation through three setups. The conversation consists of SDK entries of about 1 KB, ten per",
        "turn; every tenth entry is a title without an ID. The setups use the same S3 server (SeaweedFS)",
        "behind the same proxy, under the same faults. On this page, an *entry* is a transcript entry of the",
        "SDK, not an entry of the session log.",
        "",
        f"- **{SYSTEMS['s3']}**: {sdk} from PyPI with its reference adapter",
        f"  `s3_session_store.py`, unmodified, {boto} with its defaults. The SDK's own batcher sends",
        "  the entries at the end of a turn.",
        f"- **{SYSTEMS['serve']}**: the same batcher, with the adapter in",
        "  `examples/session-store-py`.",
        f"- **{SYSTEMS['sidecar']}**: the agent appends an entry to its file every 20",
        "  ms and does not know about sessiond.",
        "",
        f"{version} ({build} build), Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores, {time.strftime('%Y-%m-%d', time.gmtime())}.",
        "",
        "| column | meaning |",
        "|---|---|",
        "| lost | entries that the agent had written and that a load does not return |",
        "| duplicated | entries that a load returns more than once |",
        "| out of order | entries that a load returns after a later entry |",
        "| batches dropped | batches that the SDK gave up on |",
        "| objects | objects of the session at the end, before garbage collection |",
        "| requests to load | requests that a load in a new container sends |",
        "| peak MiB | peak memory of sessiond; for the adapter, growth of the agent's process |",
    ]
    for name, rows in tables:
        lines += ["", f"## {name}", ""]
        if rows is None:
            lines.append("Not run: libfaketime could not be fetched.")
            continue
        heads = list(next(iter(rows.values())))
        lines += ["| | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
        lines += [f"| {system} | " + " | ".join(str(value) for value in row.values()) + " |" for system, row in rows.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
