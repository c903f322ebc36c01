#!/bin/sh
# Two processes on one directory, as two containers of a pod: sessiond beside an agent that knows nothing of it.
#   sidecar.sh 3f2a… claude --resume 3f2a…
# SESSIOND_STORE and SESSIOND_INDEX say where sessions are kept; without them a directory below HOME is used.
set -eu
session=$1
shift

# The init step: the agent's files are back, and checked, before anything else starts. The first time there is nothing to restore.
sessiond restore "$session" --if-exists

# The sidecar. It adopts what the restore left, so it is the same writer.
ready=$(mktemp -u)
sessiond daemon --ready-file "$ready" &
daemon=$!
trap 'kill -TERM "$daemon" 2> /dev/null || true' EXIT
until [ -e "$ready" ]; do
    kill -0 "$daemon" # or the script ends here: it says why on stderr
    sleep 0.1
done

# The agent. A signal is passed on; the agent may write once more before it ends.
"$@" &
agent=$!
trap 'kill -TERM "$agent" 2> /dev/null || true' TERM INT
code=0
wait "$agent" || code=$?
# A signal interrupts the wait before the agent has ended.
while kill -0 "$agent" 2> /dev/null; do
    code=0
    wait "$agent" || code=$?
done

# Only then the final flush: SIGTERM to the daemon, which ends when all is durable, or with 9 when it gave up.
trap - EXIT
kill -TERM "$daemon"
wait "$daemon"
exit "$code"
