"""Measures sessiond against alternatives and against the limits of the machine; prints a table and writes docs/explanation/benchmarks.md.

See README.md beside this file. Every figure in that document comes from the run that wrote it.
"""

import argparse
import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.dont_write_bytecode = True
import lab  # noqa: E402
import report  # noqa: E402
from figures import Measured  # noqa: E402
from proxy import Proxy  # noqa: E402
from rows import append, fleet, heavy, idle, index, index_load, memory, restore, size, start, stop  # noqa: E402

ROWS = {
    "append": append.measure,
    "restore": restore.measure,
    "small": restore.measure_small,
    "latency": restore.measure_latency,
    "memory": memory.measure,
    "heavy": heavy.measure,
    "idle": idle.measure,
    "start": start.measure,
    "stop": stop.measure,
    "fleet": fleet.measure,
    "index": index.measure,
    "index load": index_load.measure,
    "size": size.measure,
}
# The factor by which a row may be worse than expected.
WORSE = 1.5


class Bench:
    """The environment of a row: the program, the S3 server, directories and buckets."""

    def __init__(self, program: Path, s3_port: int, work: Path, short: bool, rustic: Path | None) -> None:
        self.program, self.s3_port, self.work, self.short, self.rustic = program, s3_port, work, short, rustic
        self.shared: dict = {}
        self.buckets, self.proxies = 0, []

    def bucket(self) -> str:
        self.buckets += 1
        name = f"bench-{self.buckets}"
        client = lab.S3(self.s3_port)
        client.make_bucket(name)
        # The first object of a bucket is slow.
        client.put(name, "first", b"x")
        return name

    def proxy(self) -> Proxy:
        """Returns a proxy in front of the S3 server."""
        self.proxies.append(Proxy(self.s3_port))
        return self.proxies[-1]

    @contextlib.contextmanager
    def directory(self, name: str):
        """Creates an empty directory and removes it afterwards."""
        path = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.work))
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def once(self, name: str, make):
        """Creates a value that several rows share, at its first use."""
        if name not in self.shared:
            self.shared[name] = make()
        return self.shared[name]


def build(short: bool) -> Path:
    """Returns the distributed build; in the short form the test build, which CI has: a regression shows in both."""
    subprocess.run(["cargo", "build", "--locked", *([] if short else ["--profile", "dist"])], cwd=lab.TREE, check=True)
    target = Path(os.environ.get("CARGO_TARGET_DIR", lab.TREE / "target"))
    return (lab.TREE / target / ("debug" if short else "dist") / "sessiond").resolve()


def measure(bench: Bench, names: list[str]) -> tuple[dict[str, Measured], dict[str, str]]:
    """Runs the rows; returns the results, and the errors of failed rows."""
    found, failed = {}, {}
    for name in names:
        began = time.monotonic()
        try:
            found[name] = ROWS[name](bench)
        except Exception as cause:
            traceback.print_exc()
            failed[name] = f"{type(cause).__name__}: {cause}".splitlines()[0][:300]
        took = time.monotonic() - began
        print(f"{name}: {took:.0f} s", file=sys.stderr)
        for figure in found[name].figures if name in found else []:
            print("   ", " | ".join([figure.what, figure.ours, figure.against, figure.shown(), figure.verdict()]), file=sys.stderr, flush=True)
    return found, failed


def regressions(found: dict[str, Measured], expected: dict) -> list[str]:
    """Returns the ratios that are worse by half than expected."""
    worse = []
    for figure in (figure for row in found.values() for figure in row.figures):
        was = expected.get(figure.key)
        if was is not None and figure.value > max(was * WORSE, figure.noise):
            worse.append(f"{figure.key}: was {was:g} {figure.unit}, is {figure.value:g} {figure.unit} ({figure.ours}; {figure.against})")
    return worse


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", type=Path, help="measure this program instead of building one")
    parser.add_argument(
        "--short", action="store_true", help="what CI runs: less of everything, and exit 1 where a ratio is worse by half than in expected.json"
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=list(ROWS),
        metavar="ROW",
        help=f"one row ({', '.join(ROWS)}); several times for several. No document is written",
    )
    parser.add_argument("--accept", action="store_true", help="write the ratios of this run to expected.json instead of comparing them")
    parser.add_argument("--rustic", type=Path, help="a rustic program to measure too (building one takes ten minutes)")
    parser.add_argument("--out", type=Path, default=lab.TREE / "docs/explanation/benchmarks.md")
    args = parser.parse_args()
    if args.binary and not os.access(args.binary, os.X_OK):
        parser.error(f"--binary {args.binary}: there is no such program")
    expected_path = lab.HERE / "expected.json"
    expected = json.loads(expected_path.read_text()) if expected_path.exists() else {}
    form = "short" if args.short else "full"
    if args.short and not args.only and not args.accept and form not in expected:
        parser.error(f"there is nothing to compare with in {expected_path}: --short --accept writes it")
    program = args.binary.resolve() if args.binary else build(args.short)
    lab.TOOLS.mkdir(parents=True, exist_ok=True)
    names = args.only or list(ROWS)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bench-work-", dir=lab.TOOLS.parent) as work, lab.seaweedfs(lab.weed()) as s3_port:
        bench = Bench(program, s3_port, Path(work), args.short, args.rustic)
        found, failed = measure(bench, names)
        worse = [] if args.accept else regressions(found, expected.get(form, {}))
        if worse:
            # A busy machine must not cause a failure: only a row that is worse twice fails.
            again = [name for name in names if any(line.startswith(f"{name}: ") for line in worse)]
            print("worse than expected, measured again: " + ", ".join(again), file=sys.stderr)
            second, failed_again = measure(bench, again)
            found, failed = {**found, **second}, {**failed, **failed_again}
            worse = regressions(second, expected.get(form, {}))
        for proxy in bench.proxies:
            proxy.close()
    if args.accept:
        accepted = {figure.key: round(figure.value, 4) for row in found.values() for figure in row.figures}
        expected[form] = {**expected.get(form, {}), **accepted}
        expected_path.write_text(json.dumps(expected, indent=2, ensure_ascii=False) + "\n")
    version = subprocess.run([program, "--version"], check=True, capture_output=True, text=True).stdout.strip()
    machine = (
        f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()} {platform.release().split('-')[0]}, Python {platform.python_version()}"
    )
    head = f"{version}, {machine}, {time.strftime('%Y-%m-%d', time.gmtime())}; total run time {(time.monotonic() - began) / 60:.0f} minutes."
    print(report.table(found, failed))
    if args.only:
        print(*("\n" + text for row in found.values() for text in row.texts), sep="\n")
    if not args.only and not args.short:
        args.out.write_text(report.document(found, failed, head))
    for line in worse:
        print(f"worse by half: {line}", file=sys.stderr)
    for name, why in failed.items():
        print(f"not measured: {name}: {why}", file=sys.stderr)
    return 1 if worse or failed else 0


if __name__ == "__main__":
    sys.exit(main())
