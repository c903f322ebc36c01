#!/bin/sh
# Container entrypoint: restore the session, stream it, run the agent, flush after it has exited.
# Arguments: your ID of the job, then the agent's command. The same command starts and restarts a job.
#   entrypoint.sh job-7 claude '{session-args}' -p "$PROMPT"
# SESSIOND_STORE and SESSIOND_INDEX select the store and the index; the default is a directory below HOME.
set -eu
job=$1
shift
exec sessiond run --request "$job" -- "$@"
