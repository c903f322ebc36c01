#!/bin/sh
# Sidecar: sessiond and an unmodified agent as two processes on one directory, like two containers of a pod.
#   sidecar.sh 3f2a… claude --resume 3f2a…
# SESSIOND_STORE and SESSIOND_INDEX select the store and the index; the default is a directory below HOME.
set -eu
session=$1
shift

# Init step: restore and verify the agent's files before anything else starts. The first start has nothing to restore.
sessiond restore "$session" --if-exists

# Sidecar: the daemon finds the ledger that the restore wrote, and continues as the same writer.
ready=$(mktemp -u)
sessiond daemon --ready-file "$ready" &
daemon=$!
trap 'kill -TERM "$daemon" 2> /dev/null || true' EXIT
until [ -e "$ready" ]; do
    kill -0 "$daemon" # the script ends here if the daemon has exited; its error is on stderr
    sleep 0.1
done

# Agent: forward signals to it. It may write once more before it exits.
"$@" &
agent=$!
trap 'kill -TERM "$agent" 2> /dev/null || true' TERM INT
code=0
wait "$agent" || code=$?
# A signal interrupts wait before the agent has exited.
while kill -0 "$agent" 2> /dev/null; do
    code=0
    wait "$agent" || code=$?
done

# Final flush, after the agent has exited: on SIGTERM the daemon exits with 0 once everything is durable, or with 9 at its deadline.
trap - EXIT
kill -TERM "$daemon"
wait "$daemon"
exit "$code"
