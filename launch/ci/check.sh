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
# `make test` runs in a copy of the tracked files that lies where a user's may: without .git, in a
# path with the package's name, torch's, a space and a letter outside ASCII. Its environment has the
# packages of this checkout's.
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

WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT

# Makes the copy; prints its folder.
copied() {
    local copy="$WORK/a plâce/torch/megatron_lossagg" venv
    venv=$(make --silent environment | tail -n 1) && mkdir -p "$copy" runs &&
        git ls-files -z | tar --create --null --files-from - --ignore-failed-read |
        tar --extract --directory "$copy" && ln -s "$PWD/runs" "$copy/runs" &&
        "$venv/bin/python" tests/support/own_environment.py "$copy/$venv" --without-pip &&
        "$venv/bin/python" -m pip --python "$copy/$venv/bin/python" install --quiet --no-deps \
            --no-build-isolation --editable "$copy" && touch "$copy/$venv/installed" && echo "$copy"
}

STATUS=0
ROWS=()
for TARGET in "$@"; do
    BEGUN=$SECONDS
    RESULT=passed
    PARTS=""
    WHERE=()
    if [[ ${FULL:-} != 1 ]]; then
        PARTS=$("${PYTHON:-python3}" launch/ci/draw.py "$TARGET" "$SEED") || RESULT=FAILED
    fi
    if [[ $TARGET == test ]]; then
        COPY=$(copied) && WHERE=(--directory "$COPY") || RESULT=FAILED
    fi
    if [[ $RESULT == FAILED ]] || ! make "${WHERE[@]}" "$TARGET" ONLY="$PARTS"; then
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
