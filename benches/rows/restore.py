"""Restore a session that was streamed in steps: against the limit of the machine, compared with tools, and with added latency."""

import gzip
import hashlib
import re
import shutil
import urllib.parse
from dataclasses import dataclass
from pathlib import Path

import lab
import rivals
from figures import Figure, Measured, ms, plain
from proxy import Proxy
from transcripts import Transcript

# Maximum number of waves in the report.
MAX_WAVES = 14
SESSION = "5e550000-0000-4000-8000-000000000001"
# Megabytes, and the bytes between two flushes: hundreds of entries, with their merges and snapshots.
STEPS = {0.02: 4 << 10, 0.3: 16 << 10, 2: 16 << 10, 1: 4 << 10, 12: 16 << 10, 100: 128 << 10}
# The small sessions, which most are: megabytes, the name, and the factor over the limit to reach.
SMALL = {0.02: ("20 KB", 1.5), 0.3: ("300 KB", 1.5), 2: ("2 MB", 1.2)}
# The limit: a shell pipeline that fetches, unpacks, writes and hashes one object.
SIGNED = 'curl -sSf --aws-sigv4 aws:amz:us-east-1:s3 --user "$AWS_ACCESS_KEY_ID:$AWS_SECRET_ACCESS_KEY" "$1"'
LIMIT = f'set -eo pipefail; {SIGNED} | gunzip | tee "$2" | sha256sum > "$2.sum"'


@dataclass
class Stored:
    """A session in a bucket, and the same bytes as one gzip object beside it."""

    bucket: str
    size: int
    digest: str
    objects: dict[str, int]
    peak_kib: int
    step: int


def stored(bench, megabytes: int) -> Stored:
    return bench.once(f"session-{megabytes}", lambda: stream(bench, megabytes))


def stream(bench, megabytes: float, index: str | None = None) -> Stored:
    """Streams a session in steps, as an agent writes it, and waits until compaction is done."""
    bucket, step = bench.bucket(), STEPS[megabytes] * (4 if bench.short and megabytes in (1, 12, 100) else 1)
    with bench.directory("stream") as directory:
        kept = lab.Sessiond(bench.program, directory, f"s3://{bucket}/kept?endpoint=http://127.0.0.1:{bench.s3_port}", index)
        path, pending = kept.transcript(SESSION), []
        with kept.daemon() as daemon, open(path, "ab", buffering=0) as file:
            for line in Transcript(SESSION, max(1, int(megabytes))).bytes(int(megabytes * 1_000_000)):
                pending.append(line)
                if sum(map(len, pending)) >= step:
                    file.write(b"".join(pending))
                    pending.clear()
                    kept.flush(SESSION)
            file.write(b"".join(pending))
            kept.flush(SESSION)
            daemon.wait_until_idle()
            peak = daemon.status("VmHWM")
            daemon.stop()
        content = path.read_bytes()
    client = lab.S3(bench.s3_port)
    client.put(bucket, "whole.jsonl.gz", gzip.compress(content, 6))
    return Stored(bucket, len(content), hashlib.sha256(content).hexdigest(), client.sizes(bucket, "kept/v1/default/"), peak, step)


def restore(bench, one: Stored, port: int, directory: Path, check: bool = True, index: str | None = None) -> lab.Process:
    """Restores in a new container: no ledger, no files, and a new index if none is given."""
    shutil.rmtree(directory, ignore_errors=True)
    fresh = lab.Sessiond(bench.program, directory, f"s3://{one.bucket}/kept?endpoint=http://127.0.0.1:{port}", index)
    done = fresh.call("restore", SESSION)
    # Deletes its claim, so that every restore finds the same objects.
    client = lab.S3(bench.s3_port)
    for key in client.sizes(one.bucket, "kept/v1/default/").keys() - one.objects.keys():
        client.request("DELETE", f"/{one.bucket}/{key}")
    if check:
        digest = hashlib.sha256(fresh.transcript(SESSION).read_bytes()).hexdigest()
        assert digest == one.digest, f"{one.size} bytes were restored as something else"
    return done


def limit(bench, one: Stored, port: int, directory: Path) -> lab.Process:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    done = lab.Process(["bash", "-c", LIMIT, "limit", f"http://127.0.0.1:{port}/{one.bucket}/whole.jsonl.gz", directory / "out"], directory).finish()
    assert (directory / "out.sum").read_text().startswith(one.digest)
    return done


def measure(bench) -> Measured:
    figures, texts = [], []
    for megabytes in [1, 12] if bench.short else [1, 12, 100]:
        one, times = stored(bench, megabytes), {"sessiond": [], "limit": []}
        with bench.directory("restore") as directory:
            others = []
            for kind in [] if bench.short else rivals.all_of(bench):
                rival, kept = kind(bench, directory, bench.s3_port), directory / f"kept-{kind.__name__}"
                kept.mkdir()
                (kept / f"{SESSION}.jsonl").write_bytes(gzip.decompress(lab.S3(bench.s3_port).get(one.bucket, "whole.jsonl.gz")))
                rival.prepare(kept)
                rival.sync(kept)
                others.append((rival, kept))
                times[kind.fetches] = []
            runs = 5 if bench.short else 15 if megabytes < 100 else 9
            for run in range(runs):
                times["sessiond"].append(restore(bench, one, bench.s3_port, directory / "a").took)
                times["limit"].append(limit(bench, one, bench.s3_port, directory / "b").took)
                for rival, kept in others if run < 5 else []:
                    into = directory / "c"
                    times[rival.fetches].append(rival.fetch(into, kept).took)
                    shutil.rmtree(into)
        taken = {name: lab.median(some) for name, some in times.items()}
        ours, least = taken.pop("sessiond"), taken.pop("limit")
        bound = (1.3, "at most 1.3 × the limit") if megabytes > 1 else (None, "–")
        figures.append(
            Figure("restore", f"{megabytes} MB", ours / least, "×", ms(ours), f"{ms(least)}: curl, gunzip and sha256sum of one object", *bound)
        )
        if taken:
            name, best = min(taken.items(), key=lambda pair: pair[1])
            all_of_them = ", ".join(f"{tool} {ms(took)}" for tool, took in taken.items())
            figures.append(Figure("restore", f"{megabytes} MB, compared with tools", ours / best, "×", ms(ours), all_of_them, 1, "faster than every tool"))
        kinds = {kind: [size for key, size in one.objects.items() if f"/{kind}/" in key] for kind in ("log", "merge", "snap")}
        made = ", ".join(f"{len(sizes)} in {kind}/ ({plain(sum(sizes) / 1e6)} MB)" for kind, sizes in kinds.items())
        texts.append(
            f"- {megabytes} MB, flushed after every {one.step >> 10} KiB: objects {made}; {runs} alternating runs of sessiond and of the limit."
        )
    return Measured(figures, ["\n".join(texts)])


def measure_small(bench) -> Measured:
    """Restores small sessions with the index in PostgreSQL, as a container does that starts on another machine."""
    figures = []
    with lab.postgres() as (port, _):
        for megabytes, (name, factor) in SMALL.items():
            database = f"small_{name.replace(' ', '_').lower()}"
            lab.psql(port, f"CREATE DATABASE {database}")
            index = f"postgres://postgres@127.0.0.1:{port}/{database}"
            one, times = stream(bench, megabytes, index), {"sessiond": [], "limit": []}
            head = int(lab.psql(port, "SELECT max(head) FROM sessions", database).stdout)
            with bench.directory("small") as directory:
                for run in range(12 if bench.short else 42):
                    ours = restore(bench, one, bench.s3_port, directory / "a", index=index).took
                    least = limit(bench, one, bench.s3_port, directory / "b").took
                    # Every restore records its claim: the entry is removed as the restore removes it from the bucket.
                    rows = lab.psql(port, f"DELETE FROM entries WHERE seq > {head} RETURNING seq; UPDATE sessions SET head = {head} WHERE head > {head}", database)
                    assert rows.stdout.split() == [str(head + 1)], f"the index has these claims: {rows.stdout.split()}"
                    if run > 1:
                        times["sessiond"].append(ours)
                        times["limit"].append(least)
            ours, least = (lab.median(times[which]) for which in ("sessiond", "limit"))
            figures.append(
                Figure(
                    "small",
                    name,
                    ours / least,
                    "×",
                    ms(ours),
                    f"{ms(least)}: curl, gunzip and sha256sum of one object",
                    factor,
                    f"at most {factor} × the limit",
                )
            )
    return Measured(figures)


def waves(proxy: Proxy) -> str:
    """Lists the requests in waves: a wave starts only after a request of the previous one has ended."""
    seen = sorted((began, ended, method, target) for method, target, _, _, began, ended in list(proxy.seen))
    lines, edge = [], 0.0
    for began, ended, method, target in seen:
        if began >= edge:
            lines.append([])
            edge = ended
        edge = min(edge, ended)
        path, _, query = target.partition("?")
        listed = urllib.parse.parse_qs(query).get("prefix")
        words = (f"list {listed[0]}" if listed else f"{method} {path}").replace(SESSION, "ID")
        lines[-1].append(re.sub(r"(/[^ ]*)?kept/v1/(default/claude-code/)?", "", words))
    lines_of_waves = [f"{number}. {len(wave)} at once: {', '.join(wave[:3])}{' …' if len(wave) > 3 else ''}" for number, wave in enumerate(lines, 1)]
    return "\n".join(lines_of_waves[:MAX_WAVES] + [f"\n… {len(lines_of_waves)} in total, one after the other."] * (len(lines_of_waves) > MAX_WAVES))


def measure_latency(bench) -> Measured:
    figures, texts, proxy = [], [], bench.proxy()
    for megabytes in [12] if bench.short else [1, 12, 100]:
        one = stored(bench, megabytes)
        with bench.directory("latency") as directory:
            times = {0: [], 20: [], 50: []}
            for _ in range(3 if bench.short else 7):
                for delay in times:
                    proxy.reset()
                    proxy.delay = delay / 1000
                    times[delay].append(restore(bench, one, proxy.port, directory / "a", check=False).took)
            proxy.reset()
            proxy.delay = 0.05
            far = limit(bench, one, proxy.port, directory / "b").took
            proxy.reset()
            restore(bench, one, proxy.port, directory / "a")
        # The minimum of each: other load on the machine only adds time, also to the difference.
        taken = {delay: min(some) for delay, some in times.items()}
        for delay in (20, 50):
            depth = (taken[delay] - taken[0]) / (delay / 1000)
            against = f"{ms(taken[0])} without delay" + (f"; curl of one object {ms(far)}" if delay == 50 else "")
            figures.append(
                Figure(
                    "latency",
                    f"{megabytes} MB, {delay} ms",
                    depth,
                    "round trips",
                    ms(taken[delay]),
                    against,
                    4,
                    "at most 4 sequential round trips",
                    noise=4,
                )
            )
        texts.append(
            f"{megabytes} MB, {len(times[0])} runs with each delay; the requests of one restore with 50 ms added ({proxy.requests} in total):\n\n{waves(proxy)}"
        )
    return Measured(figures, texts)
