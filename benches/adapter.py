"""Appends to the Agent SDK's reference S3 adapter, one call each, and records the time of each. Run by rows/append.py."""

import asyncio
import json
import sys
import time
from pathlib import Path

import boto3
from s3_session_store import S3SessionStore


async def main(address: str, bucket: str, given: str, into: str) -> None:
    client = boto3.client("s3", endpoint_url=address, region_name="us-east-1")
    store = S3SessionStore(bucket=bucket, prefix="mirror", client=client)
    appends = [[json.loads(line) for line in piece.splitlines()] for piece in json.loads(Path(given).read_text())]
    key = {"project_key": "-work-app", "session_id": "3f2a0000-0000-4000-8000-000000000001"}
    await store.append(key, appends[0])
    took, before = [], time.process_time()
    for entries in appends:
        began = time.perf_counter()
        await store.append(key, entries)
        took.append(time.perf_counter() - began)
    Path(into).write_text(json.dumps({"took": took, "cpu": time.process_time() - before}))


asyncio.run(main(*sys.argv[1:]))
