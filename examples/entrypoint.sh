#!/bin/sh
# A container's entrypoint: bring the session back, stream it, run the agent, flush when it has exited.
# Give it the session's id and the agent's command:
#   entrypoint.sh 3f2a… claude --resume 3f2a…
# SESSIOND_STORE and SESSIOND_INDEX say where sessions are kept; without them a directory below HOME is used.
set -eu
session=$1
shift
exec sessiond run --session "$session" -- "$@"
