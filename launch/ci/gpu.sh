#!/bin/bash

# `make gpu` on this node, and its result in the job's summary.
#
#   launch/ci/gpu.sh
#   OUT=/shared/gpu PYTHON=/opt/venv/bin/python launch/ci/gpu.sh
#   DEVICE=cpu launch/ci/gpu.sh        # what of it needs no GPU: tries this script, measures nothing
#
# Writes gpu.json, summary.md and the logs to $OUT, by default runs/gpu.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

export OUT=${OUT:-$PWD/runs/gpu}
export PYTHON=${PYTHON:-python3}

rm -f "$OUT/summary.md" # of an earlier run
STATUS=0
make gpu || STATUS=$?

if [[ -f $OUT/summary.md ]]; then
    cat "$OUT/summary.md" >>"${GITHUB_STEP_SUMMARY:-/dev/null}"
else
    echo "make gpu ended with status $STATUS before it had a result" |
        tee -a "${GITHUB_STEP_SUMMARY:-/dev/null}"
fi
exit "$STATUS"
