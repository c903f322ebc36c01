#!/bin/sh
# Container entrypoint: restore the session, stream it, run the agent, flush after it has exited.
# Arguments: the session ID, then the agent's command.
#   entrypoint.sh 3f2a… claude --resume 3f2a…
# SESSIOND_STORE and SESSIOND_INDEX select the store and the index; the default is a directory below HOME.
set -eu
session=$1
shift
exec sessiond run --session "$session" -- "$@"
