#!/bin/bash

# What a change must pass, on a CPU: targets of the Makefile, one after the other. Of an exhaustive
# target (all wrong factors, releases, frameworks, launchers, Pythons) it runs the part that the
# commit draws; the scheduled workflow `full` runs all.
#
#   launch/ci/check.sh                         # all that is in TARGETS
#   launch/ci/check.sh lint check              # some of them
#   FULL=1 launch/ci/check.sh                  # nothing left out
#   SEED=1a2b3c launch/ci/check.sh wrong-factors   # the part that another commit drew
#   PYTHON=python3.12 launch/ci/check.sh test-versions
#
# All targets run, also after one that failed. The table at the end goes to the terminal and, on
# GitHub, to the job's summary. RAN, by default runs/ci.tsv, gets a line per target: date, commit,
# target, result, seconds, parts. Exit status 1 if a target failed.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

TARGETS=(lint test wrong-factors test-versions test-frameworks test-launch test-machine docs)
(($#)) || set -- "${TARGETS[@]}"
RAN=${RAN:-runs/ci.tsv}
mkdir -p "$(dirname "$RAN")"
COMMIT=$(git rev-parse --short HEAD 2>/dev/null || echo none)
if [[ ${FULL:-} == 1 ]]; then
    export PROBE_REPEATS=${PROBE_REPEATS:-20} # the startup probe's faults, which are deterministic
else
    SEED=${SEED:-$(git rev-parse HEAD)}
fi

STATUS=0
ROWS=()
for TARGET in "$@"; do
    BEGUN=$SECONDS
    RESULT=passed
    PARTS=""
    if [[ ${FULL:-} != 1 ]]; then
        PARTS=$("${PYTHON:-python3}" launch/ci/draw.py "$TARGET" "$SEED") || RESULT=FAILED
    fi
    if [[ $RESULT == FAILED ]] || ! make "$TARGET" ONLY="$PARTS"; then
        RESULT=FAILED
        STATUS=1
    fi
    ROWS+=("| make $TARGET | $RESULT | $((SECONDS - BEGUN)) s | ${PARTS:-all} |")
    printf '%s\t' "$(date -u +%FT%TZ)" "$COMMIT" "$TARGET" "$RESULT" "$((SECONDS - BEGUN))" >>"$RAN"
    echo "${PARTS:-all}" >>"$RAN"
done

printf '%s\n' '| target | result | time | parts |' '|---|---|---|---|' "${ROWS[@]}" |
    tee -a "${GITHUB_STEP_SUMMARY:-/dev/null}"
exit "$STATUS"
