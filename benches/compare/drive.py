"""One agent process: writes a conversation and mirrors it with the Agent SDK's own batcher, or only writes its file.

Run by run.py. Prints one JSON line when it has paused or ended.
"""

import argparse
import asyncio
import json
import random
import resource
import select
import sys
import time
import uuid

SESSION = "3f2a0000-0000-4000-8000-000000000001"
PROJECT = "-work-app"


def entry(number: int) -> dict:
    """A kilobyte of text, the same in every run; every tenth entry is a title, which has no id."""
    if number % 10 == 9:
        return {"type": "custom-title", "customTitle": f"title {number}", "sessionId": SESSION, "n": number}
    rng = random.Random(number)
    text = " ".join("".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 9))) for _ in range(150))
    own_id = str(uuid.UUID(int=number, version=4))
    message = {"role": "user", "content": text}
    return {"type": "user", "uuid": own_id, "sessionId": SESSION, "cwd": "/work/app", "timestamp": "2026-01-02T03:04:05Z", "message": message, "n": number}


def make_store(args):
    if args.kind == "serve":
        from sessiond_store import SessiondStore

        return SessiondStore(args.address)
    import boto3
    from s3_session_store import S3SessionStore

    bucket = args.bucket
    return S3SessionStore(bucket=bucket, prefix="mirror", client=boto3.client("s3", endpoint_url=args.address, region_name="us-east-1"))


def kib(which: int = resource.RUSAGE_SELF) -> int:
    return resource.getrusage(which).ru_maxrss


def report(**fields) -> None:
    print(json.dumps(fields), flush=True)


async def mirror(args) -> None:
    from claude_agent_sdk._internal.transcript_mirror_batcher import TranscriptMirrorBatcher

    store = make_store(args)
    key = {"project_key": PROJECT, "session_id": SESSION}
    if args.first > 0:
        # Waits with everything loaded until the previous process has ended, as in a pool of containers.
        report(ready=True)
        sys.stdin.readline()
        # As a resume does.
        await store.load(key)
    dropped = []

    async def on_error(_key, message):
        dropped.append(message)

    batcher = TranscriptMirrorBatcher(store=store, projects_dir="/p", on_error=on_error)
    before = kib()
    for number in range(args.first, args.last):
        batcher.enqueue(f"/p/{PROJECT}/{SESSION}.jsonl", [entry(number)])
        if number + 1 == args.pause:
            report(paused=number + 1)
            await asyncio.sleep(3600)
        if args.turn == 1 or (number + 1) % args.turn == 0:
            await batcher.flush()
    await batcher.close()
    report(written=args.last, dropped=dropped, kib=kib() - before)


def write(args) -> None:
    if args.first > 0:
        report(ready=True)
        sys.stdin.readline()
    for number in range(args.first, args.last):
        with open(args.file, "a") as file:
            file.write(json.dumps(entry(number)) + "\n")
        if number + 1 == args.pause:
            report(paused=number + 1)
            time.sleep(3600)
        # Not time.sleep, which a changed clock breaks.
        select.select([], [], [], 0.02)
    report(written=args.last, dropped=[], kib=0)


async def load(args) -> None:
    entries = await make_store(args).load({"project_key": PROJECT, "session_id": SESSION})
    report(numbers=[entry["n"] for entry in entries or []])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["write", "load"])
    parser.add_argument("kind", choices=["s3", "serve", "sidecar"])
    for name in ("address", "bucket", "file"):
        parser.add_argument(f"--{name}")
    for name in ("first", "last", "turn", "pause"):
        parser.add_argument(f"--{name}", type=int, default=0)
    args = parser.parse_args(sys.argv[1:])
    if args.what == "load":
        asyncio.run(load(args))
    elif args.kind == "sidecar":
        write(args)
    else:
        asyncio.run(mirror(args))


if __name__ == "__main__":
    main()
