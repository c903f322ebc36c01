"""Start of the daemon when everything is stored already."""

import lab
from figures import Figure, Measured, ms, plain, plural
from rows.many import ten_thousand


def measure(bench) -> Measured:
    many = ten_thousand(bench)
    took, read, requests, cpu = [], [], [], []
    for _ in range(5):
        many.proxy.reset()
        with many.kept.daemon(timeout=120) as daemon:
            took.append(daemon.ready_after)
            read.append(daemon.io("rchar"))
            cpu.append(daemon.cpu_seconds())
            requests.append(many.proxy.requests)
            daemon.stop()
    start, share = lab.median(took), lab.median(read) / many.bytes
    limit = 2.0 * many.count / 10_000
    figures = [
        Figure(
            "start",
            f"daemon with {many.count:,} sessions",
            start,
            "s",
            f"{ms(start)} until ready, {ms(lab.median(cpu))} CPU",
            f"{plural(lab.median(requests), 'request')} to the store",
            limit,
            f"{plain(limit)} s",
            noise=limit,
        ),
        Figure(
            "start",
            "bytes read",
            share,
            "×",
            f"{plain(lab.median(read) / 1e6)} MB, including ledgers and libraries",
            f"{plain(many.bytes / 1e6)} MB in the transcripts",
            1,
            "does not read the transcripts",
        ),
    ]
    return Measured(figures, [f"The first upload of these sessions took {ms(many.took)}."])
