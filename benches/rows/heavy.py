"""Heavy sessions: memory with large files and with many files, and the delay of another session and of a probe."""

import http.client
import os
import re
import time
from pathlib import Path

import lab
from figures import Figure, Measured, mb, ms, plain

LIMIT_MB = 64


def sessiond(bench, directory: Path) -> lab.Sessiond:
    return lab.Sessiond(bench.program, directory, f"s3://{bench.bucket()}/kept?endpoint=http://127.0.0.1:{bench.s3_port}")


def results(kept: lab.Sessiond, session: str) -> Path:
    """Returns the directory for the side files of a session, which has a short transcript."""
    transcript = kept.transcript(session)
    transcript.write_text('{"type":"user"}\n')
    directory = transcript.with_suffix("") / "tool-results"
    directory.mkdir(parents=True)
    return directory


def above_idle(bench, write, sessions: list[str]) -> tuple[float, float]:
    """Uploads and restores what `write` writes. Returns the peaks of both in MB, less the memory of an idle daemon."""
    with bench.directory("heavy") as directory:
        kept = sessiond(bench, directory / "a")
        with kept.daemon() as daemon:
            kept.transcript("idle").write_text('{"type":"user"}\n')
            kept.flush()
            idle = daemon.status("VmRSS")
            for session in sessions:
                write(results(kept, session))
            kept.flush()
            uploading = daemon.status("VmHWM")
            daemon.stop()
        fresh = lab.Sessiond(bench.program, directory / "b", kept.extra["SESSIOND_STORE"])
        restoring = max(fresh.call("restore", session).high_kib for session in sessions)
    return mb(uploading - idle), mb(restoring - idle)


def write_noise(directory: Path, megabytes: int) -> None:
    with open(directory / "a.bin", "wb") as file:
        for _ in range(megabytes):
            file.write(os.urandom(1_000_000))


def write_files(directory: Path, count: int) -> None:
    for number in range(count):
        (directory / f"result-{number:06}.txt").write_text(str(number))


def delays(bench, gigabytes: int) -> tuple[float, float]:
    """Returns the longest flush of a session and the longest /healthz, in seconds, while four other sessions upload sparse files."""
    with bench.directory("delay") as directory:
        kept = sessiond(bench, directory)
        for number in range(4):
            with open(results(kept, f"heavy-{number}") / "a.bin", "wb") as file:
                file.truncate(gigabytes << 30)
        with kept.daemon() as daemon:
            port = int(re.search(r"address=127\.0\.0\.1:(\d+)", daemon.log.read_text()).group(1))
            flushes, probes = [], []
            for number in range(10):
                with open(kept.transcript("light"), "a") as file:
                    file.write(f'{{"type":"user","n":{number}}}\n')
                began = time.monotonic()
                kept.flush("light")
                flushes.append(time.monotonic() - began)
                began = time.monotonic()
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
                connection.request("GET", "/healthz")
                if connection.getresponse().status != 200:
                    raise RuntimeError("/healthz failed")
                probes.append(time.monotonic() - began)
                time.sleep(0.3)
    return max(flushes), max(probes)


def measure(bench) -> Measured:
    megabytes, count, gigabytes = (24, 10_000, 1) if bench.short else (100, 125_000, 3)
    eight = [f"heavy-{number}" for number in range(8)]
    cases = {
        f"a file of {megabytes} MB": above_idle(bench, lambda path: write_noise(path, megabytes), ["heavy"]),
        f"eight files of {megabytes} MB at once": above_idle(bench, lambda path: write_noise(path, megabytes), eight),
        f"{count:,} files": above_idle(bench, lambda path: write_files(path, count), ["heavy"]),
    }
    figures = []
    for what, (uploading, restoring) in cases.items():
        for verb, value in (("uploading", uploading), ("restoring", restoring)):
            figures.append(
                Figure("heavy", f"{verb} {what}", value, "MB", f"{plain(value)} MB above idle", "–", LIMIT_MB, f"{LIMIT_MB} MB", noise=LIMIT_MB)
            )
    flush, probe = delays(bench, gigabytes)
    heavy = f"while four sessions upload {gigabytes} GB"
    figures.append(Figure("heavy", f"flush of another session {heavy}", flush, "s", ms(flush), "–", 1, "1 s", noise=1))
    figures.append(Figure("heavy", f"/healthz {heavy}", probe, "s", ms(probe), "–", 1, "1 s", noise=1))
    return Measured(figures)
