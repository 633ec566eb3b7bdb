#!/bin/bash

# What a change must pass, on a CPU: targets of the Makefile. The tests that measure waiting run
# alone; then two lanes run side by side, because ranks wait for one another half of the time.
#
#   launch/ci/check.sh                         # all that is in TARGETS
#   launch/ci/check.sh lint check              # some of them
#   PYTHON=python3.12 launch/ci/check.sh test-versions
#
# All targets run, also after one that failed. The table at the end goes to the terminal and, on
# GitHub, to the job's summary. Exit status 1 if a target failed.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

FOLDER=$(mktemp -d)
trap 'rm -rf "$FOLDER"' EXIT

# Run targets one after the other; one line for each into the file of the lane.
lane() {
    local name=$1 target begun result
    for target in "${@:2}"; do
        begun=$SECONDS
        result=passed
        make "$target" || result=FAILED
        echo "| make $target | $result | $((SECONDS - begun)) s |" >>"$FOLDER/$name"
    done
}

if (($#)); then
    lane 1 "$@"
else
    lane 1 lint test
    lane 2 test-launch docs >"$FOLDER/printed" 2>&1 &
    lane 3 wrong-factors test-versions test-frameworks
    wait
    cat "$FOLDER/printed"
fi

{ printf '%s\n' '| target | result | time |' '|---|---|---|'; cat "$FOLDER"/[123]; } |
    tee -a "${GITHUB_STEP_SUMMARY:-/dev/null}"
! grep -q FAILED "$FOLDER"/[123]
