"""Memory: idle, while it streams, while it restores, and with many sessions."""

import time

import lab
from figures import Figure, Measured, mb, plain
from rows import restore
from rows.many import ten_thousand

MEGABYTES = {True: 12, False: 100}


def idle(bench) -> tuple[int, int]:
    """Resident and proportional, in KiB, ten seconds after the last flush."""
    with bench.directory("idle") as directory:
        kept = lab.Sessiond(bench.program, directory, f"s3://{bench.bucket()}/kept?endpoint=http://127.0.0.1:{bench.s3_port}")
        kept.transcript(restore.SESSION).write_bytes(b"".join(restore.Transcript(restore.SESSION).bytes(20_000)))
        with kept.daemon() as daemon:
            kept.flush()
            time.sleep(3 if bench.short else 10)
            found = daemon.status("VmRSS"), daemon.pss_kib()
            daemon.stop()
    return found


def measure(bench) -> Measured:
    megabytes = MEGABYTES[bench.short]
    rss, pss = idle(bench)
    one = restore.stored(bench, megabytes)
    with bench.directory("memory") as directory:
        restoring = max(restore.restore(bench, one, bench.s3_port, directory / "a").high_kib for _ in range(3))
    many = ten_thousand(bench)
    with many.kept.daemon(timeout=120) as daemon:
        time.sleep(2)
        watching, high = daemon.status("VmRSS"), daemon.status("VmHWM")
        daemon.stop()
    count = f"{many.count:,}"
    figures = [
        Figure("memory", "idle", mb(rss), "MB", f"{plain(mb(rss))} MB resident", f"{plain(mb(pss))} MB proportional (PSS)", 15, "15 MB"),
        Figure("memory", f"streaming {megabytes} MB", mb(one.peak_kib), "MB", f"{plain(mb(one.peak_kib))} MB peak", "–", 40, "40 MB"),
        Figure("memory", f"restoring {megabytes} MB", mb(restoring), "MB", f"{plain(mb(restoring))} MB peak", "–", 64, "64 MB"),
        Figure(
            "memory",
            f"{count} sessions watched",
            mb(watching),
            "MB",
            f"{plain(mb(watching))} MB resident, {plain(mb(high))} MB peak",
            "–",
            60,
            "60 MB",
        ),
    ]
    return Measured(figures)
