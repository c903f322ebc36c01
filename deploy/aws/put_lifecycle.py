#!/usr/bin/env python3
"""Adds the rules of lifecycle.json to a bucket and keeps its other rules.

put-bucket-lifecycle-configuration replaces all rules of a bucket, so this reads them first.

    deploy/aws/put_lifecycle.py BUCKET PREFIX [--dry-run] [--aws PROGRAM]

It needs the AWS CLI, s3:GetLifecycleConfiguration and s3:PutLifecycleConfiguration.
"""

import argparse
import json
import pathlib
import subprocess
import sys


def s3api(program: str, *arguments: str) -> subprocess.CompletedProcess:
    command = [program, "s3api", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def current_rules(program: str, bucket: str) -> list:
    """The rules of the bucket; none if it has no configuration."""
    got = s3api(program, "get-bucket-lifecycle-configuration", "--bucket", bucket)
    if got.returncode == 0:
        return json.loads(got.stdout or "{}").get("Rules", [])
    if "NoSuchLifecycleConfiguration" in got.stderr:
        return []
    sys.exit(f"cannot read the rules of {bucket}: {got.stderr.strip()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bucket")
    parser.add_argument("prefix", help="the path in s3://BUCKET/PREFIX")
    parser.add_argument("--dry-run", action="store_true", help="print the rules only")
    parser.add_argument("--aws", default="aws", help="the AWS CLI [default: aws]")
    options = parser.parse_args()
    text = pathlib.Path(__file__).with_name("lifecycle.json").read_text()
    ours = json.loads(text.replace("EXAMPLE-PREFIX", options.prefix.strip("/")))["Rules"]
    names = {rule["ID"] for rule in ours}
    rules = current_rules(options.aws, options.bucket)
    others = [rule for rule in rules if rule.get("ID") not in names]
    merged = json.dumps({"Rules": others + ours}, indent=2)
    print(merged)
    if options.dry_run:
        return
    put = s3api(
        options.aws,
        "put-bucket-lifecycle-configuration",
        "--bucket", options.bucket,
        "--lifecycle-configuration", merged,
    )
    if put.returncode != 0:
        sys.exit(f"cannot write the rules of {options.bucket}: {put.stderr.strip()}")


main()
