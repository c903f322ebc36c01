# syntax=docker/dockerfile:1
# An agent's image with sessiond as its entrypoint: restore, stream, launch the agent, flush.
#   docker build -f deploy/Dockerfile -t sessiond .
#   docker build -f deploy/agent.Dockerfile -t agent deploy
#   docker run --rm -e SESSIOND_STORE -e SESSIOND_INDEX -e ANTHROPIC_API_KEY agent \
#     run --request "$JOB" -- claude {session-args} -p "$PROMPT"
ARG SESSIOND=sessiond:latest

# hadolint ignore=DL3006
FROM ${SESSIOND} AS sessiond

FROM node:22-bookworm-slim
RUN npm install --global @anthropic-ai/claude-code@2.1.197 \
    && npm cache clean --force
COPY --from=sessiond /usr/local/bin/sessiond /usr/local/bin/sessiond
# The user `node` of the base image.
USER 1000:1000
WORKDIR /home/node
STOPSIGNAL SIGTERM
ENTRYPOINT ["/usr/local/bin/sessiond"]
CMD ["run", "--", "claude", "--version"]
