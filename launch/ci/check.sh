#!/bin/bash

# What a change must pass, on a CPU: targets of the Makefile, one after the other.
#
#   launch/ci/check.sh                         # all that is in TARGETS
#   launch/ci/check.sh lint check              # some of them
#   PYTHON=python3.12 launch/ci/check.sh test-versions
#
# All targets run, also after one that failed. The table at the end goes to the terminal and, on
# GitHub, to the job's summary. Exit status 1 if a target failed.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

TARGETS=(lint test wrong-factors test-versions test-frameworks test-launch test-machine docs)
(($#)) || set -- "${TARGETS[@]}"

STATUS=0
ROWS=()
for TARGET in "$@"; do
    BEGUN=$SECONDS
    if make "$TARGET"; then
        RESULT=passed
    else
        RESULT=FAILED
        STATUS=1
    fi
    ROWS+=("| make $TARGET | $RESULT | $((SECONDS - BEGUN)) s |")
done

printf '%s\n' '| target | result | time |' '|---|---|---|' "${ROWS[@]}" |
    tee -a "${GITHUB_STEP_SUMMARY:-/dev/null}"
exit "$STATUS"
