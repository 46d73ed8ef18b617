#!/bin/sh
# vLLM with the taps that the policies at GUARD_POLICY need for MODEL; arguments go to vLLM.
set -eu
probes=$(mktemp -d)
taps=$(guard taps --model "$MODEL" --policy "$GUARD_POLICY" --probes "$probes")
exec vllm serve "$MODEL" --host 0.0.0.0 --port 8000 \
  --additional-config "$taps" --middleware guard.mia.server.MiaMiddleware --disable-uvicorn-access-log "$@"
